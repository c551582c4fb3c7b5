"""Kill a builder at any moment, and say what a cache still holds of it afterwards.

Works on any release: give it a command and an environment (tests/upstream uses it on the real one).
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

PREFIX = ".vllm-glm5-tmp-"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Killed:
    """What a run was doing when it was ended; ``in_time`` is False where it was done before.

    ``seconds`` is what passed until it was gone.
    """

    signal: signal.Signals
    after: float
    in_time: bool
    seconds: float
    returncode: int
    stderr: str


@dataclass
class Span:
    """How long work takes that nobody disturbs: the shortest time it was ever seen to take.

    A span measured once, while the machine was busy, puts every later death behind the end.
    """

    seconds: float = math.inf

    def saw(self, seconds: float) -> None:
        self.seconds = min(self.seconds, seconds)

    def of(self, work: Callable[[], Result]) -> Result:
        """Do the work to its end and measure it."""
        began = time.monotonic()
        result = work()
        self.saw(time.monotonic() - began)
        return result


def hear_interrupts() -> None:
    """Undo what a shell does to the processes it starts in the background, and nohup: ignore signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run_and_kill(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    *,
    after: float,
    number: signal.Signals,
    whole_group: bool,
) -> Killed:
    """Start the command, send it the signal ``after`` so many seconds, and wait for its end.

    :param whole_group: git and whatever else it started get the signal too, as Ctrl-C and a
        container's end do it; otherwise they live on as orphans for a moment, as after the
        out-of-memory killer.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=dict(environment), cwd=cwd, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hear_interrupts,  # noqa: PLW1509
    )  # fmt: skip
    try:
        process.wait(after)
        in_time = False
    except subprocess.TimeoutExpired:
        in_time = True
        try:
            (os.killpg if whole_group else os.kill)(process.pid, number)
        except ProcessLookupError:
            in_time = False
    assert process.stderr is not None
    stderr = process.stderr.read().decode(errors="replace")
    process.stderr.close()
    process.wait()
    seconds = time.monotonic() - began
    return Killed(number, after, in_time, seconds, process.returncode, stderr)


def moments(count: int, duration: float, seed: int) -> Iterator[tuple[float, signal.Signals, bool]]:
    """Yield moments spread over a run of so many seconds, SIGKILL and SIGINT in turn."""
    chance = random.Random(seed)
    for number in range(count):
        after = duration * (number + chance.random()) / count
        yield after, (signal.SIGKILL, signal.SIGINT)[number % 2], chance.random() < 0.7


def kill_repeatedly(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    when: Iterable[tuple[float, signal.Signals, bool]],
) -> list[Killed]:
    """Run and kill the same command at each of the moments; the caller runs it to its end then."""
    return [
        run_and_kill(command, environment, cwd, after=after, number=number, whole_group=group)
        for after, number, group in when
    ]


def leftovers(*folders: Path) -> list[str]:
    """Return what no run that ended well leaves: temporary names, git's locks and garbage."""
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            is_ours = path.name.startswith((PREFIX, "tmp_pack", "tmp_obj", "fast_import_crash"))
            in_git = "vllm.git" in path.parts and (
                path.name.endswith(".lock") or path.parent.name == "worktrees"
            )
            if is_ours or in_git or path.name.endswith(".part"):
                found.append(str(path.relative_to(folder)))
    return found


def wait_until_quiet(folder: Path, seconds: float = 10.0) -> None:
    """Wait for orphans of a killed run: until nothing below the folder changes any more."""
    deadline = time.monotonic() + seconds
    before: dict[str, tuple[int, int]] = {}
    while time.monotonic() < deadline:
        now = {}
        for path in folder.rglob("*"):
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            now[str(path)] = (found.st_size, found.st_mtime_ns)
        if now == before:
            return
        before = now
        time.sleep(0.1)
