"""The numbered series of one release: ``patches/TAG/series`` and the files that it names.

quilt's format: one patch a line, in order, ``#`` comments. A line may name a patch that several
releases share: ``../common/NNNN-subject.patch``. The number is a patch's identity, not its place.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder import series_journal
from builder.errors import SeriesError, UnknownTagError
from builder.locations import Project
from builder.words import counted

if TYPE_CHECKING:  # slow to import
    from packaging.version import Version

COMMON = "../common/"
_LINE = re.compile(r"(?P<entry>(?:\.\./common/)?(?P<number>\d{4})-[A-Za-z0-9._-]+\.patch)(\s+-p1)?")


@dataclass(frozen=True)
class Entry:
    """One line of the series file."""

    line: str
    number: int
    path: Path

    @property
    def is_common(self) -> bool:
        return self.line.startswith(COMMON)


@dataclass(frozen=True)
class Series:
    """A series file that was read; the patches themselves are not."""

    tag: str
    folder: Path
    entries: tuple[Entry, ...]
    requires_alias: bool

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(entry.path for entry in self.entries)


def series_tags(project: Project) -> list[str]:
    """Return the tags that have a series folder, oldest release first."""
    from packaging.version import Version  # noqa: PLC0415

    def age(tag: str) -> tuple[bool, Version, str]:
        release = _release(tag)
        return release is None, release or Version("0"), tag  # what is none is behind the releases

    return sorted((path.parent.name for path in project.patches.glob("v*/series")), key=age)


def _release(tag: str) -> Version | None:
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415

    try:
        return Version(tag)
    except InvalidVersion:  # such as v1.2.3-mine
        return None


def nearest_series(tags: Sequence[str], tag: str) -> str | None:
    """Return whose series a release without one starts from: the newest before it, or the oldest.

    A patch release of an old line is nearer to that line than to the newest series.

    :param tags: those that have a series, as ``series_tags`` gives them.
    """
    this = _release(tag)
    older = [other for other in tags if this and (one := _release(other)) and one < this]
    if older:
        return older[-1]
    return tags[0] if tags else None


def read_series(project: Project, tag: str) -> Series:
    """Read and check the series file of ``tag``; finish an export of it that was killed.

    :raises UnknownTagError: there is no series folder for the tag.
    :raises SeriesError: the file and the folder disagree; each fault is a line of the details.
    """
    folder = project.patches / tag
    file = folder / "series"
    if not file.is_file():
        tags = series_tags(project)
        known = ", ".join(tags) or "none"
        raise UnknownTagError(
            f"no series for {tag!r} (there are: {known})",
            where=str(file),
            next_step=f"make one from another release: python -m builder rebase --from "
            f"{nearest_series(tags, tag) or 'TAG'} --onto {shlex.quote(tag)}; or an empty one: "
            f"{shlex.join(['mkdir', '-p', str(folder)])} && {shlex.join(['touch', str(file)])}",
        )
    series_journal.finish(folder)
    entries, faults = _parse(file, folder)
    faults += _disagreements(project, folder, entries)
    if faults:
        raise SeriesError(
            f"the series is not consistent ({counted(len(faults), 'fault')})",
            where=str(file),
            details=tuple(faults),
            next_step="correct the series file or the patch files, then: "
            f"python -m builder series --tag {tag}",
        )
    return Series(tag, folder, tuple(entries), _requires_alias(folder))


def _parse(file: Path, folder: Path) -> tuple[list[Entry], list[str]]:
    entries: list[Entry] = []
    faults: list[str] = []
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return [], [f"the series file is not UTF-8: {error}"]
    for number, line in enumerate(content.splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            faults.append(
                f"line {number}: {text!r} is not NNNN-name.patch or {COMMON}NNNN-name.patch"
            )
            continue
        entry = match["entry"]
        entries.append(Entry(entry, int(match["number"]), (folder / entry).resolve()))
    return entries, faults


def _disagreements(project: Project, folder: Path, entries: list[Entry]) -> list[str]:
    faults = []
    seen: dict[Path, str] = {}
    numbers: dict[int, str] = {}
    for entry in entries:
        if entry.path in seen:
            faults.append(f"{entry.line} is listed twice")
            continue
        seen[entry.path] = entry.line
        if not entry.path.is_file():
            faults.append(f"{entry.line} is listed, but there is no such file")
        if entry.number in numbers:
            faults.append(
                f"number {entry.number:04d} is used by {numbers[entry.number]} and {entry.line}"
            )
        numbers.setdefault(entry.number, entry.line)
    faults += [
        f"{path.name} lies in the folder, but is not listed"
        for path in sorted(folder.glob("*.patch"))
        if path.resolve() not in seen
    ]
    for path in sorted((project.patches / "common").glob("*.patch")):
        number = int(path.name[:4]) if path.name[:4].isdigit() else -1
        if number in numbers and path.resolve() not in seen:
            faults.append(
                f"number {number:04d} is used by {numbers[number]} and {COMMON}{path.name}"
            )
    return faults


def unlisted_common(project: Project) -> list[str]:
    """Return the shared patches that no series names."""
    listed = {path for tag in series_tags(project) for path in read_series(project, tag).paths}
    return [
        path.name
        for path in sorted((project.patches / "common").glob("*.patch"))
        if path.resolve() not in listed
    ]


def _requires_alias(folder: Path) -> bool:
    settings = folder / "settings.toml"
    if not settings.exists():
        return False
    try:
        data = tomllib.loads(settings.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SeriesError(
            f"not valid TOML: {error}", where=str(settings), next_step="correct the file"
        ) from error
    unknown = set(data) - {"alias"}
    if unknown or not isinstance(data.get("alias", False), bool):
        raise SeriesError(
            f"unknown settings or values: {sorted(unknown) or data}",
            where=str(settings),
            next_step="the one setting is: alias = true",
        )
    return bool(data.get("alias", False))
