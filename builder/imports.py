"""Imports of upstream's names that a patched tree cannot satisfy, found without importing anything.

A patch that only adds a file applies to every release, and its file may import what upstream has
moved or removed since. Each ``from vllm.x import y`` that the series adds is looked up in the tree:
a module, or a name that the module defines, imports or may hand out by ``__getattr__``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from builder.syntax import parsed

Read = Callable[[str], bytes | None]

# Made when upstream is built: no source tree has them.
_BUILT = ("vllm._C", "vllm._moe_C", "vllm._version", "vllm._rocm_C", "vllm.vllm_flash_attn")


@dataclass(frozen=True)
class MissingImport:
    """An import that fails: the file, its line, and what it asks for (``vllm.x: y``)."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path} line {self.line}: {self.what}"


def missing_imports(
    paths: Iterable[str], patched: Read, pristine: Read
) -> tuple[MissingImport, ...]:
    """Return the imports that the series added to these files and that its tree cannot satisfy.

    :param pristine: the release as upstream made it; what it imports itself is its own matter.
    """

    @cache
    def names(module: str) -> frozenset[str] | None:
        return _names_of(module, patched)

    found = []
    for path in sorted(path for path in paths if path.endswith(".py")):
        before = {what for _, what in _imports(path, pristine(path))}
        for line, (module, name) in _imports(path, patched(path)):
            if (module, name) in before or module.startswith(_BUILT):
                continue
            if fault := _fault(module, name, names):
                found.append(MissingImport(path, line, fault))
    return tuple(found)


def _fault(module: str, name: str, names: Callable[[str], frozenset[str] | None]) -> str:
    known = names(module)
    if known is None:  # a folder without __init__.py may hold the module all the same
        is_there = bool(name) and names(f"{module}.{name}") is not None
        return "" if is_there else f"there is no module {module}"
    if not name or name in known or "*" in known or names(f"{module}.{name}") is not None:
        return ""
    return f"{module} has no {name}"


def _imports(path: str, source: bytes | None) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield line, module and name of each import of vllm's."""
    tree = None if source is None else parsed(source)
    if tree is None:
        return
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom):
            module = _module_of(path, node)
            if module.partition(".")[0] == "vllm":
                for alias in node.names:
                    yield node.lineno, (module, "" if alias.name == "*" else alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "vllm":
                    yield node.lineno, (alias.name, "")


def _module_of(path: str, node: ast.ImportFrom) -> str:
    """Return the full name of the module from which names are imported."""
    above = path.split("/")[: -node.level] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement that may run; expressions are most of a tree, and hold no import."""
    for below in _bodies(node, skip="body" if _is_for_type_checkers(node) else ""):
        yield below
        yield from _statements(below)


def _is_for_type_checkers(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _bodies(node: ast.AST, skip: str = "") -> Iterator[ast.AST]:
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        below = getattr(node, field, None)
        if field != skip and isinstance(below, list):
            yield from below


def _names_of(module: str, read: Read) -> frozenset[str] | None:
    """Return what a module defines at its top level ("*": perhaps more); None for no module."""
    base = module.replace(".", "/")
    source = read(f"{base}.py")
    if source is None:
        source = read(f"{base}/__init__.py")
    if source is None:
        return None
    tree = parsed(source)
    if tree is None:
        return frozenset("*")
    names: set[str] = set()
    _collect(tree.body, names)
    return frozenset(names | {"*"} if "__getattr__" in names else names)


def _collect(body: Iterable[ast.AST], names: set[str]) -> None:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        targets += [item.optional_vars for item in getattr(node, "items", ())]
        for target in filter(None, targets):
            names |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        _collect(_bodies(node), names)
