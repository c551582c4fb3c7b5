"""What an environment holds of the distributions ``vllm`` and ``vllm-glm5``, file by file."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from builder import alias, metadata
from builder.errors import ToolchainError
from builder.locations import DISTRIBUTION, UPSTREAM_DISTRIBUTION

PACKAGE = "vllm"

# -E and the first line: neither PYTHONPATH nor the working folder decide what is found. Not -I,
# which would hide packages of the user's own site; not -S, which would hide site-packages. vllm is
# located without being imported.
_PROBE = """
import sys
if sys.path[0] == "": del sys.path[0]
import importlib.util, json
spec = importlib.util.find_spec("vllm")
print(json.dumps({
    "path": sys.path,
    "package": list(spec.submodule_search_locations or ()) if spec else [],
    "pip": importlib.util.find_spec("pip") is not None,
}))
"""
_DIST_INFO = re.compile(r"(?P<name>[^-]+)-(?P<version>.+)\.dist-info")
_LINES = 5  # of what an interpreter says


@dataclass(frozen=True)
class Installed:
    """One distribution, and how its files of the package compare with its RECORD.

    :param folder: the folder (``site-packages``) that it is installed in.
    :param files: how many files of the package vllm its RECORD lists; 0 for the alias and for
        editable installs.
    :param missing: listed files that are not there.
    :param edited: listed files with other bytes.
    :param source: the wheel that it was installed from, where it was named directly.
    :param requires_alias: its METADATA requires the alias of its own version.
    """

    name: str
    version: str
    folder: str
    alias: bool
    editable: bool
    files: int
    missing: tuple[str, ...]
    edited: tuple[str, ...]
    source: str | None
    requires_alias: bool

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def dist_info(self) -> Path:
        return Path(self.folder) / f"{self.name.replace('-', '_')}-{self.version}.dist-info"

    @property
    def record(self) -> dict[str, str]:
        """The hash of each file of the package that its RECORD lists."""
        return read_record(self.dist_info)


def probe(python: Path) -> dict[str, Any]:
    """Ask an interpreter for its path, where it would import vllm from, and if it has pip.

    :raises ToolchainError: it does not run.
    """
    try:
        said = subprocess.run(
            [python, "-E", "-c", _PROBE], capture_output=True, text=True, check=True, timeout=120
        )
        answer: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said_ = getattr(error, "stderr", None) or str(error)
        if isinstance(error, ValueError | IndexError):
            said_ = "it answers, and not as Python does"
        raise ToolchainError(
            "this interpreter does not run",
            where=str(python),
            details=tuple(str(said_).strip().splitlines()[-_LINES:]),
            next_step="name the environment's own: --python ENV/bin/python",
        ) from error
    return answer


def find_installed(folders: Iterable[Path]) -> tuple[Installed, ...]:
    """Return both distributions, wherever they lie, in the order of the folders."""
    found = []
    for folder in folders:
        for dist_info in sorted(folder.glob("*.dist-info")):
            match = _DIST_INFO.fullmatch(dist_info.name)
            name = re.sub(r"[-_.]+", "-", match["name"]).lower() if match else ""
            if match and name in {DISTRIBUTION, UPSTREAM_DISTRIBUTION}:
                found.append(_inspect(dist_info, name, match["version"]))
    return tuple(found)


def _inspect(dist_info: Path, name: str, version: str) -> Installed:
    folder = dist_info.parent
    record = read_record(dist_info)
    requires = _metadata(dist_info, "Requires-Dist")
    missing, edited = [], []
    for path, digest in record.items():
        if not (folder / path).is_file():
            missing.append(path)
        elif not _matches(folder / path, digest):
            edited.append(path)
    origin = _direct_url(dist_info)
    stands_for = any(re.match(rf"{DISTRIBUTION}\s*==", line) for line in requires)
    return Installed(
        name=name,
        version=version,
        folder=str(folder),
        alias=name == UPSTREAM_DISTRIBUTION and not record and stands_for,
        editable=bool(origin.get("dir_info", {}).get("editable")),
        files=len(record),
        missing=tuple(missing),
        edited=tuple(edited),
        source=_wheel_of(origin),
        requires_alias=name == DISTRIBUTION and alias.requirement(version) in requires,
    )


def read_record(dist_info: Path) -> dict[str, str]:
    """Return the hashes of the package's files; bytecode is not the distribution's."""
    try:
        text = (dist_info / "RECORD").read_text()
    except FileNotFoundError:
        return {}
    rows = (row for row in csv.reader(text.splitlines()) if row)
    return {
        path: digest
        for path, digest, *_ in rows
        if path.startswith(f"{PACKAGE}/") and not path.endswith(".pyc")
    }


def _matches(path: Path, digest: str) -> bool:
    name, _, expected = digest.partition("=")
    if not expected:
        return True
    with path.open("rb") as file:
        found = hashlib.file_digest(file, name).digest()
    return base64.urlsafe_b64encode(found).decode().rstrip("=") == expected.rstrip("=")


def _metadata(dist_info: Path, field: str) -> list[str]:
    try:
        text = (dist_info / "METADATA").read_text(errors="replace")
    except OSError:  # an interrupted uninstall leaves such folders
        return []
    return metadata.parse(text).values(field)


def _direct_url(dist_info: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((dist_info / "direct_url.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def _wheel_of(origin: dict[str, Any]) -> str | None:
    """Return the wheel named by direct_url.json (PEP 610), where it can still be had."""
    url = origin.get("url", "")
    if "archive_info" not in origin or "@" in urlsplit(url).netloc:
        return None
    if not url.startswith("file:"):
        return str(url)
    path = unquote(urlsplit(url).path)
    return path if Path(path).is_file() else None


def dependants(folders: list[Path], found: tuple[Installed, ...]) -> tuple[str, ...]:
    """Name who brings upstream's distribution in, where no alias keeps it out."""
    ours = next((dist for dist in found if dist.name == DISTRIBUTION), None)
    if ours is None or any(dist.alias for dist in found):
        return ()
    wanting = sorted(
        dist_info.name.partition("-")[0]
        for folder in folders
        for dist_info in folder.glob("*.dist-info")
        if any(
            re.match(rf"{UPSTREAM_DISTRIBUTION}(?![\w.-])", line) and "extra ==" not in line
            for line in _metadata(dist_info, "Requires-Dist")
        )
    )
    return tuple(
        f"{name} requires {UPSTREAM_DISTRIBUTION}: {UPSTREAM_DISTRIBUTION}=={ours.version}, the "
        "alias (--with-alias), satisfies it without files"
        for name in wanting
    )
