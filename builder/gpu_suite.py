"""Run the GPU suite in processes of its own, and notice how each test ends.

One process runs test after test, so that models and engines which tests share are made once. After
a test that fails, hangs or takes the process along, the rest goes on in a new process: one broken
engine spoils nothing else. (pytest-forked and one process a test would make every model anew;
pytest-xdist replaces crashed workers, but neither ends a hang nor what it started.)

With ``jobs`` above 1 several such lanes run side by side, each one part of the suite after another.
A test with the mark ``alone`` (one that measures a rate, say) runs when all others have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from builder.gpu_process import Process, Progress, Suite
from builder.gpu_report import BAD, Outcome, TestResult


@dataclass(frozen=True)
class SuiteRun:
    """How the tests ended, what else went wrong, and which files the packages came from."""

    tests: tuple[TestResult, ...]
    faults: tuple[str, ...]
    imported: Mapping[str, str]
    interrupted: bool = False


def run_suite(suite: Suite) -> SuiteRun:
    """Run what is selected; each collected test has an outcome afterwards."""
    progress, interrupted = Progress(), False
    try:
        if suite.jobs == 1:
            _run_lane(suite, progress, None)
        else:
            suite.scratch.joinpath("collect").mkdir()
            first = replace(suite, scratch=suite.scratch / "collect")
            if Process(first, progress, None, collect=True).run():
                _run_lanes(suite, progress)
    except KeyboardInterrupt:
        # What ran for hours has its outcomes; a time limit around the gate must not void them.
        progress.faults.append("interrupted before the suite had ended")
        interrupted = True
    reason = "after what ended the run" if progress.faults else ""
    for name in progress.limits:
        if name not in progress.results:
            why = reason if name in progress.selected else "left out by --only"
            progress.results[name] = TestResult(name, Outcome.NOT_RUN, 0.0, why, {})
    order = [*progress.limits, *(n for n in progress.results if n not in progress.limits)]
    return SuiteRun(
        tests=tuple(progress.results[name] for name in order),
        faults=tuple(dict.fromkeys(progress.faults)),
        imported=progress.imported,
        interrupted=interrupted,
    )


def _run_lanes(suite: Suite, progress: Progress) -> None:
    alone = [name for name in progress.selected if name in progress.alone]
    shared = {name: progress.limits[name] for name in progress.selected if name not in alone}
    parts = deque(share_out(shared, suite.jobs))
    with ThreadPoolExecutor(suite.jobs) as pool:
        running = [
            pool.submit(_run_parts, _lane(suite, number), progress, parts)
            for number in range(1, min(suite.jobs, len(parts)) + 1)
        ]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
            for lane in running:
                if lane.done():
                    lane.result()
        except BaseException:
            progress.stop.set()
            raise
    if alone and not progress.stop.is_set():
        _run_lane(_lane(suite, len(running) + 1), progress, alone)


def _run_parts(lane: Suite, progress: Progress, parts: deque[list[str]]) -> None:
    while not progress.stop.is_set():
        try:
            tests = parts.popleft()
        except IndexError:
            return
        _run_lane(lane, progress, tests)


def _lane(suite: Suite, number: int) -> Suite:
    """Give a lane a working folder and a log of its own: ``NAME.2.log``."""
    scratch = suite.scratch / f"lane-{number}"
    scratch.mkdir()
    log = suite.log.with_suffix(f".{number}{suite.log.suffix}")
    log.write_bytes(b"")
    return replace(suite, scratch=scratch, log=log)


def share_out(limits: Mapping[str, float], jobs: int) -> list[list[str]]:
    """Divide tests into parts, those of the longest limits first, for ``jobs`` lanes to take in turn.

    A limit says little about how long a test takes, so a part is at most about half of a fair
    share: a lane that is done early takes another. The tests of a file stay together up to that,
    for they share models.
    """
    most = sum(limits.values()) / jobs / 2
    files: dict[str, list[str]] = {}
    for name in limits:
        files.setdefault(name.partition("::")[0], []).append(name)
    parts: list[list[str]] = []
    for tests in files.values():
        filled = most  # a file begins a part of its own
        for name in tests:
            if filled + limits[name] > most and filled > 0:
                parts.append([])
                filled = 0.0
            parts[-1].append(name)
            filled += limits[name]
    return sorted(parts, key=lambda part: -sum(limits[name] for name in part))


def _run_lane(suite: Suite, progress: Progress, tests: Sequence[str] | None) -> None:
    """Run tests in one process after another, until none is left or no card."""
    pending = tests
    while (pending is None or pending) and not progress.stop.is_set():
        process = Process(suite, progress, pending)
        clean = process.run()
        mine = progress.selected if tests is None else tests
        before, pending = pending, [name for name in mine if name not in progress.results]
        if not clean and not progress.stop.is_set() and (why := suite.gpu_lost()):
            _note_lost_gpu(progress, process.last, why)
            return
        if pending == before or process.last is None:
            if not progress.faults and pending and not progress.stop.is_set():
                progress.faults.append("the suite's process ended before its next test")
            return


def _note_lost_gpu(progress: Progress, name: str | None, why: str) -> None:
    progress.stop.set()
    progress.faults.append(f"the GPU was lost: {why}")
    last = progress.results.get(name or "")
    if last is not None and last.outcome in BAD:
        progress.results[last.name] = replace(
            last, outcome=Outcome.GPU_LOST, reason=f"{why} | {last.outcome}: {last.reason}"
        )
