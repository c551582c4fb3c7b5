"""METADATA and entry_points.txt of the patched wheel, from the official ones and the two trees.

Only what the series changes is computed; everything else stays upstream's text. Requirements are
read as upstream's setup.py does (``requirements/cuda.txt`` with its ``-r`` lines), static fields
as the pyproject-metadata library does.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builder.errors import SeriesError, UnfaithfulModeError
from builder.locations import DISTRIBUTION

ReadFile = Callable[[str], bytes | None]

# [project] keys that have a METADATA field; pyproject-metadata turns them into headers.
_STATIC = ("description", "authors", "maintainers", "license", "keywords", "classifiers", "urls",
           "requires-python", "dependencies", "optional-dependencies")  # fmt: skip


# All keys of [project] whose change this module carries over.
CARRIED = frozenset({*_STATIC, "scripts", "gui-scripts", "entry-points"})


@dataclass(frozen=True)
class CoreMetadata:
    """A METADATA file: its header fields in order, and the description as text."""

    fields: tuple[tuple[str, str], ...]
    body: str

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name]


def parse(text: str) -> CoreMetadata:
    """Split METADATA into fields and description; folded lines stay with their field."""
    head, _, body = text.partition("\n\n")
    fields: list[tuple[str, str]] = []
    for line in head.split("\n"):
        if line.startswith((" ", "\t")) and fields:
            key, value = fields[-1]
            fields[-1] = (key, f"{value}\n{line}")
        elif line:
            key, _, value = line.partition(":")
            fields.append((key, value.strip()))
    return CoreMetadata(tuple(fields), body)


def render(metadata: CoreMetadata) -> str:
    head = "".join(f"{key}: {value}\n" for key, value in metadata.fields)
    return f"{head}\n{metadata.body}" if metadata.body else head


def requirement_lines(read: ReadFile, cuda: str) -> list[str]:
    """Return the run-time requirements, one normalised PEP 508 string each.

    The same as ``get_requirements()`` in upstream's setup.py on CUDA: comment lines, ``--``
    options and, off CUDA 12, vllm-flash-attn are left out.

    :raises SeriesError: a line is no requirement, or names a file that is not there.
    """
    found = [
        (path, line)
        for path, line in _requirement_files(read, "requirements/cuda.txt")
        if not ("vllm-flash-attn" in line and cuda.partition(".")[0] != "12")
    ]
    return [_requirement(path, line.partition(" #")[0].strip()) for path, line in found]


def _requirement_files(read: ReadFile, path: str) -> list[tuple[str, str]]:
    """Return each line with its file, ``-r`` lines followed."""
    found: list[tuple[str, str]] = []
    for line in (read(path) or b"").decode().strip().split("\n"):
        if line.startswith("-r "):
            other = f"requirements/{line.split()[1]}"
            if read(other) is None:
                raise SeriesError(
                    f"{line!r} names a file that is not there: {other}",
                    where=path,
                    next_step=CORRECT_IT,
                )
            found += _requirement_files(read, other)
        elif line.strip() and not line.startswith(("--", "#")):
            found.append((path, line))
    return found


def _requirement(path: str, line: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415

    try:
        return str(Requirement(line))
    except InvalidRequirement as error:
        raise SeriesError(
            f"{line!r} is no requirement", where=path, details=tuple(str(error).splitlines()),
            next_step=CORRECT_IT,
        ) from error  # fmt: skip


CORRECT_IT = "correct the patch that touches the file: python -m builder edit, then export"


def patched_metadata(
    official: str,
    before: ReadFile,
    after: ReadFile,
    version: str,
    cuda: str,
    own: Sequence[str] = (),
) -> str:
    """Return METADATA under the new name and version, with what the series changes.

    :param own: requirements that stand in no tree.
    :raises UnfaithfulModeError: upstream's own METADATA does not follow from its tree in the way
        this function knows, so that a change could not be carried over.
    :raises SeriesError: the official wheel requires something else than its tree, and the series
        changes requirements without saying the same.
    """
    metadata = parse(official)
    fields = list(metadata.fields)
    fields = [
        (key, DISTRIBUTION if key == "Name" else version if key == "Version" else value)
        for key, value in fields
    ]
    fields = _follow_requirements(fields, before, after, cuda)
    fields = _follow_project_table(fields, before, after)
    body = metadata.body
    readme_before, readme_after = before("README.md"), after("README.md")
    if readme_before != readme_after:
        if body.strip() != _description(readme_before).strip():
            raise _unknown_way("README.md", "its description is not README.md's text")
        body = _description(readme_after)
    return render(CoreMetadata(tuple(_with_own(fields, own)), body))


def with_requirements(text: str, own: Sequence[str]) -> str:
    """Return METADATA that upstream's build wrote, with requirements that stand in no tree.

    One that is there already stays where it is.
    """
    read = parse(text)
    return render(CoreMetadata(tuple(_with_own(list(read.fields), own)), read.body))


def _with_own(fields: list[tuple[str, str]], own: Sequence[str]) -> list[tuple[str, str]]:
    """Add requirements behind those that no extra asks for."""
    new = [("Requires-Dist", line) for line in own if ("Requires-Dist", line) not in fields]
    last = max(
        (n for n, (k, v) in enumerate(fields) if k == "Requires-Dist" and "extra ==" not in v),
        default=len(fields) - 1,
    )
    return [*fields[: last + 1], *new, *fields[last + 1 :]]


def _description(readme: bytes | None) -> str:
    """Return the description as setuptools takes it from the file: read as text, and ended."""
    text = (readme or b"").decode().replace("\r\n", "\n").replace("\r", "\n")
    return text if text.endswith("\n") else f"{text}\n"


def _follow_requirements(
    fields: list[tuple[str, str]], before: ReadFile, after: ReadFile, cuda: str
) -> list[tuple[str, str]]:
    old, new = requirement_lines(before, cuda), requirement_lines(after, cuda)
    if old == new:
        return fields
    listed = [v for k, v in fields if k == "Requires-Dist" and "extra ==" not in v]
    wheel = _normalised(listed)
    if odd := sorted(set(wheel) ^ set(old)):
        if Counter(map(_name, wheel)) != Counter(map(_name, old)):
            raise _unknown_way("requirements/cuda.txt", f"they differ in {', '.join(odd[:5])}")
        # Upstream repackages a wheel without a new tree, to forbid a version that broke it, as
        # build 2 of v0.23.0 does. A series that says less would let that version in again.
        if not set(odd) <= set(new) ^ set(old):
            raise SeriesError(
                "the official wheel was repackaged with other requirements than its tree has, and "
                "the series does not say the same",
                where="requirements/cuda.txt",
                details=(f"the wheel requires {', '.join(v for v in odd if v in wheel)}",
                         f"the tree requires  {', '.join(v for v in odd if v in old)}"),
                next_step="write what the wheel requires into requirements/*.txt: "
                "python -m builder edit, then export",
            )  # fmt: skip
    return _replaced(
        fields, lambda k, v: k == "Requires-Dist" and "extra ==" not in v,
        [("Requires-Dist", value) for value in new],
    )  # fmt: skip


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement  # noqa: PLC0415

    return Requirement(requirement).name


def _normalised(values: list[str]) -> list[str]:
    from packaging.requirements import Requirement  # noqa: PLC0415

    return [str(Requirement(value)) for value in values]


def _follow_project_table(
    fields: list[tuple[str, str]], before: ReadFile, after: ReadFile
) -> list[tuple[str, str]]:
    old, new = _project(before), _project(after)
    if all(old.get(key) == new.get(key) for key in _STATIC):
        return fields
    headers_old, headers_new = _headers(old), _headers(new)
    for name in sorted(set(headers_old) | set(headers_new)):
        was, now = headers_old.get(name, []), headers_new.get(name, [])
        if was == now:
            continue
        present = [value for key, value in fields if key == name]
        if not set(_comparable(name, was)) <= set(_comparable(name, present)):
            raise _unknown_way("pyproject.toml", f"{name} does not come from [project]")
        # Values that [project] does not give (dynamic requirements) stay.
        keep = [v for v in present if _comparable(name, [v])[0] not in _comparable(name, was)]
        fields = _replaced(
            fields, lambda key, _, name=name: key == name,
            [(name, value) for value in [*keep, *now]],
        )  # fmt: skip
    return fields


def _comparable(name: str, values: list[str]) -> list[str]:
    return _normalised(values) if name == "Requires-Dist" else values


def _project(read: ReadFile) -> dict[str, Any]:
    data = read("pyproject.toml")
    project: dict[str, Any] = tomllib.loads((data or b"").decode()).get("project", {})
    return project


def _headers(project: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the METADATA headers that the static keys of a [project] table give."""
    from pyproject_metadata import ConfigurationError, StandardMetadata  # noqa: PLC0415

    table: dict[str, Any] = {key: project[key] for key in _STATIC if key in project}
    table |= {"name": project.get("name", "vllm"), "version": "0"}
    try:
        standard = StandardMetadata.from_pyproject({"project": table})
    except ConfigurationError as error:
        raise SeriesError(str(error), where="pyproject.toml", next_step=CORRECT_IT) from error
    headers: dict[str, list[str]] = {}
    for key, value in standard.as_rfc822().items():
        if key not in ("Metadata-Version", "Name", "Version"):
            headers.setdefault(key, []).append(value)
    return headers


def _replaced(
    fields: list[tuple[str, str]],
    matches: Callable[..., bool],
    values: list[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Put ``values`` where the first matching field stands; drop the other matching ones."""
    position = next((n for n, (k, v) in enumerate(fields) if matches(k, v)), None)
    if position is None:
        position = next((n for n, (k, _) in enumerate(fields) if k == "Dynamic"), len(fields))
    rest = [(k, v) for k, v in fields[position:] if not matches(k, v)]
    return [*fields[:position], *values, *rest]


def patched_entry_points(official: bytes, before: ReadFile, after: ReadFile) -> bytes:
    """Return entry_points.txt; upstream's bytes where the series changes no entry point.

    Empty where none is left: the wheel has no such member then.

    :raises UnfaithfulModeError: upstream's file does not follow from its [project] table.
    """
    old, new = _entry_points(_project(before)), _entry_points(_project(after))
    if old == new:
        return official
    if render_entry_points(old).strip() != official.decode().strip():
        raise _unknown_way("pyproject.toml", "entry_points.txt does not come from [project]")
    return render_entry_points(new).encode()


def _entry_points(project: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    groups = dict(project.get("entry-points", {}))
    for key, group in (("scripts", "console_scripts"), ("gui-scripts", "gui_scripts")):
        if project.get(key):
            groups[group] = project[key]
    return {group: entries for group, entries in groups.items() if entries}


def render_entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Render as setuptools does: groups and names sorted."""
    return "\n".join(
        f"[{group}]\n" + "\n".join(f"{name} = {groups[group][name]}" for name in sorted(groups[group]))
        + "\n"
        for group in sorted(groups)
    )  # fmt: skip


def _unknown_way(path: str, what: str) -> UnfaithfulModeError:
    return UnfaithfulModeError(
        f"upstream's METADATA does not follow from its tree as expected: {what}",
        where=path,
        next_step="build with --mode setup-py, where upstream's own code writes METADATA",
    )
