"""Runs the command line in forks of one process that has imported all it needs.

A new Python takes a second to start, in which nothing is published and no death tells anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.build.killing import Span

DRIVER = """
import glob, json, os, signal, sys, tempfile, time
import keyring, packaging.metadata, pypi_simple, requests, twine.repository, twine.package
import twine.utils
from builder import channels, cli, cli_publish, policy, publish, remote_index

def child(command, output):
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.argv = ["builder", *command]
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    os._exit(cli.main())

print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    outputs = [tempfile.TemporaryFile("w+") for _ in order["commands"]]
    children = []
    for command, output in zip(order["commands"], outputs):
        pid = os.fork()
        if pid == 0:
            child(command, output)
        children.append(pid)
    if order["kill_after"] is not None:
        deadline = time.monotonic() + 20
        while order["kill_when"] and not glob.glob(order["kill_when"]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        time.sleep(order["kill_after"])
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    texts = []
    for output in outputs:
        output.seek(0)
        texts.append(output.read())
        output.close()
    print(json.dumps({"codes": codes, "texts": texts}), flush=True)
"""


class Forks:
    def __init__(self, tool, **variables) -> None:
        self.root = str(tool.release.root)
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER], env=tool.variables | variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=os.fspath(tool.release.root),
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.process:
            self.process.stdin.close()

    def run(self, *commands, kill_after=None, kill_when=None):
        """Run commands at once; return their exit codes and what they printed.

        :param kill_after: seconds after which all are killed.
        :param kill_when: a pattern; the seconds begin when a file of such a name is there.
        """
        words = [["--project", self.root, *map(str, command)] for command in commands]
        order = {"commands": words, "kill_after": kill_after}
        order["kill_when"] = None if kill_when is None else str(kill_when)
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return list(zip(answer["codes"], answer["texts"], strict=True))

    def finish(self, command):
        """Run a command to its end."""
        ((code, text),) = self.run(command)
        assert code == 0, text

    def span(self, command):
        """Run a command to its end; return how long it took."""
        span = Span()
        span.of(lambda: self.finish(command))
        return span
