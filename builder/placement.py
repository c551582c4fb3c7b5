"""Where each hunk of a patch lands, and whether that is the place that the patch means.

git puts a hunk wherever its lines match, as near as it can to the stated line: in a file that has
changed, that may be another function. Here a hunk is taken in such a file only if its pre-image
stands there once, and in the same function or class as before. What the patch calls "before" is
read from the pre-image blob where the repository has it, else from the hunk's heading. In files
that are neither Python nor C-like nothing tells a scope: there, standing once has to do.
"""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from builder.diff import FileChange, Hunk
from builder.errors import MisplacedHunkError, PatchConflictError

# git's own patterns for hunk headings: Python's (userdiff.c) and the default one
_PYTHON_HEADING = re.compile(r"^[ \t]*((class|(async[ \t]+)?def)[ \t].*)$")
_DEFAULT_HEADING = re.compile(r"^([A-Za-z_$].*)$")
_NAME = re.compile(r"^[ \t]*(?:class|(?:async[ \t]+)?def)[ \t]+(\w+)")
_C_LIKE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp", ".rs")


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
        scope = _scopes(change.path, hunk, lines, line)
        placed.append(Placed(hunk, line, line - stated, next(filter(None, scope), "")))
        result += lines[done:line]
        result += hunk.postimage
        done = line + len(hunk.preimage)
    result += lines[done:]
    return placed, "".join(result).encode("utf-8", "surrogateescape")


LOOK = "look at both places; then make the patch anew on this tree and export it"


def _stated(hunk: Hunk) -> int:
    """Return the line (from 0) at which the patch says that the pre-image begins."""
    return hunk.old_start - 1 if hunk.old_length else hunk.old_start


def _find(
    where: str, hunk: Hunk, lines: list[str], before: list[str] | None, *, same_blob: bool
) -> int:
    expected = list(hunk.preimage)
    size, stated = len(expected), _stated(hunk)
    found = [n for n in range(len(lines) - size + 1) if lines[n : n + size] == expected]
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
    if not path.endswith((".py", *_C_LIKE)):
        return
    top = "the module level" if path.endswith(".py") else "no function"
    stated = _stated(hunk)
    parsed = [text is not None and _parse(text) is not None for text in (before, lines)]
    if path.endswith(".py") and before is not None and all(parsed):
        pairs = zip(
            _scopes(path, hunk, before, stated), _scopes(path, hunk, lines, line), strict=True
        )
        meant, now = next(((old, new) for old, new in pairs if old != new), ("", ""))
        clear = True
    else:
        heading = hunk.heading if before is None else heading_at(path, before, stated)
        meant, now = _scope_of(path, heading), _scope_of(path, heading_at(path, lines, line))
        known = [lines] if before is None else [lines, before]
        clear = not meant or all(_headings(path, text)[meant] <= 1 for text in known)
    if now != meant:
        raise MisplacedHunkError(
            f"the hunk belongs to {meant or top}, but its lines now stand in {now or top} "
            f"(line {line + 1})",
            where=where,
            next_step=LOOK,
        )
    if not clear:
        raise MisplacedHunkError(
            f"the file has changed since the patch was made, and {meant!r} stands there more than "
            "once: which one the patch means cannot be told",
            where=where,
            next_step="make the patch anew on this tree and export it",
        )


def heading_at(path: str, lines: Sequence[str], line: int) -> str:
    """Return what git would write behind ``@@`` of a hunk that begins at ``line`` (from 0)."""
    pattern = _PYTHON_HEADING if path.endswith(".py") else _DEFAULT_HEADING
    for text in reversed(lines[:line]):
        if match := pattern.match(text):
            # git cuts at 80 bytes, in the middle of a character too
            return match[1].encode("utf-8", "replace")[:80].decode("utf-8", "ignore").rstrip()
    return ""


def _scope_of(path: str, heading: str) -> str:
    """Return what of a heading names the scope: Python's name, elsewhere the whole line."""
    if not path.endswith(".py"):
        return heading.rstrip()
    match = _NAME.match(heading)
    return match[1] if match else ""


def _headings(path: str, lines: Sequence[str]) -> Counter[str]:
    return Counter(
        _scope_of(path, heading_at(path, lines[n : n + 1], 1)) for n in range(len(lines))
    )


def _scopes(path: str, hunk: Hunk, lines: Sequence[str], line: int) -> list[str]:
    """Return the scope of each line that the hunk touches, if it stands at ``line``."""
    return [scope_at(path, lines, line + offset) for offset in hunk.touched]


def scope_at(path: str, lines: Sequence[str], line: int) -> str:
    """Return the dotted name of the function or class around ``line`` (from 0), "" at top level.

    A name that is defined more than once (a property's getter and setter, an overload) says which
    of them it is. Read from the syntax tree; where there is none, from the nearest heading above.
    """
    definitions = _parse(lines) if path.endswith(".py") else None
    if definitions is None:
        if not path.endswith((".py", *_C_LIKE)):
            return ""
        return _scope_of(path, heading_at(path, lines, line))
    # Python ends a line at a lone carriage return, git does not.
    number = line + 1 + sum(len(_LONE_RETURN.findall(text)) for text in lines[:line])
    inner = [name for first, last, name in definitions if first <= number <= last]
    return inner[-1] if inner else ""


def function_at(path: str, lines: Sequence[str], line: int) -> tuple[int, int, str] | None:
    """Return first line, last line (from 1) and dotted name of the function around ``line``.

    None outside of functions (a class is none) and where there is no syntax tree.
    """
    definitions = _parse(lines) if path.endswith(".py") else None
    inner = [item for item in definitions or () if item[0] <= line + 1 <= item[1]]
    found = [item for item in inner if not _CLASS.match(_head(lines, item[0]))]
    return found[-1] if found and found[-1] == inner[-1] else None


_CLASS = re.compile(r"[ \t]*class\b")


def _head(lines: Sequence[str], first: int) -> str:
    """Return the ``def`` or ``class`` line of a definition, below its decorators."""
    return next((text for text in lines[first - 1 :] if _NAME.match(text)), "")


_LONE_RETURN = re.compile(r"\r(?!\n)")


# First line, last line and name of each function and class of a file, outer ones first.
_Definitions = tuple[tuple[int, int, str], ...]


def _parse(lines: Sequence[str]) -> _Definitions | None:
    return _parse_text("".join(lines))


@lru_cache(maxsize=64)  # a patch's files, before and after, on two releases
def _parse_text(text: str) -> _Definitions | None:
    """Read the definitions from Python's syntax tree; None where the text has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's escapes in strings are not our matter
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = list(_walk(tree, ""))
    total = Counter(name for _, _, name in found)
    seen: Counter[str] = Counter()
    named = []
    for first, last, name in found:
        seen[name] += 1
        which = f" ({seen[name]} of {total[name]})" if total[name] > 1 else ""
        named.append((first, last, name + which))
    return tuple(named)


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
    for child in _statements(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            first = min([child.lineno, *(item.lineno for item in child.decorator_list)])
            yield first, child.end_lineno or child.lineno, name
            yield from _walk(child, f"{name}.")
        else:
            yield from _walk(child, prefix)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may hold a definition: expressions are most of a tree, and hold none."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        below = getattr(node, field, None)
        if isinstance(below, list):
            yield from below


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
