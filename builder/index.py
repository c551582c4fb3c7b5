"""The directory index: a tree of files that pip and uv install from, served or not.

``INDEX/simple/`` is the stable channel, ``INDEX/NAME/simple/`` every other one. A project's folder
holds its wheels, the METADATA of each (PEP 658), what was published beside it, and two pages with
the same content: HTML (PEP 503) and JSON (PEP 691, 700). All links are relative, so that the tree
works under ``file://``, below any URL, and after it was moved or copied.

What a page lists is there, whole: a wheel appears under its name when it is durable, and the pages
that list it are replaced last. One publisher writes at a time; what a killed one had begun is
finished or taken back by the next one, wheel and alias as one (builder/index_journal.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from builder import atomic, index_journal, simple_pages
from builder.console import say
from builder.digests import sha256_of
from builder.errors import AuditError, IndexLayoutError, PolicyError, VersionExistsError
from builder.index_pages import metadata_path, yanked_path
from builder.locations import DISTRIBUTION, UPSTREAM_DISTRIBUTION
from builder.simple_pages import ListedWheel
from builder.wheel_file import WheelName, parse, read_metadata, require_agreement

STABLE = "stable"
STAGING = "staging"

_CHUNK = 1 << 20
_LOCK = ".publish"
_RESERVED = ("metadata", "yanked")
_CHANNEL = re.compile(r"[a-z0-9][a-z0-9_-]*")


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


def simple_folder(index: Path, channel: str) -> Path:
    """Return the folder that an installer is pointed at.

    :raises PolicyError: not a name for a channel.
    """
    if channel == STABLE:
        return index / "simple"
    if not _CHANNEL.fullmatch(channel) or channel == "simple":
        raise PolicyError(
            f"not a name for a channel: {channel!r}",
            where=str(index),
            next_step="small letters, digits, - and _; the policy says which there are",
        )
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
    :raises DiskFullError: nothing was listed, or the next publisher finishes it.
    """
    if channel != STAGING and any(entry.approved is None for entry in entries):
        raise ValueError(f"{channel} takes approved wheels only")
    names = [parse(entry.wheel) for entry in entries]
    for entry in entries:
        _check_beside(entry.beside, entry.wheel)
    simple = simple_folder(index, channel)
    targets = [simple / n.project / e.wheel.name for n, e in zip(names, entries, strict=True)]
    published = []
    with _alone(index, simple, {name.project for name in names}):
        expected = [_expected(index, e, n) for n, e in zip(names, entries, strict=True)]
        new = [target for target in targets if not target.exists()]
        folders = list(dict.fromkeys(target.parent for target in targets))
        with index_journal.as_one(index, new, _offered_again(targets, new), folders):
            for name, entry, target, sha256 in zip(names, entries, targets, expected, strict=True):
                already_there = target.exists() and sha256_of(target) == sha256
                _make_folder(target.parent, index)
                if target.exists() and not already_there:
                    say(f"{target}: damaged since it was published; it gets its own bytes back")
                    _place(entry.wheel, target, name, sha256, entry.beside)
                elif already_there:
                    _write_missing(target.parent, entry.beside)
                else:
                    _place(entry.wheel, target, name, sha256, entry.beside)
                published.append(Published(channel, target, already_there))
    return tuple(published)


def _offered_again(targets: Sequence[Path], new: Sequence[Path]) -> dict[Path, None]:
    """Return the alias that was yanked with its wheels, where another machine's wheel comes now."""
    comes = any(t.parent.name == DISTRIBUTION and not yanked_path(t).exists() for t in new)
    aliases = [t for t in targets if t.parent.name == UPSTREAM_DISTRIBUTION]
    return {alias: None for alias in aliases if comes and yanked_path(alias).exists()}


def set_yanked(
    index: Path, channel: str, wheels: Sequence[ListedWheel], reason: str | None
) -> None:
    """Mark wheels so that installers take them for an exact pin alone (PEP 592); None unmarks."""
    folders = sorted({wheel.path.parent for wheel in wheels})
    marks = {wheel.path: reason for wheel in wheels}
    with (
        _alone(index, simple_folder(index, channel), {folder.name for folder in folders}),
        index_journal.as_one(index, (), marks, folders),
    ):
        pass  # the marks are all there is to do


@contextmanager
def _alone(index: Path, simple: Path, projects: AbstractSet[str]) -> Iterator[None]:
    """Hold the lock of the index; remove what killed publishers left in the folders.

    :raises IndexLayoutError: what is done here would be done in another channel as well.
    """
    _require_own_folders(index, (simple, *(simple / project for project in sorted(projects))))
    with atomic.exclusive(index / _LOCK, f"the index {index}"):
        for folder in (simple, *(simple / project for project in projects)):
            for leftover in folder.glob(f"{atomic.PREFIX}*"):
                leftover.unlink(missing_ok=True)
        index_journal.recover(index)
        yield


def _require_own_folders(index: Path, folders: Sequence[Path]) -> None:
    """Keep channels apart: what staging takes untested must not be in a stable one at once."""
    simple = folders[0]
    # Our stable channel may be another one of the folder above, and the other way round.
    other = index.resolve().parent if simple.parent == index else simple.parent.resolve()
    if (other / f"{_LOCK}.lock").exists():
        raise IndexLayoutError(
            f"it belongs to the index {other} too",
            where=str(simple),
            next_step="give another --index or --channel: no index lies where another one has a "
            "channel",
        )
    for folder in folders:
        if folder.resolve() != index.resolve() / folder.relative_to(index):
            raise IndexLayoutError(
                "a link below the folder of an index may lead to another channel",
                where=str(folder),
                details=(f"leads to  {folder.resolve()}",),
                next_step="make it a folder, or a mount; the index as a whole may be a link",
            )


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
        require_agreement(copy, core, name, wheel)
        atomic.write_bytes(metadata_path(target), core)
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
