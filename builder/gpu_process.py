"""One process that runs tests of the GPU suite, followed from its start to its end.

A plugin for pytest (``under_test/vllm_glm5_gate.py``) writes what happens; what it no longer can
write, since the process is gone or hangs, is concluded here.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from builder.console import say
from builder.gpu_report import BAD, Figure, Outcome, TestResult

OUTSIDE_LIMIT = 600.0  # seconds for what is no test: imports, collection, the end
HEARTBEAT = 30.0  # seconds between two lines about a test that goes on
PLUGIN = "vllm_glm5_gate"

_POLL = 0.05
_DEATH_LIMIT = 30.0  # seconds that a killed process may take; engines free 100 GB and more
_LONGEST, _MOST_FAULTS = 400, 50  # characters, lines
_READ = 4 << 20  # bytes of a log that are searched for the cause of a death
_COOKIE = "VLLM_GLM5_GATE_RUN"
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
# pytest's exit codes of a run in which no test failed: all ran, it was stopped, none was selected.
_UNHURT = frozenset({0, 2, 5})
_EVIDENCE = re.compile(
    r"Fatal Python error|CUDA error|CUDA_ERROR|Xid|fallen off the bus|GPU is lost|out of memory"
    r"|terminate called|Killed"
)


@dataclass(frozen=True)
class Suite:
    """What to run, and where.

    :param folder: the suite, a copy that nobody else changes.
    :param scratch: an empty folder; the working folder of the suite's processes.
    :param variables: the environment of the interpreter under test.
    :param packages: import packages whose files are to be named at the end.
    :param only: patterns of test names; empty for all.
    :param limit: seconds for a test without a timeout mark.
    :param jobs: how many processes run tests at the same time.
    :param gpu_lost: asks whether the cards still answer; why not, or nothing.
    """

    python: Path
    folder: Path
    scratch: Path
    variables: Mapping[str, str]
    packages: tuple[str, ...]
    only: tuple[str, ...]
    limit: float
    jobs: int
    log: Path
    gpu_lost: Callable[[], str]


@dataclass
class Progress:
    """What is known so far; shared by the threads of a run, each of which adds its own tests.

    :param stop: set where nothing more is to be started, and what runs is to be ended.
    """

    limits: dict[str, float] = field(default_factory=dict)  # in order of collection
    alone: set[str] = field(default_factory=set)
    results: dict[str, TestResult] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    imported: dict[str, str] = field(default_factory=dict)
    selected: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)


class Process:
    """One pytest in a session of its own.

    :param tests: what it runs; None for all that are selected.
    :param collect: only find out which tests there are.
    """

    def __init__(
        self,
        suite: Suite,
        progress: Progress,
        tests: Sequence[str] | None,
        *,
        collect: bool = False,
    ) -> None:
        self.suite = suite
        self.progress = progress
        self.tests = tests
        self.collect = collect
        self.last: str | None = None
        self.running: str | None = None
        self.began = self.last_word = time.monotonic()
        self.log_from = 0
        self.clean = True
        self.done: int | None = None
        self.events = suite.scratch / "events"
        self.figures_file = suite.scratch / "figures.json"
        self.figures: dict[str, Figure] = {}
        self.cookie = uuid.uuid4().hex

    def run(self) -> bool:
        """Follow the process to its end; False where something went wrong in it."""
        job = self.suite.scratch / "job.json"
        folders = [f"{self.suite.folder}/", f"{self.suite.scratch}/", f"{Path.home()}/"]
        job.write_text(
            json.dumps(
                {"tests": [] if self.collect else self.tests, "only": self.suite.only, "packages": self.suite.packages,
                 "folders": folders}
            )
        )  # fmt: skip
        for left in (self.events, self.figures_file):
            left.unlink(missing_ok=True)
        (self.suite.scratch / "pytest.ini").write_text("[pytest]\n")
        with self.suite.log.open("ab") as log:
            process = subprocess.Popen(
                self._command(), env=self._variables(job), cwd=self.suite.scratch,
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                self._follow(process)
            finally:
                if not _end_all(process, self.cookie):
                    self.clean = False
                    self._note(
                        "a process of the suite cannot be killed: it waits in the kernel, "
                        "as for a driver that does not answer"
                    )
        return self.clean

    def _command(self) -> list[str]:
        scratch, folder = self.suite.scratch, self.suite.folder
        return [
            str(self.suite.python), "-m", "pytest", str(folder), "--rootdir", str(folder),
            "-c", str(scratch / "pytest.ini"), "-p", PLUGIN, "-p", "no:cacheprovider",
            "--basetemp", str(scratch / "tmp"), "-v", "--tb=short", "--color=no",
        ]  # fmt: skip

    def _variables(self, job: Path) -> dict[str, str]:
        return {
            **self.suite.variables,
            "VLLM_GLM5_GATE_EVENTS": str(self.events),
            "VLLM_GLM5_GATE_JOB": str(job),
            "VLLM_GLM5_FIGURES": str(self.figures_file),
            # Empty at first, as with a new user; and two engines never write one compile cache.
            "VLLM_CACHE_ROOT": str(self.suite.scratch / "vllm-cache"),
            # The environment's other plugins are no part of the suite.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            _COOKIE: self.cookie,
            # setproctitle, by which vLLM names its processes, else writes over what /proc shows of their
            # variables: the cookie would be gone.
            "SPT_NOENV": "1",
        }

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        lines = _Lines(self.events)
        self._rest(OUTSIDE_LIMIT)
        try:
            while self._goes_on(process, lines):
                time.sleep(_POLL)
        except KeyboardInterrupt:  # what it wrote until then counts
            self._read(lines)
            raise

    def _read(self, lines: _Lines) -> None:
        for line in lines.new():
            try:
                self._take(json.loads(line))
            except _MALFORMED:  # the suite knows the file's name
                self.clean = False
                self._note(
                    f"no event of the gate's plugin: {_plain(line.decode(errors='replace'))}"
                )

    def _goes_on(self, process: subprocess.Popen[bytes], lines: _Lines) -> bool:
        code = process.poll()  # first: what it wrote before its end is read after it
        self._read(lines)
        if code is not None:
            self._ended(code)
            return False
        now = time.monotonic()
        if now > self.deadline:
            self._hangs(process)
            return False
        if self.progress.stop.is_set():
            return False
        if self.running and now - self.last_word > HEARTBEAT:
            self.last_word = now
            say(f"      {self.running}: {now - self.began:.0f} of at most {self.limit:.0f} s")
        return True

    def _rest(self, limit: float) -> None:
        self.limit = limit
        self.began = self.last_word = time.monotonic()
        self.deadline = self.began + limit

    def _take(self, event: dict[str, Any]) -> None:
        progress = self.progress
        match event["event"]:
            case "collected" if self.tests is None:
                for name, limit, alone in event["tests"]:
                    progress.limits[name] = limit or self.suite.limit
                    if alone:
                        progress.alone.add(name)
                progress.selected = [n for n in progress.limits if _selected(n, self.suite.only)]
            case "uncollected" if event["skipped"]:
                if self.tests is None:
                    self._end(event["name"], Outcome.SKIPPED, 0.0, event["reason"], {})
            case "uncollected":
                self.clean = False
                name, reason = event["name"] or "the suite", _plain(event["reason"])
                self._note(f"{name} cannot be collected: {reason}")
            case "start":
                self.running = event["name"]
                self.log_from = self.suite.log.stat().st_size
                self._rest(progress.limits.get(self.running or "", self.suite.limit))
            case "end":
                self.running = None
                outcome = Outcome(event["outcome"])
                self._end(
                    event["name"], outcome, event["seconds"], event["reason"], event["figures"]
                )
                self._rest(OUTSIDE_LIMIT)
            case "astray":
                self.clean = False
                name, reason = event["name"], _plain(event["reason"] or event["outcome"])
                self._note(f"{name}: a process that it forked came out of the test: {reason}")
            case "done":
                self.done = event["status"]
                progress.imported |= event["imported"]

    def _end(
        self, name: str, outcome: Outcome, seconds: float, reason: str, figures: dict[str, Any]
    ) -> None:
        progress = self.progress
        # A process hands over all its figures each time; those of this test are new or changed.
        told = {key: _figure(value) for key, value in figures.items()}
        if not math.isfinite(seconds):  # which no report can hold
            raise ValueError(f"a test that took {seconds} s")
        new = {key: value for key, value in told.items()
               if key not in self.figures or self.figures[key] != value}  # fmt: skip
        self.figures |= told
        self.last = name
        reason = _plain(reason)
        if (before := progress.results.get(name)) is not None:
            self.clean = False
            self._note(f"{name} ended twice: {before.outcome}, then {outcome}")
            if before.outcome in BAD:
                return
        progress.results[name] = TestResult(name, outcome, seconds, reason, new)
        self.clean &= outcome not in BAD
        total = len(progress.selected) or "?"
        why = f": {reason}" if reason else ""
        say(f"[{len(progress.results)}/{total}] {outcome} {seconds:.1f} s {name}{why}")

    def _note(self, fault: str) -> None:
        """Put on record why the run is no pass; a suite that floods its report has said enough."""
        if len(self.progress.faults) < _MOST_FAULTS:
            self.progress.faults.append(fault)

    def _left_figures(self) -> dict[str, Any]:
        """Return what a process that can no longer hand them over has put on record."""
        try:
            return dict(json.loads(self.figures_file.read_text()))
        except (OSError, *_MALFORMED):
            return {}

    def _ended(self, code: int) -> None:
        how = f"died by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if self.running is not None:
            seconds = time.monotonic() - self.began
            why = f"its process {how}{self._evidence()}"
            self._end(self.running, Outcome.CRASH, seconds, why, self._left_figures())
        elif code != self.done or (self.clean and code not in _UNHURT):
            # pytest said another code than the process has, or a code for which no test accounts.
            self.clean = False
            if not self.progress.faults:
                self._note(f"the suite's process {how} outside of a test{self._evidence()}")

    def _hangs(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)  # the plugin writes all stacks into the log
        time.sleep(1)
        _end_all(process, self.cookie)
        reason = f"not over after {self.limit:.0f} s; killed, its stacks are in the log"
        if self.running is not None:
            self._end(self.running, Outcome.HANG, self.limit, reason, self._left_figures())
        else:
            self.clean = False
            self._note(f"the suite hangs outside of a test: {reason}")

    def _evidence(self) -> str:
        """Return what the log says about a death, if it says something that we know."""
        with self.suite.log.open("rb") as log:
            log.seek(max(self.log_from, log.seek(0, os.SEEK_END) - _READ))
            lines = log.read().decode(errors="replace").splitlines()
        found = [line.strip() for line in lines if _EVIDENCE.search(line)]
        return f": {_plain(found[0][:200])}" if found else ""


class _Lines:
    """Whole lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[bytes] | None = None
        self.rest = b""

    def new(self) -> Iterator[bytes]:
        if self.file is None:
            if not self.path.exists():
                return
            self.file = self.path.open("rb")
        *lines, self.rest = (self.rest + self.file.read()).split(b"\n")
        yield from lines


def _end_all(process: subprocess.Popen[bytes], cookie: str) -> bool:
    """Kill the process, its group, and whatever it started that left the group.

    Engines start sessions of their own; what they all inherit is the environment.

    :returns: False where the process is still there: a call into the driver of a card that is
        gone may never return, and until it does no signal ends the process.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    needle = f"{_COOKIE}={cookie}".encode()
    for _ in range(100):
        left = list(_holders(needle))
        if not left:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.05)
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(_DEATH_LIMIT)
    except subprocess.TimeoutExpired:
        return False
    return True


def _holders(needle: bytes) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _selected(name: str, only: tuple[str, ...]) -> bool:
    from fnmatch import fnmatchcase  # noqa: PLC0415

    return not only or any(name == pattern or fnmatchcase(name, pattern) for pattern in only)


def _plain(text: str) -> str:
    """Keep from a terminal, and from the report, what is no text: escapes, half characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:_LONGEST])


def _figure(value: object) -> Figure:
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
