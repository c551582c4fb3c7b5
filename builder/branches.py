"""Which branch of its function a line stands in: what tells two places of one function apart.

Read from Python's syntax tree; of other languages nothing is told.
"""

from __future__ import annotations

import ast
import re
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
    """Lines (from 1, both ends included) that run when ``head`` says so."""

    first: int
    last: int
    head: str
    node: ast.AST | None

    @property
    def name(self) -> str:
        """Return the head and its condition, as Python writes it: line breaks do not count."""
        return f"{self.head} {ast.unparse(self.node)}".strip() if self.node else self.head


def strayed(
    path: str, before: Sequence[str], line: int, now: Sequence[str], new_line: int
) -> Strayed | None:
    """Compare the branches around a line of one file and of another; None where they are the same.

    The two lines (from 0) stand in the same function or class. A branch whose condition upstream
    wrote anew is another one, too: then nothing is left of the one that is meant.
    """
    if not path.endswith(scope.PYTHON):
        return None
    old, new = _within(path, before, line), _within(path, now, new_line)
    if old == new:
        return None
    meant, found = (_around(_branches(text), at) for text, at in (old, new))
    if meant == found:
        return None
    everywhere = {_around(_branches(new[0]), at) for at in range(1, new[0].count("\n") + 2)}
    differ = [n for n, (a, b) in enumerate(zip(meant, found, strict=False)) if a != b]
    # Only what differs is shown; of one within the other, the branch that both are in, too.
    same = differ[0] if differ else max(min(len(meant), len(found)) - 1, 0)
    return Strayed(_shown(meant[same:]), _shown(found[same:]), is_left=meant in everywhere)


def _shown(branches: tuple[str, ...]) -> str:
    text = ", ".join(branches).replace("`", "'")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _within(path: str, lines: Sequence[str], line: int) -> tuple[str, int]:
    """Return the text of the function or class around a line, and its number there (from 1)."""
    around = scope.definition_at(path, lines, line)
    first, last = (around.first - 1, around.last) if around else (0, len(lines))
    return "".join(lines[first:last]), line - first + 1


def _around(branches: Sequence[_Branch], number: int) -> tuple[str, ...]:
    return tuple(branch.name for branch in branches if branch.first <= number <= branch.last)


@lru_cache(maxsize=16)  # the functions of one hunk, before and after
def _branches(text: str) -> tuple[_Branch, ...]:
    """Return the branches of a function's text, outer ones first; none where it is no Python."""
    if _LONE_RETURN.search(text):
        return ()
    # a method is indented: below this line it may be
    tree = syntax.parsed(b"if 1:\n" + text.encode("utf-8", "surrogateescape"))
    if tree is None:
        tree = syntax.parsed(b"\n" + text.encode("utf-8", "surrogateescape"))
        body = tree.body if tree else []
    else:
        body = tree.body[0].body if isinstance(tree.body[0], ast.If) else []
    if len(body) == 1 and isinstance(body[0], _DEFINITIONS):
        body = body[0].body
    try:
        return tuple(
            _Branch(branch.first - 1, branch.last - 1, branch.head, branch.node)
            for branch in _walk(body)
        )
    except RecursionError:
        return ()


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _walk(body: Sequence[ast.stmt]) -> Iterator[_Branch]:
    for statement in body:
        if not isinstance(statement, _DEFINITIONS):
            for head, node, below, begin in _parts(statement):
                if below:
                    first = min(begin, below[0].lineno)
                    yield _Branch(first, below[-1].end_lineno or first, head, node)
                    yield from _walk(below)


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
                yield "case", one.pattern, one.body, _behind(one.guard or one.pattern)


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
