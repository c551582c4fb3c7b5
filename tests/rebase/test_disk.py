"""A rebase on disks that are full or read-only: the cause is named, and it goes on afterwards."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap

import pytest

from tests.commands import ROOT
from tests.rebase.moving import ENGINE, NEW, OLD, edit

PATH, OTHER = "vllm/engine.py", "vllm/other.py"
HOOK = ("    engine.open(name)\n", "    engine.open(name)\n    engine.hook(name)\n")
TAKEN = ("    engine.open(name)\n", "    engine.open_all(name)\n")
# what does not fit, as it does not compress
LONG = "".join(f"# {n * 104729 % 99991} {n * 7919 % 9973}\n" for n in range(4000))


@pytest.fixture
def stopped(moving):
    """A rebase whose first patch is resolved; the second one adds a file of 60 kB."""
    case = moving(
        {PATH: ENGINE, OTHER: ENGINE}, {PATH: ENGINE, OTHER: edit(ENGINE, TAKEN)},
        ("hook", {OTHER: edit(ENGINE, HOOK)}), ("long", {"vllm/long.py": LONG}),
    )  # fmt: skip
    case.begin(code=30)
    case.user.write({OTHER: edit(ENGINE, TAKEN, ("    engine.close()\n", "    engine.hook()\n"))})
    case.user.git("add", OTHER)
    return case


def on_a_disk(case, folder, script):
    """Run a script with a file system of 20 MB in the place of a folder, holding what that held."""
    copy, tool = case.fork.root / "copy", [sys.executable, "-m", "builder", "--project"]
    script = f"""
        cp -a {folder} {copy} && mount -t tmpfs -o size=20m none {folder} || exit 99
        cp -a {copy}/. {folder}
        tool() {{ {shlex.join([*tool, str(case.fork.project.root)])} "$@"; echo "ended $?"; }}
        fill() {{ dd if=/dev/zero of={folder}/fill bs=1k 2>/dev/null; truncate -s -$1k {folder}/fill; }}
        {script}
        rm -f {folder}/fill
        tool rebase --continue
        tool series --tag {NEW}
        """
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel gives no mount namespaces here")
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", textwrap.dedent(script)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "VLLM_GLM5_CACHE": str(case.fork.cache.root),
             "PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
    )  # fmt: skip
    assert "Traceback" not in run.stderr
    return run, [line for line in run.stdout.splitlines() if line.startswith("ended")]


@pytest.mark.parametrize("what", ["cache", "project"])
@pytest.mark.parametrize("free", [0, 8, 28])  # kilobytes
def test_full(stopped, what, free):
    """git mailinfo cuts a file and says nothing, which read as a patch that somebody encoded."""
    folder = stopped.fork.cache.root if what == "cache" else stopped.fork.project.root
    run, ended = on_a_disk(stopped, folder, f"fill {free}; tool rebase --continue")
    assert ended == ["ended 6", "ended 0", "ended 0"], run.stderr
    assert "no space left on the device" in run.stderr


def test_read_only(stopped):
    folder = stopped.fork.project.root
    run, ended = on_a_disk(
        stopped, folder,
        f"mount -o remount,ro {folder}; tool rebase --continue; tool rebase --status; "
        f"tool upstream --tag {OLD} --onto {NEW}; tool rebase --abort; mount -o remount,rw {folder}",
    )  # fmt: skip
    assert ended == ["ended 1", "ended 0", "ended 0", "ended 1", "ended 0", "ended 0"], run.stderr
    assert run.stderr.count("Read-only file system") == 2
    assert "is resolved" in run.stdout
