"""Small valid wheels that stand in for the real ones."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    requires: Sequence[str] = (),
    entry_points: str = "",
) -> Path:
    """Write ``name-version-py3-none-any.whl`` with these files into the folder."""
    stem = f"{name.replace('-', '_')}-{version}"
    headers = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    headers += [f"Requires-Dist: {requirement}\n" for requirement in requires]
    members = dict(files)
    members[f"{stem}.dist-info/METADATA"] = "".join(headers)
    members[f"{stem}.dist-info/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if entry_points:
        members[f"{stem}.dist-info/entry_points.txt"] = entry_points
    record = ""
    for member, text in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        record += f"{member},sha256={digest.decode().rstrip('=')},{len(text.encode())}\n"
    members[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return path
