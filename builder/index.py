"""The directory index: a tree of files that pip and uv install from, served or not.

``INDEX/simple/`` is the stable channel, ``INDEX/NAME/simple/`` every other one. A project's folder
holds its wheels, the METADATA of each (PEP 658), what was published beside it, and two pages with
the same content: HTML (PEP 503) and JSON (PEP 691, 700). All links are relative, so that the tree
works under ``file://``, below any URL, and after it was moved or copied.

What a page lists is there, whole: a wheel appears under its name when it is durable, and the pages
that list it are replaced last. One publisher writes at a time; a killed one leaves ``.tmp-`` files
that the next one removes, at worst a wheel that no page lists yet, which the next one lists.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from builder import atomic, metadata
from builder.digests import sha256_of
from builder.errors import AuditError, VersionExistsError
from builder.wheel_archive import dist_info_of

STABLE = "stable"
STAGING = "staging"
HTML_PAGE = "index.html"
JSON_PAGE = "index.v1_json"

_CHUNK = 1 << 20
_CHANNEL = re.compile(r"[a-z0-9][a-z0-9_-]*")
_API_VERSION = "1.1"  # PEP 700: versions, size, upload-time
_PLATFORM = re.compile(r"(?:manylinux(?:\d+|_\d+_\d+)|musllinux_\d+_\d+|linux)_(?P<machine>.+)")


@dataclass(frozen=True)
class Published:
    """Where a wheel is now; ``already_there`` where the index held the same bytes before."""

    channel: str
    path: Path
    already_there: bool


@dataclass(frozen=True)
class ListedWheel:
    """A wheel as the pages of its project list it.

    :param size: bytes.
    :param metadata_sha256: of the METADATA file beside it.
    :param uploaded: when it was published, UTC in RFC 3339's form.
    """

    path: Path
    project: str
    version: str
    size: int
    sha256: str
    metadata_sha256: str
    requires_python: str | None
    uploaded: str


@dataclass(frozen=True)
class _WheelName:
    project: str
    version: Version
    machines: frozenset[str]


def simple_folder(index: Path, channel: str) -> Path:
    """Return the folder that an installer is pointed at.

    :raises ValueError: not a name for a channel.
    """
    if channel == STABLE:
        return index / "simple"
    if not _CHANNEL.fullmatch(channel) or channel == "simple":
        raise ValueError(f"not a name for a channel: {channel!r}")
    return index / channel / "simple"


def channels(index: Path) -> tuple[str, ...]:
    """Return the channels that exist, stable first."""
    names = sorted(p.name for p in index.iterdir() if p.is_dir()) if index.is_dir() else []
    others = (name for name in names if _CHANNEL.fullmatch(name) and name not in {"simple", STABLE})
    return tuple(name for name in (STABLE, *others) if simple_folder(index, name).is_dir())


def list_wheels(index: Path, channel: str) -> tuple[ListedWheel, ...]:
    """Return what the channel's pages list: by project, then by version, oldest first."""
    simple = simple_folder(index, channel)
    folders = sorted(p for p in simple.iterdir() if p.is_dir()) if simple.is_dir() else []
    return tuple(wheel for folder in folders for wheel in _read_page(folder))


def publish(
    index: Path,
    wheel: Path,
    *,
    channel: str = STAGING,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> Published:
    """Copy a wheel into a channel and list it there.

    A version has one wheel per machine in the whole index: another one, whatever its file name, is
    refused in every channel, since installers would take either. The same bytes change nothing.

    :param beside: files by name to store next to the wheel, such as ``WHEEL.provenance.json``.
        What is there already for the same wheel is kept.
    :raises VersionExistsError: the index holds other bytes under that version.
    :raises AuditError: not a wheel, or its METADATA contradicts its file name.
    :raises DiskFullError: nothing was listed.
    """
    name = _parse(wheel)
    _check_beside(beside, wheel)
    folder = simple_folder(index, channel) / name.project
    target = folder / wheel.name
    with atomic.exclusive(index / ".publish", f"the index {index}"):
        for place in (folder, folder.parent):
            _remove_leftovers(place)
        expected = _refuse_other_bytes(index, wheel, name)
        already_there = target.exists()
        _make_folder(folder, index)
        if already_there:
            _write_missing(folder, beside)
        else:
            _place(wheel, target, name, expected, beside)
        _write_pages(folder)
    return Published(channel=channel, path=target, already_there=already_there)


def _parse(wheel: Path) -> _WheelName:
    try:
        project, version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise AuditError(
            "not the file name of a wheel",
            where=str(wheel),
            next_step="publish a wheel under the name that its build gave it",
        ) from error
    matches = ((tag.platform, _PLATFORM.fullmatch(tag.platform)) for tag in tags)
    machines = frozenset(match["machine"] if match else platform for platform, match in matches)
    return _WheelName(project, version, machines)


def _check_beside(beside: Mapping[str, bytes], wheel: Path) -> None:
    for name in beside:
        rest = name.removeprefix(f"{wheel.name}.")
        if rest == name or not rest or "/" in rest or rest == "metadata":
            raise ValueError(f"{name!r} is not a name for a file beside {wheel.name}")


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed publishers left; only the holder of the lock writes here."""
    for leftover in folder.glob(f"{atomic.PREFIX}*"):
        leftover.unlink(missing_ok=True)


def _make_folder(folder: Path, index: Path) -> None:
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    for parent in folder.parents:
        atomic.sync_folder(parent)
        if parent == index:
            break


def _refuse_other_bytes(index: Path, wheel: Path, name: _WheelName) -> str | None:
    """Return the sha256 that the index holds under this very file name, None where it has none."""
    ours: str | None = None
    for held in _same_version(index, name):
        if ours is None:
            ours = sha256_of(wheel)
        theirs = sha256_of(held)
        if held.name != wheel.name or theirs != ours:
            raise VersionExistsError(
                f"the index holds another wheel of {name.project} {name.version} for that machine",
                where=str(held),
                details=(f"sha256 there  {theirs}", f"sha256 given  {ours}  {wheel}"),
                next_step="raise N of +glm5.N (python -m builder revision --tag TAG --raise) and "
                "build again; what was published stays as it is",
            )
    return ours


def _same_version(index: Path, name: _WheelName) -> Iterator[Path]:
    for channel in channels(index):
        for path in sorted((simple_folder(index, channel) / name.project).glob("*.whl")):
            held = _parse(path)
            same_machine = held.machines & name.machines or "any" in held.machines | name.machines
            if held.version == name.version and same_machine:
                yield path


def _place(
    wheel: Path, target: Path, name: _WheelName, expected: str | None, beside: Mapping[str, bytes]
) -> None:
    """Copy the wheel; what goes with it is there before it is."""
    with atomic.replacing(target) as copy:
        digest = hashlib.sha256()
        with wheel.open("rb") as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
        if expected not in {None, digest.hexdigest()}:
            raise AuditError(
                "the wheel changed while it was published",
                where=str(wheel),
                next_step="let its build finish, then publish again",
            )
        copy.seek(0)
        core = _read_metadata(copy, wheel)
        _require_agreement(core, name, wheel)
        atomic.write_bytes(_metadata_path(target), core)
        for file_name, data in beside.items():
            atomic.write_bytes(target.with_name(file_name), data)


def _write_missing(folder: Path, beside: Mapping[str, bytes]) -> None:
    for file_name, data in beside.items():
        if not (folder / file_name).exists():
            atomic.write_bytes(folder / file_name, data)


def _metadata_path(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.metadata")


def _read_metadata(file: IO[bytes], wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(file) as archive:
            dist_info = dist_info_of(archive.namelist(), str(wheel))
            return archive.read(f"{dist_info}/METADATA")
    except (zipfile.BadZipFile, KeyError) as error:
        raise AuditError(
            f"not a whole wheel: {error}", where=str(wheel), next_step="build the wheel again"
        ) from error


def _require_agreement(core: bytes, name: _WheelName, wheel: Path) -> None:
    """Refuse what uv and newer pips refuse: METADATA of another project or version."""
    fields = metadata.parse(core.decode(errors="replace"))
    project, version = "".join(fields.values("Name")), "".join(fields.values("Version"))
    try:
        agrees = (canonicalize_name(project), Version(version)) == (name.project, name.version)
    except InvalidVersion:
        agrees = False
    if not agrees:
        raise AuditError(
            "METADATA contradicts the file name",
            where=str(wheel),
            details=(f"METADATA   {project} {version}", f"file name  {wheel.name}"),
            next_step="build the wheel again; never rename one",
        )


def _write_pages(folder: Path) -> None:
    """Bring the project's pages, then the channel's, up to date with what is there."""
    known = {wheel.path.name: wheel for wheel in _read_page(folder)}
    wheels = [_describe(path, known.get(path.name)) for path in folder.glob("*.whl")]
    wheels.sort(key=lambda wheel: (Version(wheel.version), wheel.path.name))
    _replace(folder / JSON_PAGE, _project_json(folder.name, wheels))
    _replace(folder / HTML_PAGE, _project_html(folder.name, wheels))
    projects = sorted(page.parent.name for page in folder.parent.glob(f"*/{HTML_PAGE}"))
    _replace(folder.parent / JSON_PAGE, _channel_json(projects))
    _replace(folder.parent / HTML_PAGE, _channel_html(projects))


def _replace(page: Path, text: str) -> None:
    if not page.exists() or page.read_bytes() != text.encode():
        atomic.write_text(page, text)


def _describe(path: Path, known: ListedWheel | None) -> ListedWheel:
    """Describe a wheel of the index; its hash is not taken again where its page has it."""
    status = path.stat()
    if not _metadata_path(path).exists():
        with path.open("rb") as file:
            atomic.write_bytes(_metadata_path(path), _read_metadata(file, path))
    core = _metadata_path(path).read_bytes()
    uploaded = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    unchanged = known is not None and (known.size, known.uploaded) == (status.st_size, uploaded)
    return ListedWheel(
        path=path,
        project=path.parent.name,
        version=str(_parse(path).version),
        size=status.st_size,
        sha256=known.sha256 if known is not None and unchanged else sha256_of(path),
        metadata_sha256=hashlib.sha256(core).hexdigest(),
        requires_python=next(iter(metadata.parse(core.decode()).values("Requires-Python")), None),
        uploaded=uploaded,
    )


def _read_page(folder: Path) -> tuple[ListedWheel, ...]:
    """Return what the JSON page lists; nothing where it is missing or not one of ours."""
    try:
        page: dict[str, Any] = json.loads((folder / JSON_PAGE).read_bytes())
        return tuple(_listed(folder, file) for file in page["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AuditError):
        return ()


def _listed(folder: Path, file: dict[str, Any]) -> ListedWheel:
    path = folder / file["filename"]
    return ListedWheel(
        path=path,
        project=folder.name,
        version=str(_parse(path).version),
        size=file["size"],
        sha256=file["hashes"]["sha256"],
        metadata_sha256=file["core-metadata"]["sha256"],
        requires_python=file.get("requires-python"),
        uploaded=file["upload-time"],
    )


def _project_json(project: str, wheels: list[ListedWheel]) -> str:
    files: list[dict[str, object]] = []
    for wheel in wheels:
        file: dict[str, object] = {
            "filename": wheel.path.name,
            "url": quote(wheel.path.name),
            "hashes": {"sha256": wheel.sha256},
            "size": wheel.size,
            "upload-time": wheel.uploaded,
            # PEP 714: this key alone; old versions of pip fail on the older one in JSON.
            "core-metadata": {"sha256": wheel.metadata_sha256},
        }
        if wheel.requires_python is not None:
            file["requires-python"] = wheel.requires_python
        files.append(file)
    page = {
        "meta": {"api-version": _API_VERSION},
        "name": project,
        "versions": list(dict.fromkeys(wheel.version for wheel in wheels)),
        "files": files,
    }
    return json.dumps(page, indent=1) + "\n"


def _project_html(project: str, wheels: list[ListedWheel]) -> str:
    links = []
    for wheel in wheels:
        # '+' is quoted: some servers and clients read it as a space.
        attributes = {"href": f"{quote(wheel.path.name)}#sha256={wheel.sha256}"}
        if wheel.requires_python is not None:
            attributes["data-requires-python"] = wheel.requires_python
        # PEP 714: installers from before it know the older name only.
        attributes["data-dist-info-metadata"] = f"sha256={wheel.metadata_sha256}"
        attributes["data-core-metadata"] = f"sha256={wheel.metadata_sha256}"
        text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
        links.append(f"<a {text}>{html.escape(wheel.path.name)}</a><br>")
    return _html_page(f"Links for {project}", links)


def _channel_json(projects: list[str]) -> str:
    page = {
        "meta": {"api-version": _API_VERSION},
        "projects": [{"name": project} for project in projects],
    }
    return json.dumps(page, indent=1) + "\n"


def _channel_html(projects: list[str]) -> str:
    return _html_page("Simple index", [f'<a href="{p}/">{p}</a><br>' for p in projects])


def _html_page(title: str, lines: list[str]) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta name="pypi:repository-version" content="{_API_VERSION}">',
            f"<title>{html.escape(title)}</title>",
            "</head>",
            "<body>",
            f"<h1>{html.escape(title)}</h1>",
            *lines,
            "</body>",
            "</html>",
            "",
        ]
    )
