"""What a series leans on in upstream's code, written down, and found out anew on each release.

A patch may apply to every line and still be wrong: a base class has gained an attribute that its
backend has to set, a function takes another argument. ``patches/TAG/contracts.toml`` names such
classes, functions and lists, with what they were; this compares them, from the syntax tree, without
importing anything: before any GPU time. ``--write`` accepts what is there now.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder import atomic
from builder.errors import ContractError
from builder.series import Series
from builder.syntax import parsed
from builder.words import counted

NAME = "contracts.toml"


@dataclass(frozen=True)
class Contract:
    """A definition of upstream's, and what it was when somebody last looked.

    :param patch: the number of the patch that leans on it.
    :param name: a class, function or assigned name, dotted: ``Engine.start``.
    :param body: a function's statements count too (a list that it returns).
    :param holds: a line for each member of a class; a function's signature; an assigned value.
    """

    patch: int
    path: str
    name: str
    why: str
    body: bool
    holds: tuple[str, ...]


@dataclass(frozen=True)
class Breach:
    """A definition that is another one now: lines that came and went; ``gone`` if it all is."""

    contract: Contract
    came: tuple[str, ...]
    went: tuple[str, ...]
    gone: bool

    def lines(self) -> list[str]:
        """Return it as a person reads it."""
        it = self.contract
        head = f"{it.path}: {it.name} (patch {it.patch:04d}: {it.why})"
        if self.gone:
            return [f"{head} is gone"]
        if not it.holds:
            return [f"{head}: what it is was never written down"]
        return [
            head,
            *(f"  - {text}" for text in self.went),
            *(f"  + {text}" for text in self.came),
        ]


def read_contracts(series: Series) -> tuple[Contract, ...]:
    """Read the contracts of a series; none where it has no such file.

    :raises ContractError: the file is not one.
    """
    path = series.folder / NAME
    if not path.exists():
        return ()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(
            Contract(
                patch=int(table["patch"]),
                path=str(table["path"]),
                name=str(table["name"]),
                why=str(table["why"]),
                body=bool(table.get("body", False)),
                holds=tuple(str(text) for text in table.get("holds", ())),
            )
            for table in data["contract"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ContractError(
            f"not a file of contracts: {type(error).__name__}: {error}",
            where=str(path),
            next_step="each [[contract]] has patch, path, name and why; --write adds holds",
        ) from error


def breaches(
    contracts: Sequence[Contract], read: Callable[[str], bytes | None]
) -> tuple[Breach, ...]:
    """Compare each contract with the tree that ``read`` reads from."""
    found = []
    for contract in contracts:
        now = facts(contract, read)
        if now is None:
            found.append(Breach(contract, (), (), gone=True))
            continue
        came = tuple(text for text in now if text not in contract.holds)
        went = tuple(text for text in contract.holds if text not in now)
        if came or went:
            found.append(Breach(contract, came, went, gone=False))
    return tuple(found)


def facts(contract: Contract, read: Callable[[str], bytes | None]) -> tuple[str, ...] | None:
    """Return what the definition is in a tree; None where there is none of that name."""
    source = read(contract.path)
    if source is None:
        return None
    node: ast.AST | None = parsed(source)
    if node is None:
        return None
    for part in contract.name.split("."):
        below = next((child for child in _definitions(node) if part in _names(child)), None)
        if below is None:
            return None
        node = below
    return tuple(_lines(node, body=contract.body))


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is defined directly in a module or class, below ``if`` and ``try`` too."""
    for child in ast.iter_child_nodes(node):
        if _names(child):
            yield child
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _definitions(child)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _lines(node: ast.AST, *, body: bool) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        arguments = [ast.unparse(one) for one in (*node.bases, *node.keywords)]
        yield f"class {node.name}({', '.join(arguments)})"
        for child in _definitions(node):
            yield from _lines(child, body=False)
        return
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.unparse(node)
        return
    marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield f"{marks}def {node.name}({ast.unparse(node.args)}){returns}"
    if body:
        for statement in node.body:
            yield from ast.unparse(statement).splitlines()


def write_contracts(
    series: Series, contracts: Sequence[Contract], read: Callable[[str], bytes | None]
) -> Path:
    """Write down what the definitions are now.

    :raises ContractError: one of them is gone; nothing is written.
    """
    import tomlkit  # noqa: PLC0415 - only writing needs it

    path = series.folder / NAME
    found = [(contract, facts(contract, read)) for contract in contracts]
    if lost := [f"{c.path}: {c.name}" for c, now in found if now is None]:
        raise ContractError(
            f"{counted(len(lost), 'definition is', 'definitions are')} gone; nothing was written",
            where=str(path),
            details=tuple(lost),
            next_step="name what took their place in the file, or remove their tables",
        )
    document = tomlkit.parse(path.read_text(encoding="utf-8"))  # comments stay
    for table, (_, now) in zip(document["contract"], found, strict=True):
        lines = tomlkit.array()
        lines.extend(now or ())
        table["holds"] = lines.multiline(multiline=True)
    atomic.write_text(path, tomlkit.dumps(document))
    return path


def renumber_contracts(path: Path, numbers: Mapping[int, int | None]) -> None:
    """Make a file of contracts that of a series with other patches.

    :param numbers: for each patch that is not there under its number any more, the one that it has
        now, or None: then nobody leans on what its tables name. A file without tables is removed.
    """
    import tomlkit  # noqa: PLC0415 - only writing needs it

    document = tomlkit.parse(path.read_text(encoding="utf-8"))  # comments stay
    tables = document["contract"]
    for index in reversed(range(len(tables))):
        number = numbers.get(tables[index]["patch"], tables[index]["patch"])
        if number is None:
            del tables[index]
        elif number != tables[index]["patch"]:
            tables[index]["patch"] = number
    if tables:
        atomic.write_text(path, tomlkit.dumps(document))
    else:
        path.unlink()


def require_kept(
    found: Sequence[Breach],
    missing: Sequence[str],
    series: Series,
    on: str | None = None,
    *,
    has_series: bool = False,
    is_pinned: bool = True,
) -> None:
    """Refuse a release on which what the series leans on has changed.

    :param on: the release, where it is not the series' own: there nothing is to be accepted yet.
    :param has_series: that release has one already, which takes patches one by one, and no rebase.
    :param is_pinned: there is a pin of that release, which a rebase wants.
    :param missing: imports of the series that its tree cannot satisfy, a line each.
    :raises ContractError: with what came and what went, and those imports.
    """
    if missing:
        raise ContractError(
            f"{counted(len(missing), 'import')} of the series cannot work on this release",
            where=str(series.folder),
            details=(*missing, *(line for breach in found for line in breach.lines())),
            next_step=f"python -m builder edit --tag {series.tag}, correct them, then export",
        )
    if found:
        several = "things that the series leans on are other ones"
        raise ContractError(
            counted(len(found), "thing that the series leans on is another one", several)
            + " in this release",
            where=str(series.folder / NAME),
            details=tuple(line for breach in found for line in breach.lines()),
            next_step="see whether the patches named still do what they say"
            + _remedy(found, series.tag, on, has_series=has_series, is_pinned=is_pinned),
        )


def _remedy(
    found: Sequence[Breach], tag: str, on: str | None, *, has_series: bool, is_pinned: bool
) -> str:
    if on is None:
        return f"; then accept it: python -m builder contracts --tag {tag} --write"
    if not has_series:
        pin = "" if is_pinned else f"python -m builder pin {on} && "
        return f" there; they move by: {pin}python -m builder rebase --from {tag} --onto {on}"
    numbers = {breach.contract.patch for breach in found}
    number = numbers.pop() if len(numbers) == 1 else "NUMBER"
    return (
        f" in the series that {on} has already: python -m builder contracts --tag {on}; what it "
        f"lacks is carried there by: python -m builder backport {number} --from {tag} --to {on}"
    )
