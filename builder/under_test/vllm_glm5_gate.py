"""The gate's plugin for pytest: writes what happens, one JSON object a line, as it happens.

pytest-reportlog writes such a file too, but no line when a test starts: which test hangs or took
the process along could not be told from it.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

_LONGEST = 400  # characters of a reason
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")  # ECMA-48

_events = os.open(os.environ["VLLM_GLM5_GATE_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_job: dict[str, Any] = json.loads(
    Path(os.environ["VLLM_GLM5_GATE_JOB"]).read_text(encoding="utf-8")
)
_parent = os.dup(0)  # before pytest puts /dev/null there
_pid = os.getpid()
_ASTRAY = 70  # EX_SOFTWARE

faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)


def _follow_parent() -> None:
    """End with the gate, however that ends: nothing may stay behind on the GPU."""
    while os.read(_parent, 1024):
        pass
    mark = f"VLLM_GLM5_GATE_RUN={os.environ.get('VLLM_GLM5_GATE_RUN')}".encode()
    for _ in range(3):  # engines have sessions of their own, and start processes meanwhile
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != _pid:
                with suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        os.kill(int(folder.name), signal.SIGKILL)
    os.killpg(os.getpgrp(), signal.SIGKILL)


threading.Thread(target=_follow_parent, daemon=True).start()


def _say(event: str, **facts: object) -> None:
    os.write(_events, (json.dumps({"event": event, **facts}) + "\n").encode())


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return what a person needs to read of a failure or a skip, on one line."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        text = str(longrepr[2]).removeprefix("Skipped: ")
    elif crash := getattr(longrepr, "reprcrash", None):
        text = str(crash.message)
    else:
        text = str(longrepr or "")
    for folder in _job["folders"]:
        text = text.replace(folder, "")
    lines = [line.strip() for line in _ESCAPES.sub("", text).splitlines()]
    if report.when == "collect":  # pytest gives a whole traceback: what was raised is enough
        lines = [line[1:].strip() for line in lines if line.startswith("E ")] or lines
    return " | ".join(filter(None, lines))[:_LONGEST]


class Gate:
    def __init__(self) -> None:
        self.outcome = "passed"
        self.reason = ""
        self.seconds = 0.0
        self.session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "alone: nothing else runs on the card meanwhile")
        config.addinivalue_line("markers", "timeout(seconds): the gate ends the test after this")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            _say("uncollected", name=report.nodeid, skipped=report.skipped, reason=_reason(report))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        alone = {item.nodeid for item in items if item.get_closest_marker("alone")}
        _say(
            "collected",
            tests=[[item.nodeid, _limit(item), item.nodeid in alone] for item in items],
        )
        left_out = [item for item in items if not _wanted(item.nodeid)]
        items[:] = [item for item in items if _wanted(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.reason, self.seconds = "passed", "", 0.0
        _say("start", name=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if os.getpid() != _pid:
            # Forked by the test, which it left: it must not run fixtures' ends and further tests.
            _say("astray", name=report.nodeid, outcome=report.outcome, reason=_reason(report))
            os._exit(_ASTRAY)
        self.seconds += report.duration
        if report.failed:
            where = "" if report.when == "call" else f"{report.when}: "
            if self.outcome != "failed":
                self.outcome, self.reason = "failed", where + _reason(report)
            # An error of CUDA stays with its process; the other tests get a new one.
            if self.session is not None:
                self.session.shouldstop = "a test failed: the rest runs in a new process"
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"
            self.reason = getattr(report, "wasxfail", None) or _reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        _say("end", name=nodeid, outcome=self.outcome, reason=self.reason, seconds=self.seconds,
             figures=_figures())  # fmt: skip

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        files = {
            name: os.path.realpath(getattr(sys.modules[name], "__file__", None) or "")
            for name in _job["packages"]
            if name in sys.modules
        }
        _say("done", status=int(exitstatus), imported=files)


def _figures() -> dict[str, Any]:
    """Return all figures that this process has put on record so far."""
    try:
        return dict(json.loads(Path(os.environ["VLLM_GLM5_FIGURES"]).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):  # what tests write may be anything
        return {}


def _wanted(name: str) -> bool:
    """The job names tests after the first process, patterns or nothing before."""
    if _job["tests"] is not None:
        return name in _job["tests"]
    return not _job["only"] or any(name == p or fnmatchcase(name, p) for p in _job["only"])


def _limit(item: pytest.Item) -> float | None:
    """Return the seconds of a mark of pytest-timeout, which the suite is written for."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return None
    given = marker.args[0] if marker.args else marker.kwargs.get("timeout")
    seconds = float(given or 0)
    # Without an end, or with none that can be reached, a test would hang for ever.
    return seconds if 0 < seconds < math.inf else None


gate = Gate()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(gate, "vllm-glm5-gate-hooks")
