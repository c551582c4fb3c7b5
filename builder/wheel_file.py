"""A wheel as an index takes it: what its file name says, and METADATA that agrees with it."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from builder import metadata
from builder.errors import AuditError
from builder.wheel_archive import dist_info_of

_PLATFORM = re.compile(r"(?:manylinux(?:\d+|_\d+_\d+)|musllinux_\d+_\d+|linux)_(?P<machine>.+)")


@dataclass(frozen=True)
class WheelName:
    """What a file name says."""

    project: str
    version: Version
    machines: frozenset[str]

    def excludes(self, other: WheelName) -> bool:
        """Tell whether an installer could take either, so that an index holds one of them."""
        machines = self.machines | other.machines
        same_machine = self.machines & other.machines or "any" in machines
        return self.version == other.version and bool(same_machine)


def parse(wheel: Path) -> WheelName:
    """Read a wheel's file name.

    :raises AuditError: it is not one.
    """
    try:
        project, version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise AuditError(
            "not the file name of a wheel",
            where=str(wheel),
            next_step="give a wheel under the name that its build gave it",
        ) from error
    matches = ((tag.platform, _PLATFORM.fullmatch(tag.platform)) for tag in tags)
    machines = frozenset(match["machine"] if match else platform for platform, match in matches)
    return WheelName(project, version, machines)


def read_metadata(file: IO[bytes], wheel: Path) -> bytes:
    """Return METADATA of an open wheel.

    :raises AuditError: it is not a whole wheel.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            dist_info = dist_info_of(archive.namelist(), str(wheel))
            return archive.read(f"{dist_info}/METADATA")
    except (zipfile.BadZipFile, KeyError) as error:
        raise AuditError(
            f"not a whole wheel: {error}", where=str(wheel), next_step="build the wheel again"
        ) from error


def require_agreement(file: IO[bytes], core: bytes, name: WheelName, wheel: Path) -> None:
    """Refuse what uv and newer pips refuse: METADATA of another project or version, or its folder.

    :raises AuditError: which of the two it is.
    """
    fields = metadata.parse(core.decode(errors="replace"))
    inside = "".join(fields.values("Name")), "".join(fields.values("Version"))
    with zipfile.ZipFile(file) as archive:
        folder = dist_info_of(archive.namelist(), str(wheel)).removesuffix(".dist-info")
    for where, (project, version) in (
        ("METADATA", inside), (".dist-info", (folder.partition("-")[::2])),
    ):  # fmt: skip
        try:
            agrees = (canonicalize_name(project), Version(version)) == (name.project, name.version)
        except InvalidVersion:
            agrees = False
        if not agrees:
            raise AuditError(
                f"{where} contradicts the file name",
                where=str(wheel),
                details=(f"{where:10} {project} {version}", f"file name  {wheel.name}"),
                next_step="build the wheel again; never rename one",
            )
