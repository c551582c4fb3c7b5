"""The directory index: a tree of files that pip and uv install from, served or not.

``INDEX/simple/`` is the stable channel, ``INDEX/NAME/simple/`` every other one. A project's folder
holds its wheels, the METADATA of each (PEP 658), what was published beside it, and two pages with
the same content: HTML (PEP 503) and JSON (PEP 691, 700). All links are relative, so that the tree
works under ``file://``, below any URL, and after it was moved or copied.

What a page lists is there, whole: a wheel appears under its name when it is durable, and the pages
that list it are replaced last. One publisher writes at a time; a killed one leaves temporary files
that the next one removes, at worst a wheel that no page lists yet, which the next one lists.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from builder import atomic, metadata, simple_pages
from builder.console import say
from builder.digests import sha256_of
from builder.errors import AuditError, VersionExistsError
from builder.simple_pages import HTML_PAGE, JSON_PAGE, ListedWheel
from builder.wheel_archive import dist_info_of

STABLE = "stable"
STAGING = "staging"

_CHUNK = 1 << 20
_RESERVED = ("metadata", "yanked")
_CHANNEL = re.compile(r"[a-z0-9][a-z0-9_-]*")
_PLATFORM = re.compile(r"(?:manylinux(?:\d+|_\d+_\d+)|musllinux_\d+_\d+|linux)_(?P<machine>.+)")


@dataclass(frozen=True)
class Published:
    """Where a wheel is now; ``already_there`` where the index held the same bytes before."""

    channel: str
    path: Path
    already_there: bool


@dataclass(frozen=True)
class Entry:
    """A wheel to publish.

    :param beside: files by name to store next to it, such as ``WHEEL.provenance.json``. What is
        there already for the same wheel is kept.
    :param approved: the sha256 that a gate let through; the bytes that are copied have it.
    """

    wheel: Path
    beside: Mapping[str, bytes] = field(default_factory=dict)
    approved: str | None = None


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
    return tuple(wheel for folder in folders for wheel in simple_pages.read_page(folder))


def publish(
    index: Path,
    wheel: Path,
    *,
    channel: str = STAGING,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    approved: str | None = None,
) -> Published:
    """Copy a wheel into a channel and list it there: ``publish_together`` with one wheel."""
    return publish_together(index, (Entry(wheel, beside, approved),), channel=channel)[0]


def publish_together(
    index: Path, entries: Sequence[Entry], *, channel: str
) -> tuple[Published, ...]:
    """Copy wheels into a channel and list them there: all of them, or none.

    A version has one wheel per machine in the whole index: another one, whatever its file name, is
    refused in every channel, since installers would take either. The same bytes change nothing.

    :raises ValueError: one is not approved, and the channel is another than staging.
    :raises VersionExistsError: the index holds other bytes under that version.
    :raises AuditError: not a wheel, its METADATA contradicts its file name, or its bytes are not
        the approved ones.
    :raises DiskFullError: nothing was listed.
    """
    if channel != STAGING and any(entry.approved is None for entry in entries):
        raise ValueError(f"{channel} takes approved wheels only")
    names = [parse(entry.wheel) for entry in entries]
    for entry in entries:
        _check_beside(entry.beside, entry.wheel)
    simple = simple_folder(index, channel)
    targets = [simple / n.project / e.wheel.name for n, e in zip(names, entries, strict=True)]
    published, placed = [], []
    with _alone(index, simple, {name.project for name in names}):
        expected = [_expected(index, e, n) for n, e in zip(names, entries, strict=True)]
        try:
            for name, entry, target, sha256 in zip(names, entries, targets, expected, strict=True):
                already_there = target.exists() and sha256_of(target) == sha256
                _make_folder(target.parent, index)
                if target.exists() and not already_there:
                    say(f"{target}: damaged since it was published; it gets its own bytes back")
                    _place(entry.wheel, target, name, sha256, entry.beside)
                elif already_there:
                    _write_missing(target.parent, entry.beside)
                else:
                    placed.append(target)
                    _place(entry.wheel, target, name, sha256, entry.beside)
                published.append(Published(channel, target, already_there))
        except BaseException:
            for target in placed:  # else the next publisher would list a part of the whole
                target.unlink(missing_ok=True)
            raise
        for target in targets:
            _write_pages(target.parent)
    return tuple(published)


def set_yanked(
    index: Path, channel: str, wheels: Sequence[ListedWheel], reason: str | None
) -> None:
    """Mark wheels so that installers take them for an exact pin alone (PEP 592); None unmarks."""
    folders = {wheel.path.parent for wheel in wheels}
    with _alone(index, simple_folder(index, channel), {folder.name for folder in folders}):
        for wheel in wheels:
            mark = _yanked_path(wheel.path)
            if reason is None:
                mark.unlink(missing_ok=True)
            else:
                atomic.write_text(mark, f"{reason}\n")
        for folder in sorted(folders):
            _write_pages(folder)


@contextmanager
def _alone(index: Path, simple: Path, projects: AbstractSet[str]) -> Iterator[None]:
    """Hold the lock of the index; remove what killed publishers left in the folders."""
    with atomic.exclusive(index / ".publish", f"the index {index}"):
        for folder in (simple, *(simple / project for project in projects)):
            for leftover in folder.glob(f"{atomic.PREFIX}*"):
                leftover.unlink(missing_ok=True)
        yield


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
            next_step="publish a wheel under the name that its build gave it",
        ) from error
    matches = ((tag.platform, _PLATFORM.fullmatch(tag.platform)) for tag in tags)
    machines = frozenset(match["machine"] if match else platform for platform, match in matches)
    return WheelName(project, version, machines)


def _check_beside(beside: Mapping[str, bytes], wheel: Path) -> None:
    for name in beside:
        rest = name.removeprefix(f"{wheel.name}.")
        if rest == name or not rest or "/" in rest or rest in _RESERVED:
            raise ValueError(f"{name!r} is not a name for a file beside {wheel.name}")


def _make_folder(folder: Path, index: Path) -> None:
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    for parent in folder.parents:
        atomic.sync_folder(parent)
        if parent == index:
            break


def _expected(index: Path, entry: Entry, name: WheelName) -> str | None:
    """Return the sha256 that the copy must have, where the index or a gate tells."""
    held = _refuse_other_bytes(index, entry.wheel, name)
    if held is not None and entry.approved not in {None, held}:
        raise _changed(entry.wheel)
    return entry.approved or held


def _refuse_other_bytes(index: Path, wheel: Path, name: WheelName) -> str | None:
    """Return the sha256 that the index holds under this very file name, None where it has none.

    What its page lists counts, not what became of the file since: its own bytes heal that.
    """
    ours: str | None = None
    for held in _same_version(index, name):
        if ours is None:
            ours = sha256_of(wheel)
        listed = {item.path.name: item.sha256 for item in simple_pages.read_page(held.parent)}
        theirs = listed.get(held.name) or sha256_of(held)
        if held.name != wheel.name or theirs != ours:
            raise VersionExistsError(
                f"the index holds another wheel of {name.project} {name.version} for that machine",
                where=str(held),
                details=(f"sha256 there  {theirs}", f"sha256 given  {ours}  {wheel}"),
                next_step="raise N of +glm5.N (python -m builder revision --tag TAG --raise) and "
                "build again; what was published stays as it is",
            )
    return ours


def _same_version(index: Path, name: WheelName) -> Iterator[Path]:
    for channel in channels(index):
        for path in sorted((simple_folder(index, channel) / name.project).glob("*.whl")):
            if name.excludes(parse(path)):
                yield path


def _place(
    wheel: Path, target: Path, name: WheelName, expected: str | None, beside: Mapping[str, bytes]
) -> None:
    """Copy the wheel; what goes with it is there before it is."""
    with atomic.replacing(target) as copy:
        digest = hashlib.sha256()
        with wheel.open("rb") as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
        if expected not in {None, digest.hexdigest()}:
            raise _changed(wheel)
        copy.seek(0)
        core = read_metadata(copy, wheel)
        _require_agreement(copy, core, name, wheel)
        atomic.write_bytes(_metadata_path(target), core)
        for file_name, data in beside.items():
            atomic.write_bytes(target.with_name(file_name), data)


def _changed(wheel: Path) -> AuditError:
    return AuditError(
        "the wheel changed while it was published",
        where=str(wheel),
        next_step="let its build finish, then publish again",
    )


def _write_missing(folder: Path, beside: Mapping[str, bytes]) -> None:
    for file_name, data in beside.items():
        if not (folder / file_name).exists():
            atomic.write_bytes(folder / file_name, data)


def _metadata_path(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.metadata")


def _yanked_path(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.yanked")


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


def _require_agreement(file: IO[bytes], core: bytes, name: WheelName, wheel: Path) -> None:
    """Refuse what uv and newer pips refuse: METADATA of another project or version, or its folder."""
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


def _write_pages(folder: Path) -> None:
    """Bring the project's pages, then the channel's, up to date with what is there."""
    known = {wheel.path.name: wheel for wheel in simple_pages.read_page(folder)}
    wheels = [_describe(path, known.get(path.name)) for path in folder.glob("*.whl")]
    wheels.sort(key=lambda wheel: (Version(wheel.version), wheel.path.name))
    _replace(folder / JSON_PAGE, simple_pages.project_json(folder.name, wheels))
    _replace(folder / HTML_PAGE, simple_pages.project_html(folder.name, wheels))
    projects = sorted(page.parent.name for page in folder.parent.glob(f"*/{HTML_PAGE}"))
    _replace(folder.parent / JSON_PAGE, simple_pages.channel_json(projects))
    _replace(folder.parent / HTML_PAGE, simple_pages.channel_html(projects))


def _replace(page: Path, text: str) -> None:
    if not page.exists() or page.read_bytes() != text.encode():
        atomic.write_text(page, text)


def _describe(path: Path, known: ListedWheel | None) -> ListedWheel:
    """Describe a wheel of the index; its hash is not taken again where its page has it.

    A published version keeps its bytes: what the page says of a wheel that was damaged since stays,
    so that installers refuse it, and METADATA beside a wheel is its own again.
    """
    status = path.stat()
    uploaded = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    yanked = _yanked_path(path).read_text().strip() if _yanked_path(path).exists() else None
    unchanged = known is not None and (known.size, known.uploaded) == (status.st_size, uploaded)
    sha256 = known.sha256 if known is not None and unchanged else sha256_of(path)
    if known is not None and known.sha256 != sha256:
        say(f"{path}: damaged since it was published; publish the wheel again that it was made of")
        return replace(known, yanked=yanked)
    core = _own_metadata(path, known)
    return ListedWheel(
        path=path,
        project=path.parent.name,
        version=str(parse(path).version),
        size=status.st_size,
        sha256=sha256,
        metadata_sha256=hashlib.sha256(core).hexdigest(),
        requires_python=next(iter(metadata.parse(core.decode()).values("Requires-Python")), None),
        uploaded=uploaded,
        yanked=yanked,
    )


def _own_metadata(wheel: Path, known: ListedWheel | None) -> bytes:
    """Return METADATA as it lies beside the wheel; take it out again where that is another."""
    beside = _metadata_path(wheel)
    core = beside.read_bytes() if beside.exists() else None
    if core is None or known is None or hashlib.sha256(core).hexdigest() != known.metadata_sha256:
        with wheel.open("rb") as file:
            own = read_metadata(file, wheel)
        if own != core:
            atomic.write_bytes(beside, own)
        return own
    return core
