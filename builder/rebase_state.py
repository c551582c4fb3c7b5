"""Where a rebase stands: one JSON file in ``.rebase/TAG`` of the project, replaced as a whole.

It changes at three kinds of moments: when a rebase begins, when it stops for a person, and when that
person's answer is taken. What lies between is worked out again after a kill: it takes seconds and
gives the same commits. A person's own work is never only in here: it is in the work tree beside it,
a clone that needs nothing of the cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder import atomic
from builder.errors import RebaseStateError
from builder.locations import Project

FORMAT = 1
DROPPED = "dropped"
RESOLVED = "resolved by hand"


@dataclass(frozen=True)
class Review:
    """A hunk that a person should look at, with its surroundings as they are now."""

    path: str
    line: int
    offset: int
    scope: str
    around: str
    text: str


@dataclass(frozen=True)
class Done:
    """A patch that is through: as a commit, or dropped (``commit`` is None).

    :param outcome: clean, moved, merged, resolved by hand, or dropped.
    """

    line: str
    subject: str
    outcome: str
    reason: str
    commit: str | None
    review: tuple[Review, ...] = ()


@dataclass(frozen=True)
class Stop:
    """The patch that waits for a person.

    :param head: the commit on which the work tree stands.
    :param is_laid: the work tree holds it; False only if the tool was killed on the way there.
    :param is_surely_upstream: --auto-drop leaves it out.
    :param paths: the files that the patch changes, by their names in the new release.
    :param review: its hunks that did find a place, and want to be looked at beside the conflict.
    """

    line: str
    subject: str
    state: str
    reason: str
    head: str
    is_laid: bool
    details: tuple[str, ...] = ()
    is_surely_upstream: bool = False
    paths: tuple[str, ...] = ()
    review: tuple[Review, ...] = ()


@dataclass(frozen=True)
class RebaseState:
    """A rebase under way.

    :param patches: each line of the old series with the sha256 of its file.
    :param drop: numbers of the patches that the maintainer said to drop.
    :param is_finishing: every patch is through; the new folder is being put in its place.
    :param base: the commit of the release onto which it goes.
    """

    from_tag: str
    onto: str
    patches: tuple[tuple[str, str], ...]
    drop: tuple[int, ...] = ()
    auto_drop: bool = False
    done: tuple[Done, ...] = ()
    stop: Stop | None = None
    is_finishing: bool = False
    base: str = ""

    def head(self, base: str) -> str:
        """Return the last commit that was made, or ``base``."""
        return next((d.commit for d in reversed(self.done) if d.commit), base)


def folder_of(project: Project, onto: str) -> Path:
    return project.root / ".rebase" / onto


def under_way(project: Project) -> list[str]:
    """Return the tags onto which rebases are under way."""
    found = (path.parent.name for path in (project.root / ".rebase").glob("*/state.json"))
    return sorted(name for name in found if not name.startswith(atomic.PREFIX))


def save(project: Project, state: RebaseState) -> None:
    text = json.dumps({"format": FORMAT, **asdict(state)}, indent=1)
    atomic.write_text(folder_of(project, state.onto) / "state.json", text + "\n")


def load(project: Project, onto: str) -> RebaseState | None:
    """Return the state of the rebase onto ``onto``; None where none is under way.

    :raises RebaseStateError: the file is not one that this tool wrote.
    """
    path = folder_of(project, onto) / "state.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(data)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise RebaseStateError(
            f"not a state that this tool wrote: {type(error).__name__}: {error}",
            where=str(path),
            next_step=f"save what is yours in {path.parent / 'tree'}, then: python -m builder "
            f"rebase --abort --onto {onto}",
        ) from error


def _from_json(data: dict[str, Any]) -> RebaseState:
    def reviews(item: Mapping[str, Any]) -> tuple[Review, ...]:
        return tuple(Review(**review) for review in item.get("review", ()))

    def done(item: Mapping[str, Any]) -> Done:
        return Done(**{**item, "review": reviews(item)})

    def stopped(item: Mapping[str, Any]) -> Stop:
        paths = tuple(item.get("paths", ()))  # neither stands in a state of an older version
        return Stop(**{**item, "details": tuple(item["details"]), "paths": paths,
                       "review": reviews(item)})  # fmt: skip

    if data.pop("format") != FORMAT:
        raise ValueError("another format")
    stop = data["stop"]
    return RebaseState(
        **{
            **data,
            "patches": tuple((line, sha256) for line, sha256 in data["patches"]),
            "drop": tuple(data["drop"]),
            "done": tuple(done(item) for item in data["done"]),
            "stop": stopped(stop) if stop else None,
        }
    )


def number_of(line: str) -> int:
    """Return the number of a patch from its line in the series file."""
    return int(line.rpartition("/")[2][:4])
