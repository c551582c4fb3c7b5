"""Build mode repack: the official wheel with the changed members replaced.

Faithful for files that ship as they are and for metadata. Works for any architecture on any
machine, since nothing is compiled or run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from zipfile import ZipFile

from builder import alias, metadata
from builder.apply import AppliedSeries
from builder.classify import Kind, TouchedPath
from builder.errors import UnfaithfulModeError
from builder.pin import Pin
from builder.revision import WHEEL_FORMAT
from builder.wheel_archive import Content, dist_info_of, write_wheel
from builder.wheel_name import dist_info_name

VERSION_FILE = "vllm/_version.py"
GENERATOR = f"vllm-glm5-builder (wheel format {WHEEL_FORMAT})"


@dataclass(frozen=True)
class WheelInputs:
    """What determines a wheel's bytes.

    :param version: the version of the result, such as ``0.20.2+glm5.1``.
    :param sboms: members of ``dist-info/sboms/`` by name (PEP 770).
    :param requires_alias: the wheel requires ``vllm`` of its own version.
    """

    pin: Pin
    official: Path
    applied: AppliedSeries
    touched: tuple[TouchedPath, ...]
    version: str
    sboms: Mapping[str, bytes]
    requires_alias: bool = False

    @property
    def own_requirements(self) -> tuple[str, ...]:
        """What METADATA requires by the tool's word, beside all that the trees say."""
        return (alias.requirement(self.version),) if self.requires_alias else ()

    def before(self, path: str) -> bytes | None:
        return self._blob(self.applied.base, path)

    def after(self, path: str) -> bytes | None:
        return self._blob(self.applied.head, path)

    def _blob(self, commit: str, path: str) -> bytes | None:
        result = self.applied.repository.attempt("cat-file", "blob", f"{commit}:{path}")
        return result.stdout if result.returncode == 0 else None


def repack(inputs: WheelInputs, out: IO[bytes]) -> None:
    """Write the patched wheel to ``out``.

    :raises UnfaithfulModeError: METADATA cannot be computed from the trees.
    """
    overlay: dict[str, Content] = {}
    removed: set[str] = set()
    for item in inputs.touched:
        if item.kind is not Kind.SHIPS:
            continue
        if item.present:
            data = inputs.after(item.path)
            assert data is not None  # noqa: S101 - diff-tree says that it is there
            overlay[item.path] = Content(data, item.mode)
        else:
            removed.add(item.path)
    overlay |= own_members(inputs)
    dist_info = dist_info_name(inputs.version)
    with ZipFile(inputs.official) as archive:
        old = dist_info_of(archive.namelist(), inputs.official.name)
    for name, content in metadata_members(inputs).items():
        if content is None:
            removed.add(name.replace(f"{dist_info}/", f"{old}/", 1))
        else:
            overlay[name] = content
    write_wheel(inputs.official, out, overlay, frozenset(removed), dist_info)


def own_members(inputs: WheelInputs) -> dict[str, Content]:
    """Return the members that the tool writes in every mode: version, WHEEL and SBOMs."""
    dist_info = dist_info_name(inputs.version)
    with ZipFile(inputs.official) as archive:
        old = dist_info_of(archive.namelist(), inputs.official.name)
        wheel = archive.read(f"{old}/WHEEL").decode()
        version_file = archive.read(VERSION_FILE).decode()
    members = {
        VERSION_FILE: version_module(version_file, inputs.pin.version, inputs.version),
        f"{dist_info}/WHEEL": wheel_member(wheel),
    }
    contents = {name: Content(text.encode()) for name, text in members.items()}
    return contents | {
        f"{dist_info}/sboms/{name}": Content(data) for name, data in inputs.sboms.items()
    }


def wheel_member(text: str) -> str:
    """Return a WHEEL file with this tool as its generator."""
    return re.sub(r"(?m)^Generator: .*$", f"Generator: {GENERATOR}", text)


def version_module(text: str, old: str, new: str) -> str:
    """Return ``vllm/_version.py`` with the new version; upstream's commit id stays in it.

    :raises UnfaithfulModeError: upstream writes the file in another way than this knows.
    """
    release, _, local = new.partition("+")
    numbers = [*release.split("."), *([repr(local)] if local else [])]
    result, versions = re.subn(
        rf"(?m)^(__version__ = version = )(['\"]){re.escape(old)}\2$", rf"\1'{new}'", text
    )
    result, tuples = re.subn(
        r"(?m)^(__version_tuple__ = version_tuple = )\(.*\)$", rf"\1({', '.join(numbers)})", result
    )
    if (versions, tuples) != (1, 1):
        raise UnfaithfulModeError(
            "the official wheel's version file is not written as expected",
            where=VERSION_FILE,
            next_step="report this: the release was made in a new way",
        )
    return result


def metadata_members(inputs: WheelInputs) -> dict[str, Content | None]:
    """Return the members of dist-info that follow from the trees: METADATA, entry points, licence.

    None is one that goes.

    :raises UnfaithfulModeError: they cannot be computed from the trees.
    """
    dist_info = dist_info_name(inputs.version)
    with ZipFile(inputs.official) as archive:
        names = archive.namelist()
        old = dist_info_of(names, inputs.official.name)
        official = archive.read(f"{old}/METADATA").decode()
        entry_points = (
            archive.read(f"{old}/entry_points.txt") if f"{old}/entry_points.txt" in names else b""
        )
        top_level = archive.read(f"{old}/top_level.txt").decode()
    text = metadata.patched_metadata(
        official, inputs.before, inputs.after, inputs.version, inputs.pin.cuda,
        inputs.own_requirements,
    )  # fmt: skip
    members: dict[str, Content | None] = {f"{dist_info}/METADATA": Content(text.encode())}
    new_entry_points = metadata.patched_entry_points(entry_points, inputs.before, inputs.after)
    if new_entry_points != entry_points:
        # setuptools writes no file where no entry point is left
        members[f"{dist_info}/entry_points.txt"] = (
            Content(new_entry_points) if new_entry_points else None
        )
    tops = set(top_level.split())
    new_tops = tops | {
        item.path.partition("/")[0]
        for item in inputs.touched
        if item.kind is Kind.SHIPS and item.present
    }
    if new_tops != tops:
        text = "".join(f"{name}\n" for name in sorted(new_tops))
        members[f"{dist_info}/top_level.txt"] = Content(text.encode())
    license_text = inputs.after("LICENSE")
    if license_text is not None and license_text != inputs.before("LICENSE"):
        members[f"{dist_info}/licenses/LICENSE"] = Content(license_text)
    return members
