"""Work that is killed without any clean-up at its N-th change of a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

COMMAND = """
import sys
from tests.series.sudden_death import die_at
number, below, sys.argv = int(sys.argv[1]), sys.argv[2], ["builder", *sys.argv[3:]]
from builder import cli
die_at(number, below)
sys.exit(cli.main())
"""


def die_at(number: int, below: str) -> None:
    """Make this process kill itself just before its N-th change of a file below the folder.

    The moments are the interpreter's audit events; what git writes is not among them.
    """
    seen = 0

    def kill_at_the_moment(event, arguments):
        nonlocal seen
        writes = event in ("os.rename", "os.remove", "os.chmod", "os.truncate", "os.link")
        if event == "open":
            writes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and any(str(argument).startswith(below) for argument in arguments[:2]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_at_the_moment)


def killed_at(number: int, below: Path, work: Callable[[], object]) -> bool:
    """Do the work in a fork that dies at its N-th change; tell whether it came to that."""
    process = os.fork()
    if not process:
        try:
            die_at(number, str(below))
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def command_killed_at(
    number: int, below: Path, arguments: list[str], environment: Mapping[str, str], cwd: Path
) -> bool:
    """As killed_at, of a command line of the tool, which a fork would share caches with."""
    process = subprocess.run(
        [sys.executable, "-c", COMMAND, str(number), str(below), *arguments],
        env=dict(environment), cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    return process.returncode == -signal.SIGKILL
