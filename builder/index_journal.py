"""What belongs together in an index changes together: written down first, then done.

A wheel and its alias lie in two projects, with a page each, and no file system replaces two files at
once. So a publisher first writes ``INDEX/.publish.json`` with all that it is about to do. Whoever
publishes next after a kill finishes it, or takes it back where a wheel had not arrived.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from builder import atomic
from builder.console import say
from builder.errors import BuilderError
from builder.index_pages import write_pages, yanked_path


@contextmanager
def as_one(
    index: Path, new: Sequence[Path], marks: Mapping[Path, str | None], folders: Sequence[Path]
) -> Iterator[None]:
    """Do what the block does as one; write the pages of the folders, in order, at its end.

    What is new goes where the block fails. The caller holds the index's lock.

    :param new: wheels that the block puts into the index, and that are not there yet.
    :param marks: why a wheel is yanked, or None where it is not any more.
    """
    journal = _journal(index)
    plan = {
        "new": [str(path.relative_to(index)) for path in new],
        "marks": {str(path.relative_to(index)): reason for path, reason in marks.items()},
        "folders": [str(folder.relative_to(index)) for folder in folders],
    }
    if new or marks:
        atomic.write_text(journal, json.dumps(plan, indent=1))
    try:
        yield
    except BaseException:
        _take_back(new)
        journal.unlink(missing_ok=True)
        raise
    _finish(journal, marks, folders)


def recover(index: Path) -> None:
    """Finish what a killed publisher had begun, or take it back; the caller holds the lock.

    :raises BuilderError: the file that says what it had begun is not one.
    """
    journal = _journal(index)
    if not journal.exists():
        return
    try:
        plan = json.loads(journal.read_bytes())
        new = [index / name for name in plan["new"]]
        marks = {index / name: reason for name, reason in plan["marks"].items()}
        folders = [index / name for name in plan["folders"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuilderError(
            f"not what a publisher writes down: {error}",
            where=str(journal),
            next_step="remove that file, then publish the last version again",
        ) from error
    if all(path.exists() for path in new):
        say(f"{index}: a publisher was killed; what it had begun is finished now")
        _finish(journal, marks, folders)
        return
    say(f"{index}: a publisher was killed; what it had begun is taken back")
    _take_back(new)
    journal.unlink()


def _finish(journal: Path, marks: Mapping[Path, str | None], folders: Sequence[Path]) -> None:
    for wheel, reason in marks.items():
        if reason is None:
            yanked_path(wheel).unlink(missing_ok=True)
        else:
            # Whatever a shell passed: what cannot be written would stop all publishers after it.
            atomic.write_bytes(yanked_path(wheel), f"{reason}\n".encode(errors="replace"))
    for folder in folders:
        write_pages(folder)
    journal.unlink(missing_ok=True)


def _take_back(new: Sequence[Path]) -> None:
    """Remove wheels that no page lists: the next publisher would list a part of the whole."""
    for path in new:
        path.unlink(missing_ok=True)


def _journal(index: Path) -> Path:
    return index / ".publish.json"
