"""A gate that is ended from outside: by a signal, or with its terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.build.killing import hear_interrupts
from tests.gate.lab import HANG, alive


def wait_for_text(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_gate_that_is_ended_leaves_nothing_behind(lab, end, jobs):
    child = lab.folder / "child"
    text = HANG.format(pid=str(child)).replace("start_new_session=True", "")
    lab.write("test_a_hang.py", text.replace("(5)", "(99)"))
    gate = lab.start("--jobs", jobs, stderr=subprocess.DEVNULL, preexec_fn=hear_interrupts)
    wait_for_text(child)
    gate.send_signal(end)
    assert gate.wait(20) == (-end if end == signal.SIGKILL else 130)
    deadline = time.monotonic() + 10
    while alive(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if end == signal.SIGKILL:
        assert not lab.report_path.exists()
    else:  # what had ended until then is not lost, and is no pass
        assert any("interrupted" in fault for fault in lab.facts["faults"])
        assert lab.outcomes["test_a_hang.py::test_hang"] == "not-run"


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_closed(lab, nohup):
    """As where the connection to the GPU machine is lost: the report is there, and under nohup a pass."""
    started = lab.folder / "started"
    lab.write(
        "test_a_wait.py",
        f"""
        import pathlib, time
        def test_wait():
            pathlib.Path({str(started)!r}).write_text("yes")
            time.sleep({3 if nohup else 60})
        """,
    )

    def own_terminal() -> None:
        hear_interrupts()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    terminal, inside = pty.openpty()
    gate = lab.start(
        stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        preexec_fn=own_terminal,
    )  # fmt: skip
    os.close(inside)
    wait_for_text(started)
    os.close(terminal)
    gate.wait(60)
    outcome = lab.outcomes["test_a_wait.py::test_wait"]
    if nohup:
        assert outcome == "passed"
        assert not lab.facts["faults"]
    else:
        assert outcome == "not-run"
        assert any("interrupted" in fault for fault in lab.facts["faults"])
