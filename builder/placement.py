"""Where each hunk of a patch lands, and whether that is the place that the patch means.

git puts a hunk wherever its lines match, as near as it can to the stated line: in a file that has
changed, that may be another function. Here a hunk is taken in such a file only if its pre-image
stands there once, in the same function or class as before, and in no other branch of it while that
one is there. What the patch calls "before" is read from the pre-image blob where the repository has
it, else from the hunk's heading, which names no branch. In files
that are neither Python nor C-like nothing tells a scope: there, the lines around it have to be the
same. A pre-image that stood there more than once before may be any of them now: that is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from builder import branches, scope
from builder.diff import FileChange, Hunk
from builder.errors import MisplacedHunkError, PatchConflictError


@dataclass(frozen=True)
class Placed:
    """A hunk with the line (counted from 0) of the file at which its pre-image begins."""

    hunk: Hunk
    line: int
    offset: int
    scope: str


def split_lines(data: bytes) -> list[str]:
    """Split at line feeds alone, as git does; undecodable bytes survive."""
    return re.findall(r"[^\n]*\n|[^\n]+$", data.decode("utf-8", "surrogateescape"))


def place(
    patch: str, change: FileChange, current: bytes, before: bytes | None, *, same_blob: bool
) -> tuple[list[Placed], bytes]:
    """Place every hunk of ``change`` in ``current``; return the places and the resulting bytes.

    :param before: the pre-image the patch was made from, or None where it is not known.
    :param same_blob: ``current`` is that pre-image.
    :raises PatchConflictError: the lines that a hunk expects are nowhere in the file.
    :raises MisplacedHunkError: they are, but not (or not only) where the patch means.
    """
    lines = split_lines(current)
    before_lines = split_lines(before) if before is not None else None
    placed: list[Placed] = []
    result: list[str] = []
    done = 0
    for hunk in change.hunks:
        where = f"{patch}: {change.path}, hunk {hunk.number}"
        stated = _stated(hunk)
        line = _find(where, hunk, lines, before_lines, same_blob=same_blob)
        if line < done:
            raise MisplacedHunkError(
                f"its lines stand at line {line + 1}, above those of the hunk before it",
                where=where,
                next_step=LOOK,
            )
        if not (same_blob or (line == stated and _same_down_to(hunk, lines, before_lines))):
            _check_scope(where, change.path, hunk, lines, line, before_lines)
        names = _scopes(change.path, hunk, lines, line)
        placed.append(Placed(hunk, line, line - stated, next(filter(None, names), "")))
        result += lines[done:line]
        result += hunk.postimage
        done = line + len(hunk.preimage)
    result += lines[done:]
    return placed, "".join(result).encode("utf-8", "surrogateescape")


LOOK = "look at both places; then make the patch anew on this tree and export it"
MAKE_IT_KNOWN = (
    "run `python -m builder series --tag` with the release that the patch was made on (the cache "
    "then knows its files) and try again; or make the patch anew on this tree and export it"
)


def _stated(hunk: Hunk) -> int:
    """Return the line (from 0) at which the patch says that the pre-image begins."""
    return hunk.old_start - 1 if hunk.old_length else hunk.old_start


def _find(
    where: str, hunk: Hunk, lines: list[str], before: list[str] | None, *, same_blob: bool
) -> int:
    expected = list(hunk.preimage)
    size, stated = len(expected), _stated(hunk)
    found = _places(hunk, lines)
    if same_blob:
        found = [stated] if stated in found else []
    elif not expected and lines:
        found = []  # the patch fills an empty file, and this one is not
    if not found:
        raise PatchConflictError(
            f"the lines that the hunk expects near line {hunk.old_start} are not there",
            where=where,
            details=_instead(expected, lines, stated),
            next_step="make the patch anew on this tree and export it; nothing was built",
        )
    if stated in found and _same_down_to(hunk, lines, before):
        return stated  # all that changed stands further down
    if len(found) == 1:
        _check_ends(where, hunk, found[0], size, lines)
        return found[0]
    raise MisplacedHunkError(
        f"the file has changed since the patch was made, and the lines of the hunk stand at "
        f"{len(found)} places ({', '.join(str(n + 1) for n in found[:6])}; the patch says "
        f"{stated + 1})",
        where=where,
        next_step="make the patch anew on this tree, with more context where that is needed",
    )


def _same_down_to(hunk: Hunk, lines: list[str], before: list[str] | None) -> bool:
    """Tell whether nothing has changed above the hunk's stated end."""
    end = _stated(hunk) + len(hunk.preimage)
    return before is not None and before[:end] == lines[:end]


def _check_ends(where: str, hunk: Hunk, line: int, size: int, lines: list[str]) -> None:
    """Refuse what git am would, but with the reason: a hunk at an end of the file stays there."""
    if hunk.old_start <= 1 and line > 0:
        end = "begins at the first line of its file"
    elif hunk.lines[-1][0] != " " and line + size < len(lines):
        end = "ends at the last line of its file"
    else:
        return
    raise PatchConflictError(
        f"the hunk {end}, and git takes it nowhere else; its lines now stand at line {line + 1} of "
        f"{len(lines)}",
        where=where,
        next_step="make the patch anew on this tree and export it; nothing was built",
    )


def _check_scope(
    where: str, path: str, hunk: Hunk, lines: list[str], line: int, before: list[str] | None
) -> None:
    """Refuse a hunk of a file that has changed, unless it is shown to stand where it belongs."""
    readable = [t is not None and scope.definitions(path, t) is not None for t in (before, lines)]
    if before is not None and all(readable):
        _check_definitions(where, path, hunk, lines, line, before)
    elif path.endswith((".py", *scope.C_LIKE)):
        _check_heading(where, path, hunk, lines, line, before)
    elif before is not None:
        _check_surroundings(where, hunk, lines, line, before)
    else:
        raise MisplacedHunkError(
            f"its lines stand at line {line + 1}, and whether that is the place that the patch "
            "means cannot be told: the file has changed, and the one that the patch was made from "
            "is not known here",
            where=where,
            next_step=MAKE_IT_KNOWN,
        )
    if before is not None and (twins := _twins(path, hunk, before)):
        raise MisplacedHunkError(
            f"the file that the patch was made from held the lines of the hunk more than once "
            f"(at {_stated(hunk) + 1} and {', '.join(str(n + 1) for n in twins[:6])}), this one "
            f"holds them once (at {line + 1}): which of them that is cannot be told",
            where=where,
            next_step=LOOK,
        )


def _check_definitions(
    where: str, path: str, hunk: Hunk, lines: list[str], line: int, before: list[str]
) -> None:
    meant = _scopes(path, hunk, before, _stated(hunk))
    now = _scopes(path, hunk, lines, line)
    if pair := next(((a, b) for a, b in zip(meant, now, strict=True) if a != b), None):
        raise _elsewhere(where, path, pair[0], pair[1], line)
    files = branches.Compared(path, before, lines)
    for offset in hunk.touched:
        found = files.strayed(_stated(hunk) + offset, line + offset)
        if found and found.is_left:
            raise MisplacedHunkError(
                f"the hunk stands in another branch: {found} (line {line + offset + 1})",
                where=where,
                next_step=LOOK,
            )


def _check_heading(
    where: str, path: str, hunk: Hunk, lines: list[str], line: int, before: list[str] | None
) -> None:
    stated = _stated(hunk)
    heading = hunk.heading if before is None else scope.heading_at(path, before, stated)
    meant = scope.name_in(path, heading)
    now = scope.name_in(path, scope.heading_at(path, lines, line))
    if now != meant:
        raise _elsewhere(where, path, meant, now, line)
    known = [lines] if before is None else [lines, before]
    if meant and any(scope.headings(path, text)[meant] > 1 for text in known):
        raise MisplacedHunkError(
            f"the file has changed since the patch was made, and {meant!r} stands there more than "
            "once: which one the patch means cannot be told",
            where=where,
            next_step="make the patch anew on this tree and export it",
        )
    moved = line != stated or not path.endswith(".py")  # a name at its line is enough in Python
    if before is None and scope.is_cut(path, heading):
        raise MisplacedHunkError(
            f"the patch names no more than the beginning of {meant!r}, and the file that it was "
            "made from is not known here: whether that is the same one cannot be told",
            where=where,
            next_step=MAKE_IT_KNOWN,
        )
    if before is None and moved and (now := _untold(path, hunk, lines, line)):
        raise MisplacedHunkError(
            f"its lines stand in {now} (line {line + 1}), and the patch names no more than "
            f"{meant or 'the module level'!r}: whether that is the same one cannot be told, as the "
            "file that the patch was made from is not known here",
            where=where,
            next_step=MAKE_IT_KNOWN,
        )


def _untold(path: str, hunk: Hunk, lines: list[str], line: int) -> str:
    """Return the scope that the hunk's heading does not name, by which it could be another; or "".

    git's heading is one line: of a method in Python its name alone, in C++ the class at best.
    """
    heading = scope.heading_line(path, lines, line)
    first = min(hunk.touched, default=0)
    if path.endswith(".py"):
        told_by_hunk = any(_TOP_LEVEL.match(text) for text in hunk.preimage[: first + 1])
        named = None if heading is None else scope.definition_at(path, lines, heading)
        if told_by_hunk or named is None or "." not in named.name:
            return ""
        outer = scope.without_which(named.name).rpartition(".")[0]
        others = scope.definitions(path, lines) or ()
        kinds = {d.is_function for d in others if scope.without_which(d.name) == outer}
        level = outer.rpartition(".")[0]
        rivals = [
            d
            for d in others
            if d.is_function in kinds
            and scope.without_which(d.name) != outer
            and (not d.is_function or d.name.rpartition(".")[0] == level)
        ]
        return named.name if rivals else ""
    for offset in hunk.touched:
        around = scope.definition_at(path, lines, line + offset)
        if around is None or around.is_open or around.first > line:
            continue
        if heading is None or heading + 1 < around.first:
            return around.name
    return ""


_TOP_LEVEL = re.compile(r"(?:class|(?:async[ \t]+)?def)[ \t]")
_SURROUNDINGS = 10  # lines on either side


def _check_surroundings(
    where: str, hunk: Hunk, lines: list[str], line: int, before: list[str]
) -> None:
    """Take a hunk in a file of which nothing is read if the lines around it are as they were."""
    stated, size = _stated(hunk), len(hunk.preimage)
    above = min(_SURROUNDINGS, stated)
    below = before[stated + size : stated + size + _SURROUNDINGS]
    same = (
        line >= above
        and lines[line - above : line] == before[stated - above : stated]
        and lines[line + size : line + size + len(below)] == below
    )
    if not same:
        raise MisplacedHunkError(
            f"its lines stand at line {line + 1}, the patch says {stated + 1}, and the "
            f"{_SURROUNDINGS} lines above and below are not those that were there: whether it is "
            "the same place cannot be told in a file of this kind",
            where=where,
            next_step=LOOK,
        )


def _twins(path: str, hunk: Hunk, before: list[str]) -> list[int]:
    """Return where else the pre-image stood, in the same scope where scopes can be read."""
    stated = _stated(hunk)
    others = [n for n in _places(hunk, before) if n != stated]
    if not others or scope.definitions(path, before) is None:
        return others

    def names(line: int) -> list[str]:
        return [scope.without_which(name) for name in _scopes(path, hunk, before, line)]

    return [n for n in others if names(n) == names(stated)]


def _places(hunk: Hunk, lines: list[str]) -> list[int]:
    """Return every line (from 0) at which the pre-image stands."""
    expected = list(hunk.preimage)
    size = len(expected)
    return [n for n in range(len(lines) - size + 1) if lines[n : n + size] == expected]


def _elsewhere(where: str, path: str, meant: str, now: str, line: int) -> MisplacedHunkError:
    top = "the module level" if path.endswith(scope.PYTHON) else "no function"
    return MisplacedHunkError(
        f"the hunk belongs to {meant or top}, but its lines now stand in {now or top} "
        f"(line {line + 1})",
        where=where,
        next_step=LOOK,
    )


def _scopes(path: str, hunk: Hunk, lines: Sequence[str], line: int) -> list[str]:
    """Return the scope of each line that the hunk touches, if it stands at ``line``."""
    return [scope.scope_at(path, lines, line + offset) for offset in hunk.touched]


def _instead(expected: Sequence[str], lines: Sequence[str], stated: int) -> tuple[str, ...]:
    """Show the expected lines beside those that are most like them."""
    if not expected:
        return ("the patch expects an empty file",)
    size = len(expected)
    reach = range(max(0, stated - 400), min(len(lines), stated + 400))
    wanted = set(expected)
    best = max(
        reach,
        key=lambda n: (len(wanted.intersection(lines[n : n + size])), -abs(n - stated)),
        default=0,
    )
    actual = lines[best : best + size]
    out = [f"- expected by the patch, + in the file (from line {best + 1}):"]
    out += [
        line.rstrip("\n")
        for line in difflib.ndiff(list(expected), list(actual))
        if not line.startswith("?")
    ]
    return tuple(out[:40])
