"""The alias: a wheel ``vllm`` without files that requires the same version of ``vllm-glm5``.

Packages that require ``vllm`` are satisfied by it, so that an installer has no reason to fetch
upstream's wheel over the files of ours. One wheel cannot do both: pip and uv refuse a wheel with
two ``.dist-info`` folders, and neither of them reads Provides-Dist.

Where a series' own dependencies require ``vllm``, its wheel requires the alias in turn
(``alias = true`` in the series' settings.toml): an installer that takes the one takes both.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from pathlib import Path

from builder import atomic, metadata
from builder.locations import DISTRIBUTION, UPSTREAM_DISTRIBUTION
from builder.wheel_archive import record_hash

SETTING = "settings.toml: alias = true"  # a series that says so requires it
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can say


def alias_name(version: str) -> str:
    return f"{UPSTREAM_DISTRIBUTION}-{version}-py3-none-any.whl"


def version_in(file: str) -> str | None:
    """Return the version in an alias's file name; None for the name of anything else."""
    match = re.fullmatch(r"vllm-([^-+]+\+glm5\.\d+)-py3-none-any\.whl", file)
    return match[1] if match else None


def requirement(version: str) -> str:
    """Return the line of a wheel that requires its alias: no other version satisfies it."""
    return f"{UPSTREAM_DISTRIBUTION}=={version}"


def is_required(core: bytes, version: str) -> bool:
    """Tell whether METADATA of the wheel of that version requires its alias."""
    fields = metadata.parse(core.decode(errors="replace"))
    return requirement(version) in fields.values("Requires-Dist")


def alias_bytes(version: str) -> bytes:
    """Return the alias of a version: the same one always, and so the same bytes.

    :param version: the version of the wheel it stands for, such as ``0.20.2+glm5.1``.
    """
    dist_info = f"{UPSTREAM_DISTRIBUTION}-{version}.dist-info"
    members = {
        f"{dist_info}/METADATA": (
            "Metadata-Version: 2.1\n"
            f"Name: {UPSTREAM_DISTRIBUTION}\n"
            f"Version: {version}\n"
            f"Summary: Stands for {DISTRIBUTION}, which provides the package vllm\n"
            f"Requires-Dist: {DISTRIBUTION}=={version}\n"
        ).encode(),
        f"{dist_info}/WHEEL": (
            b"Wheel-Version: 1.0\n"
            b"Generator: vllm-glm5-builder\n"
            b"Root-Is-Purelib: true\n"
            b"Tag: py3-none-any\n"
        ),
    }
    lines = [
        f"{name},{record_hash(hashlib.sha256(data).digest())},{len(data)}\n"
        for name, data in members.items()
    ]
    members[f"{dist_info}/RECORD"] = "".join([*lines, f"{dist_info}/RECORD,,\n"]).encode()

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, _TIME)
            info.create_system = 3  # unix, on every machine: the mode counts
            info.external_attr = 0o100644 << 16
            archive.writestr(info, data)
    return file.getvalue()


def write_alias(version: str, out: Path) -> Path:
    """Write the alias into the folder ``out``."""
    path = out / alias_name(version)
    atomic.write_bytes(path, alias_bytes(version))
    return path
