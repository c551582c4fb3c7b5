"""Small valid wheels, as installers check them: METADATA, WHEEL, and RECORD with real hashes."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE = {"vllm/__init__.py": "whose = 'ours'\n", "vllm/core.py": "shared = 1\n"}
UPSTREAM = {
    "vllm/__init__.py": "whose = 'upstream'\n",
    "vllm/core.py": "shared = 1\n",
    "vllm/only_upstream.py": "",
}


def write_wheel(
    folder: Path,
    version: str,
    files: Mapping[str, str | bytes] = PACKAGE,
    *,
    name: str = "vllm-glm5",
    tag: str = "py3-none-any",
    requires: Sequence[str] = (),
    requires_python: str | None = ">=3.10,<4",
    metadata_version: str | None = None,
) -> Path:
    """Write a wheel into the folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    headers = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {metadata_version or version}\n"]
    if requires_python:
        headers.append(f"Requires-Python: {requires_python}\n")
    headers += [f"Requires-Dist: {requirement}\n" for requirement in requires]
    members: dict[str, bytes] = {
        path: text if isinstance(text, bytes) else text.encode() for path, text in files.items()
    }
    members[f"{stem}.dist-info/METADATA"] = "".join(headers).encode()
    members[f"{stem}.dist-info/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    )
    record = ""
    for member, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        record += f"{member},sha256={digest},{len(data)}\n"
    members[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n".encode()
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(zipfile.ZipInfo(member), data)
    return path


def write_alias(folder: Path, version: str) -> Path:
    return write_wheel(folder, version, {}, name="vllm", requires=[f"vllm-glm5=={version}"])
