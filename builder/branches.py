"""Which branch of its function a line stands in: what tells two places of one function apart.

Read from Python's syntax tree; of other languages nothing is told.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from builder import scope, syntax

_LONE_RETURN = re.compile(r"\r(?!\n)")  # ends a line for Python, and none for git
_SHOWN = 60  # characters of a condition


@dataclass(frozen=True)
class Strayed:
    """A line that stood in one branch of its function and stands in another.

    :param meant: the branch it stood in, as a person would name it; "" for none.
    :param is_left: the function still has that branch.
    """

    meant: str
    found: str
    is_left: bool

    def __str__(self) -> str:
        meant, found = self.meant or "no branch", self.found or "no branch"
        return f"it belongs under `{meant}`, and stands under `{found}`"


@dataclass(frozen=True)
class _Branch:
    """A branch of a function.

    :param path: how it is headed, as Python writes it (line breaks do not count), with those that
        it stands in, outer ones first.
    :param number: which it is of those that are headed so: a function has many a ``try``.
    """

    path: tuple[str, ...]
    number: int


@dataclass(frozen=True)
class _Function:
    """The branches of a function's text.

    :param around: for each line, counted from 0, those that it stands in, outer ones first; None
        for a comment behind a branch, which may belong to that or to what follows.
    :param total: how many there are of each path.
    """

    around: tuple[tuple[_Branch, ...] | None, ...]
    total: Counter[tuple[str, ...]]


class Compared:
    """Two versions of a file, of which the branches around lines are compared."""

    def __init__(self, path: str, before: Sequence[str], now: Sequence[str]) -> None:
        self.path, self.before, self.now = path, before, now
        self._old, self._new = _File(path, before), _File(path, now)

    def strayed(self, line: int, new_line: int) -> Strayed | None:
        """Compare the branches around a line of each; None where they are the same, or not told.

        The two lines (from 0) stand in the same function or class. A branch whose condition
        upstream wrote anew is another one, too: then nothing is left of the one that is meant.
        """
        old, new = self._old.within(line), self._new.within(new_line)
        if old is None or new is None or old == new:
            return None
        before, now = _function(old[0]), _function(new[0])
        if before is None or now is None:
            return None
        meant, found = before.around[old[1]], now.around[new[1]]
        if meant is None or found is None:
            return None
        a, b = (branches[-1].path if branches else () for branches in (meant, found))
        if a == b:
            return _among_equals(meant, found, before, now)
        differ = [n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other]
        # Only what differs is shown; of one within the other, the branch that both are in, too.
        same = differ[0] if differ else max(min(len(a), len(b)) - 1, 0)
        return Strayed(_shown(a[same:]), _shown(b[same:]), is_left=_is_left(a, b, before, now))


def _is_left(
    meant: tuple[str, ...], found: tuple[str, ...], before: _Function, now: _Function
) -> bool:
    """Tell whether the function still has a branch that the line has left.

    From the outside in, a branch that is gone was written anew as the one found in its place: the
    loop that went along into another branch does not hide that the branch is still there. Of some
    that are headed so one is gone if there are fewer of them, and more of what is found instead.
    """
    written_anew = False
    expected = meant
    for depth in range(len(meant)):
        left, other = expected[: depth + 1], found[: depth + 1]
        if left == other:
            continue
        if depth >= len(found):
            return left in now.total
        old_other = (*meant[:depth], found[depth])
        fewer = now.total[left] < before.total[meant[: depth + 1]]
        if left in now.total and not (fewer and now.total[other] > before.total[old_other]):
            return True
        written_anew = True
        expected = (*expected[:depth], found[depth], *expected[depth + 1 :])
    return not written_anew


def _among_equals(
    meant: Sequence[_Branch], found: Sequence[_Branch], before: _Function, now: _Function
) -> Strayed | None:
    """Tell branches of one head apart by their number, where as many of them are left."""
    for one, other in zip(meant, found, strict=True):
        total = before.total[one.path]
        if one.number != other.number and total == now.total[one.path]:
            head = _shown(one.path[-1:])
            meant_one, found_one = (f"{head} ({b.number} of {total})" for b in (one, other))
            return Strayed(meant_one, found_one, is_left=True)
    return None


def _shown(branches: tuple[str, ...]) -> str:
    text = " ".join(", ".join(branches).replace("`", "'").split())  # a string may be of two lines
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _File:
    def __init__(self, path: str, lines: Sequence[str]) -> None:
        self._lines = lines
        self._known: Sequence[scope.Definition] | None = None
        if path.endswith(scope.PYTHON) and not _LONE_RETURN.search("".join(lines)):
            self._known = scope.definitions(path, lines)
        self._texts: dict[tuple[int, int], str] = {}

    def within(self, line: int) -> tuple[str, int] | None:
        """Return the text of the function or class around a line, and its number there (from 0).

        None where it cannot be read: that is not the same as a function without branches.
        """
        if self._known is None or not 0 <= line < len(self._lines):
            return None
        around = (d for d in reversed(self._known) if d.first <= line + 1 <= d.last)
        found = next(((d.first - 1, d.last) for d in around), (0, len(self._lines)))
        if found not in self._texts:
            self._texts[found] = "".join(self._lines[slice(*found)])
        return self._texts[found], line - found[0]


@lru_cache(maxsize=256)  # the functions that a series changes: before, and on a release
def _function(text: str) -> _Function | None:
    """Read the branches of a function's text; None where it is no Python."""
    # With a line above it, a mark of the byte order would be none.
    data = text.removeprefix("\ufeff").encode("utf-8", "surrogateescape")
    # A method is indented: below this line it may be.
    tree = syntax.parsed(b"if 1:\n" + data) if text[:1].isspace() else None
    if tree is not None and isinstance(tree.body[0], ast.If):
        body = tree.body[0].body
    else:
        tree = syntax.parsed(b"\n" + data)
        if tree is None:
            return None
        body = tree.body
    if len(body) == 1 and isinstance(body[0], _DEFINITIONS):
        body = body[0].body
    try:
        found = [(first - 2, last - 2, path) for first, last, path in _walk(body, ())]
    except (RecursionError, ValueError):  # a long sum, a number of 5,000 digits
        return None
    lines = text.split("\n")
    around: list[list[_Branch] | None] = [[] for _ in lines]
    total: Counter[tuple[str, ...]] = Counter()
    for first, last, path in found:
        total[path] += 1
        branch = _Branch(path, total[path])
        for above in around[first : last + 1]:
            if above is not None:
                above.append(branch)
    for _, last, _ in found:
        for n in range(last + 1, len(lines)):
            if lines[n].strip() and not lines[n].lstrip().startswith("#"):
                break
            around[n] = None
    return _Function(tuple(None if b is None else tuple(b) for b in around), total)


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _walk(
    body: Sequence[ast.stmt], outer: tuple[str, ...]
) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Yield the first and the last line and the path of each branch, outer ones first."""
    for statement in body:
        if not isinstance(statement, _DEFINITIONS):
            for head, node, below, begin in _parts(statement):
                if below:
                    first = min(begin, below[0].lineno)
                    path = (*outer, f"{head} {ast.unparse(node)}".strip() if node else head)
                    yield first, below[-1].end_lineno or first, path
                    yield from _walk(below, path)


_Part = tuple[str, ast.AST | None, list[ast.stmt], int]


def _parts(statement: ast.stmt) -> Iterator[_Part]:
    """Yield what stands below a statement: how it is headed, its condition, and its first line."""
    match statement:
        case ast.If():
            yield from _chain(statement)
        case ast.While(test, body, orelse):
            yield "while", test, body, _behind(test)
            yield "else of while", test, orelse, _behind(body[-1])
        case ast.For(target, iterable, body, orelse) | ast.AsyncFor(target, iterable, body, orelse):
            over = ast.Compare(left=target, ops=[ast.In()], comparators=[iterable])
            yield "for", over, body, _behind(iterable)
            yield "else of for", over, orelse, _behind(body[-1])
        case ast.With(items, body) | ast.AsyncWith(items, body):
            last = items[-1].optional_vars or items[-1].context_expr
            entered = ast.Tuple(elts=[item.context_expr for item in items], ctx=ast.Load())
            yield "with", entered, body, _behind(last)
        case ast.Try(body, handlers, orelse, finalbody) | ast.TryStar(
            body, handlers, orelse, finalbody
        ):
            yield "try", None, body, statement.lineno + 1
            for handler in handlers:
                kind = handler.type
                begin = _behind(kind) if kind else handler.lineno + 1
                yield "except", kind, handler.body, begin
            above: list[ast.stmt | ast.excepthandler] = [*body, *handlers]
            yield "else of try", None, orelse, _behind(above[-1])
            yield "finally", None, finalbody, _behind([*above, *orelse][-1])
        case ast.Match(_, cases):
            for one in cases:
                head, begin = "case", _behind(one.guard or one.pattern)
                if one.guard:
                    head = f"case {ast.unparse(one.pattern)} if"
                yield head, one.guard or one.pattern, one.body, begin


def _chain(statement: ast.If) -> Iterator[_Part]:
    """Yield an if and what else there is: one that upstream puts in between moves no other one."""
    last = statement
    while True:
        yield "if", last.test, last.body, _behind(last.test)
        below = last.orelse
        is_elif = bool(below) and below[0].col_offset == last.col_offset
        if not (is_elif and isinstance(below[0], ast.If)):
            break
        last = below[0]
    yield "else of if", statement.test, last.orelse, _behind(last.body[-1])


def _behind(node: ast.expr | ast.stmt | ast.pattern | ast.excepthandler) -> int:
    return (node.end_lineno or node.lineno) + 1
