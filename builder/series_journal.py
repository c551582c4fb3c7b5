"""The series' files changed as one: written down first, then done, and done again after a kill.

A patch file that lies unlisted makes every command refuse the series, and no order of writes avoids
that for renamed patches. So an export first writes ``patches/TAG/.export`` with all that it is
about to do; whoever reads the series next finishes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from builder import atomic
from builder.console import say
from builder.errors import SeriesError


def change(folder: Path, written: Mapping[str, bytes], removed: tuple[str, ...]) -> None:
    """Write and remove files of the series' folder: after a kill all of it is done, or nothing.

    :param written: UTF-8 bytes by path relative to the folder (``../common/...`` too), in order.
    """
    plan = {
        "written": {name: data.decode() for name, data in written.items()},
        "removed": list(removed),
        "before": {name: _digest(folder / name) for name in (*written, *removed)},
    }
    atomic.write_text(_journal(folder), json.dumps(plan, indent=1))
    _carry_out(folder)


def finish(folder: Path) -> None:
    """Carry out what an export that was killed had begun; mostly there is nothing to do.

    :raises SeriesError: its files were changed by hand since.
    """
    if _journal(folder).exists():
        say(f"{folder}: an export was interrupted; it is finished now")
        _carry_out(folder)


def _carry_out(folder: Path) -> None:
    journal = _journal(folder)
    try:
        plan = json.loads(journal.read_bytes())
    except FileNotFoundError:
        return  # another process has just finished it
    after = {name: text.encode() for name, text in plan["written"].items()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in after.items()}
    changed = [
        name
        for name, before in plan["before"].items()
        if _digest(folder / name) not in (before, digests.get(name))
    ]
    if changed:
        raise SeriesError(
            "an export was interrupted, and files that it was to write were changed since",
            where=str(folder),
            details=tuple(changed),
            next_step=f"remove {journal} to keep the files as they are, or restore them to finish",
        )
    for name, data in after.items():
        atomic.write_bytes((folder / name).resolve(), data)
    for name in plan["removed"]:
        (folder / name).unlink(missing_ok=True)
    atomic.sync_folder(folder)
    journal.unlink(missing_ok=True)


def _journal(folder: Path) -> Path:
    return folder / ".export"


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
