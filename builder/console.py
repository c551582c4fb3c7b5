"""What a person sees while work goes on: bars on a terminal, plain lines elsewhere.

Results go to stdout; everything here goes to stderr.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PLAIN_INTERVAL = 5.0  # seconds between two progress lines where there is no terminal

Advance = Callable[[int], None]


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return what ends a command beside Ctrl-C: to be terminated, and to lose the terminal.

    Under nohup the latter is ignored, and stays so.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return signal.SIGTERM, signal.SIGHUP


def is_terminal() -> bool:
    return sys.stderr.isatty()


def say(text: str) -> None:
    """Print one line about what happens now; work goes on where nobody can read it any more."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - this module is the output


@contextmanager
def bytes_progress(label: str, total: int, start: int = 0) -> Iterator[Advance]:
    """Show bytes, rate and time left while a file of ``total`` bytes moves.

    :param start: bytes that were there already (a resumed download).
    """
    with (_bar if is_terminal() else _lines)(label, total, start) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int, start: int) -> Iterator[Advance]:
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total, completed=start)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _lines(label: str, total: int, start: int) -> Iterator[Advance]:
    began = last = time.monotonic()
    done = start

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= PLAIN_INTERVAL:
            last = now
            rate = (done - start) / (now - began)
            left = (total - done) / rate if rate else 0
            say(
                f"{label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, "
                f"{rate / 1e6:.1f} MB/s, {left:.0f} s left"
            )

    say(f"{label}: {total / 1e6:.1f} MB" + (f", resumed at {start / 1e6:.1f} MB" if start else ""))
    yield advance
    elapsed = max(time.monotonic() - began, 1e-3)
    say(f"{label}: done, {(done - start) / 1e6 / elapsed:.1f} MB/s")
