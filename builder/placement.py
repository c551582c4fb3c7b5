"""Where each hunk of a patch lands, and whether that is the place that the patch means.

git puts a hunk wherever its lines match, as near as it can to the stated line: in a file that has
changed, that may be another function. Here a hunk that moved is taken only if its pre-image stands
in the file once, and in the same function or class as before. What the patch calls "before" is
read from the pre-image blob where the repository has it, else from the hunk's heading.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from builder.errors import MisplacedHunkError, PatchConflictError
from builder.patchfile import FileChange, Hunk

# git's own pattern for Python (userdiff.c, "python")
_HEADING = re.compile(r"^[ \t]*((class|(async[ \t]+)?def)[ \t].*)$")
_NAME = re.compile(r"^[ \t]*(?:class|(?:async[ \t]+)?def)[ \t]+(\w+)")


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
        line = _find(patch, change, hunk, lines, done, before_lines, same_blob=same_blob)
        stated = hunk.old_start - 1 if hunk.old_length else hunk.old_start
        placed.append(Placed(hunk, line, line - stated, scope_at(lines, line + hunk.first_change)))
        result += lines[done:line]
        result += hunk.postimage
        done = line + len(hunk.preimage)
    result += lines[done:]
    return placed, "".join(result).encode("utf-8", "surrogateescape")


def _find(
    patch: str,
    change: FileChange,
    hunk: Hunk,
    lines: list[str],
    start: int,
    before: list[str] | None,
    *,
    same_blob: bool,
) -> int:
    expected = hunk.preimage
    stated = hunk.old_start - 1 if hunk.old_length else hunk.old_start
    candidates = [
        line
        for line in range(start, len(lines) - len(expected) + 1)
        if tuple(lines[line : line + len(expected)]) == expected
    ]
    where = f"{patch}: {change.path}, hunk {hunk.number}"
    if not candidates:
        raise PatchConflictError(
            f"the lines that the hunk expects near line {hunk.old_start} are not there",
            where=where,
            details=_instead(expected, lines, stated),
            next_step="python -m builder edit, change the patch to fit this tree, then export; "
            "nothing was built",
        )
    if stated in candidates:
        line = stated
        if same_blob:
            return line
    elif len(candidates) > 1:
        raise MisplacedHunkError(
            f"the hunk is not at line {hunk.old_start} any more, and its lines stand at "
            f"{len(candidates)} places ({', '.join(str(n + 1) for n in candidates[:6])})",
            where=where,
            next_step="give the patch more context: python -m builder edit, then export",
        )
    else:
        line = candidates[0]
    _check_scope(where, hunk, lines, line, before)
    return line


def _check_scope(
    where: str, hunk: Hunk, lines: list[str], line: int, before: list[str] | None
) -> None:
    now = scope_at(lines, line + hunk.first_change)
    if before is not None:
        stated = hunk.old_start - 1 if hunk.old_length else hunk.old_start
        meant = scope_at(before, stated + hunk.first_change)
        known = True
    else:
        meant = _scope_of_heading(hunk.heading)
        now = _scope_of_heading(heading_at(lines, line))
        named = [m[1] for text in lines if (m := _NAME.match(text))].count(meant)
        known = named <= 1 or not meant
    if now != meant:
        raise MisplacedHunkError(
            f"the hunk belongs to {meant or 'the module level'}, but its lines now stand in "
            f"{now or 'the module level'} (line {line + 1})",
            where=where,
            next_step="look at both places; then python -m builder edit, and export",
        )
    if not known:
        raise MisplacedHunkError(
            f"the hunk moved, and several functions are called {meant}: which one the patch "
            "means cannot be told",
            where=where,
            next_step="export the series again from a tree of this release",
        )


def heading_at(lines: Sequence[str], line: int) -> str:
    """Return what git would write behind ``@@`` of a hunk that begins at ``line`` (from 0)."""
    for text in reversed(lines[:line]):
        if match := _HEADING.match(text):
            return match[1].rstrip()[:80]
    return ""


def _scope_of_heading(heading: str) -> str:
    match = _NAME.match(heading)
    return match[1] if match else ""


def scope_at(lines: Sequence[str], line: int) -> str:
    """Return the dotted name of the function or class around ``line`` (from 0), "" at top level.

    Read from the syntax tree; for a file that is no Python, from the nearest heading above.
    """
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return _scope_of_heading(heading_at(lines, line))
    names: list[str] = []
    body: Sequence[ast.AST] = tree.body
    while True:
        inner = next(
            (
                node
                for node in body
                if getattr(node, "lineno", 0) <= line + 1 <= (getattr(node, "end_lineno", 0) or 0)
                or _decorated_at(node, line + 1)
            ),
            None,
        )
        if inner is None:
            return ".".join(names)
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(inner.name)
        body = list(ast.iter_child_nodes(inner))


def _decorated_at(node: ast.AST, line: int) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return bool(decorators) and decorators[0].lineno <= line <= (
        getattr(node, "end_lineno", 0) or 0
    )


def _instead(expected: Sequence[str], lines: Sequence[str], stated: int) -> tuple[str, ...]:
    """Show the expected lines beside those that are most like them."""
    size = max(len(expected), 1)
    reach = range(max(0, stated - 400), min(len(lines), stated + 400))
    best = max(
        reach,
        key=lambda n: (
            difflib.SequenceMatcher(None, expected, lines[n : n + size]).ratio(),
            -abs(n - stated),
        ),
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
