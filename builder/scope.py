"""Which function, class or namespace a line stands in: what tells two places of a file apart.

Python is read from its syntax tree, languages with braces from their braces. Where neither can be
read, and of a patch whose pre-image nobody has, there is the heading that git writes behind ``@@``.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from builder import syntax

PYTHON = (".py", ".pyi")
C_LIKE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp", ".rs")

# git's own patterns for hunk headings: Python's (userdiff.c) and the default one
_PYTHON_HEADING = re.compile(r"^[ \t]*((class|(async[ \t]+)?def)[ \t].*)$")
_DEFAULT_HEADING = re.compile(r"^([A-Za-z_$].*)$")
_HEADING_BYTES = 80
_NAME = re.compile(r"^[ \t]*(?:class|(?:async[ \t]+)?def)[ \t]+(\w+)")


@dataclass(frozen=True)
class Definition:
    """A function, class or namespace.

    :param first: its first line, its decorators or its return type included (from 1, as Python and
        C count lines: a lone carriage return ends none of git's).
    :param name: with the names around it; one that stands there more than once says which it is.
    :param is_function: not a class, a namespace or a table.
    """

    first: int
    last: int
    name: str
    is_function: bool
    is_open: bool = False  # a namespace: it holds others and is opened again and again


def definitions(path: str, lines: Sequence[str]) -> tuple[Definition, ...] | None:
    """Return what is defined in a file, outer ones first; None where that cannot be read."""
    if path.endswith(PYTHON):
        return _python("".join(lines))
    return _braces("".join(lines)) if path.endswith(C_LIKE) else None


def definition_at(path: str, lines: Sequence[str], line: int) -> Definition | None:
    """Return the innermost definition around ``line`` (from 0)."""
    return next(_around(definitions(path, lines) or (), path, lines, line), None)


def _around(
    known: Sequence[Definition], path: str, lines: Sequence[str], line: int
) -> Iterator[Definition]:
    number = line + 1
    if path.endswith(PYTHON):  # Python ends a line at a lone carriage return, git does not
        number += sum(len(_LONE_RETURN.findall(text)) for text in lines[:line] if "\r" in text)
    return (d for d in reversed(known) if d.first <= number <= d.last)


def scope_at(path: str, lines: Sequence[str], line: int) -> str:
    """Return the name of the function or class around ``line`` (from 0), "" at top level.

    Where the definitions cannot be read, it is the nearest heading above.
    """
    known = definitions(path, lines)
    if known is not None:
        found = next(_around(known, path, lines, line), None)
        return found.name if found else ""
    if not path.endswith((".py", *C_LIKE)):
        return ""
    return name_in(path, heading_at(path, lines, line))


def functions_at(path: str, lines: Sequence[str], line: int) -> tuple[Definition, ...]:
    """Return the functions around ``line`` (from 0), the innermost first; a class is none."""
    around = _around(definitions(path, lines) or (), path, lines, line)
    return tuple(definition for definition in around if definition.is_function)


def without_which(name: str) -> str:
    """Return a scope's name without what tells it from others of that name."""
    return _WHICH.sub("", name)


def heading_line(path: str, lines: Sequence[str], line: int) -> int | None:
    """Return the line that git would quote behind ``@@`` of a hunk that begins at ``line``."""
    pattern = _PYTHON_HEADING if path.endswith(".py") else _DEFAULT_HEADING
    return next((n for n in range(line - 1, -1, -1) if pattern.match(lines[n])), None)


def heading_at(path: str, lines: Sequence[str], line: int) -> str:
    """Return what git would write behind ``@@`` of a hunk that begins at ``line`` (from 0)."""
    found = heading_line(path, lines, line)
    if found is None:
        return ""
    pattern = _PYTHON_HEADING if path.endswith(".py") else _DEFAULT_HEADING
    match = pattern.match(lines[found])
    assert match is not None  # noqa: S101 - heading_line has matched it
    cut = match[1].encode("utf-8", "replace")[:_HEADING_BYTES]  # in the middle of a character too
    return cut.decode("utf-8", "ignore").rstrip()


def name_in(path: str, heading: str) -> str:
    """Return what of a heading names the scope: Python's name, elsewhere the whole line."""
    if not path.endswith(".py"):
        return heading.rstrip()
    match = _NAME.match(heading)
    return match[1] if match else ""


def is_cut(path: str, heading: str) -> bool:
    """Tell whether git may have cut a heading within what names the scope."""
    if len(heading.encode("utf-8", "replace")) < _HEADING_BYTES - 4:  # a character is not halved
        return False
    match = _NAME.match(heading)
    return not path.endswith(".py") or (match is not None and match.end() == len(heading.rstrip()))


def headings(path: str, lines: Sequence[str]) -> Counter[str]:
    """Count the names that headings of the file could have."""
    return Counter(name_in(path, heading_at(path, lines[n : n + 1], 1)) for n in range(len(lines)))


_LONE_RETURN = re.compile(r"\r(?!\n)")
_WHICH = re.compile(r" \(\d+ of \d+\)(?: under `[^`]*`)?$")


@lru_cache(maxsize=64)  # a patch's files, before and after, on two releases
def _python(text: str) -> tuple[Definition, ...] | None:
    """Read the definitions from Python's syntax tree; None where the text has none."""
    tree = syntax.parsed(text.encode("utf-8", "surrogateescape"))
    if tree is None:
        return None
    try:
        return _numbered(list(_walk(tree, "", "")))
    except (RecursionError, ValueError):  # a long sum, a number of 5,000 digits in a condition
        return None


def _numbered(found: list[tuple[Definition, str]]) -> tuple[Definition, ...]:
    """Tell definitions of one name apart: by their number, and by the branch that they stand in.

    The number alone is not enough: where upstream takes one away and adds another it stays.
    """
    total = Counter(item.name for item, _ in found if not item.is_open)
    seen: Counter[str] = Counter()
    named = []
    for item, branch in found:
        seen[item.name] += 1
        which = f" ({seen[item.name]} of {total[item.name]})" if total[item.name] > 1 else ""
        which += f" under `{branch}`" if which and branch else ""
        name = f"{item.name}{which}"
        named.append(Definition(item.first, item.last, name, item.is_function, item.is_open))
    return tuple(named)


def _walk(node: ast.AST, prefix: str, branch: str) -> Iterator[tuple[Definition, str]]:
    for child in _statements(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            first = min([child.lineno, *(item.lineno for item in child.decorator_list)])
            is_function = not isinstance(child, ast.ClassDef)
            yield Definition(first, child.end_lineno or child.lineno, name, is_function), branch
            yield from _walk(child, f"{name}.", "")
        elif isinstance(child, ast.If):
            test = ast.unparse(child.test).replace("`", "'")
            yield from _walk(ast.Module(child.body, []), prefix, f"if {test}")
            yield from _walk(ast.Module(child.orelse, []), prefix, f"else of {test}")
        elif isinstance(child, ast.ExceptHandler):
            kind = ast.unparse(child.type).replace("`", "'") if child.type else ""
            yield from _walk(child, prefix, f"except {kind}".rstrip())
        else:
            yield from _walk(child, prefix, branch)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may hold a definition: expressions are most of a tree, and hold none."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        below = getattr(node, field, None)
        if isinstance(below, list):
            yield from below


_TOKEN = re.compile(
    r"""(?P<skipped>//[^\n]*|/\*.*?\*/
    |R"(?P<mark>[^()\s\\]{0,16})\(.*?\)(?P=mark)"       # a raw string
    |"(?:\\.|[^"\\])*"|'(?:\\[^\n]{1,10}?|[^'\\\n])')   # a string, a character
    |^[ \t]*\#[ \t]*(?P<directive>\w*)(?:\\\n|[^\n])*   # the preprocessor's, over several lines
    |(?P<mark_of_code>[{}();])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_CONTROL = re.compile(
    r"(?:if|else|for|while|do|switch|try|catch|case|default|return|match|loop|unsafe$|\#)\b|$"
)
_OPEN = re.compile(r"(?:inline\s+)?namespace\b|extern\b\s*$|mod\b|pub\s+mod\b")
_TYPE = re.compile(
    r"(?:template\s*<.*>\s*)?(?:typedef\s+)?(?:class|struct|union|enum|impl|trait)\b"
)
_LABEL = re.compile(r"^(?:(?:public|private|protected)\s*:\s*)+")


@dataclass
class _Block:
    header: str
    first: int
    parens: int
    order: int


@lru_cache(maxsize=64)
def _braces(text: str) -> tuple[Definition, ...] | None:
    """Read the definitions of a language with braces; None where the braces do not pair.

    Blocks of control flow are no definitions. Of ``#if``, every branch begins with what stood open
    above it.
    """
    found: list[tuple[int, Definition]] = []
    stack: list[_Block] = []
    branches: list[list[_Block]] = []
    header, start, parens, position, order, line = "", 0, 0, 0, 0, 1

    def close(block: _Block, last: int) -> None:
        names = [b.header for b in (*stack, block) if not _CONTROL.match(b.header)]
        if not _CONTROL.match(block.header):
            is_open = bool(_OPEN.match(block.header))
            is_function = not is_open and not _TYPE.match(block.header)
            name = " ".join(f"{name} {{" for name in names)
            found.append((block.order, Definition(block.first, last, name, is_function, is_open)))

    for token in _TOKEN.finditer(text):
        plain = text[position : token.start()]
        if not header.strip() and plain.strip():
            start = line + plain[: len(plain) - len(plain.lstrip())].count("\n")
        header += plain
        line += text.count("\n", position, token.start())
        mark, directive = token["mark_of_code"], token["directive"]
        if mark in ("(", ")"):
            header += mark
            parens += 1 if mark == "(" else -1
        elif mark == ";":
            header = header + mark if parens > 0 else ""
        elif mark == "{":
            name = _LABEL.sub("", " ".join(header.split()))
            stack.append(_Block(name, start if header.strip() else line, parens, order))
            header, parens, order = "", 0, order + 1
        elif mark == "}":
            if not stack:
                return None
            block = stack.pop()
            close(block, line)
            header, parens = "", block.parens
        elif directive in ("if", "ifdef", "ifndef"):
            branches.append(list(stack))
        elif directive in ("else", "elif") and branches:
            while len(stack) > len(branches[-1]):
                close(stack.pop(), line)
            stack = list(branches[-1])
        elif directive == "endif" and branches:
            branches.pop()
        line += text.count("\n", token.start(), token.end())
        position = token.end()
    if stack:
        return None
    return _numbered([(item, "") for _, item in sorted(found, key=lambda pair: pair[0])])
