"""What happens to a wheel after it was published: promoted to another channel, or yanked.

A promotion goes through the same gate as a publication: the report is about the bytes in the first
channel, and the second one holds those bytes or nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from packaging.utils import InvalidSdistFilename, parse_sdist_filename

from builder import atomic, index, publish, remote_index
from builder.alias import alias_name
from builder.connection import Connection
from builder.credentials import credentials_for
from builder.errors import PackageIndexError, UnsupportedByServerError, UploadFailedError
from builder.index import STABLE, STAGING, Entry
from builder.install_lines import install_lines
from builder.locations import DISTRIBUTION, UPSTREAM_DISTRIBUTION, Cache, Project
from builder.publish import Outcome, PublishedFile
from builder.remote_index import Kind, RemoteFile, Server
from builder.simple_pages import ListedWheel
from builder.unit import approve, gather, require_alias, version_of
from builder.wheel_file import parse

# What an index has of each project: the wheels' and the alias's.
_Listing = Mapping[str, Sequence[RemoteFile]]


@dataclass(frozen=True)
class Promotion:
    """What the user asks for.

    :param what: a version (all its machines), or the file name of one wheel.
    :param index: a folder, or the URL of a devpi index.
    :param source: the channel that has the wheel; a server's URL says it already.
    :param target: the channel that takes it; on devpi an index: NAME, or USER/NAME.
    """

    what: str
    index: str
    reports: tuple[Path, ...]
    source: str = STAGING
    target: str = STABLE


def promote(promotion: Promotion, project: Project, cache: Cache, now: datetime) -> Outcome:
    """Put what one channel has into another one as well.

    :raises ReportRefused: a wheel has no report that lets it in; nothing was changed.
    :raises PackageIndexError: the first channel lacks it.
    :raises UnsupportedByServerError: the server has no channels.
    """
    folder = publish.folder_of(promotion.index)
    if folder is not None:
        return _in_folder(promotion, folder, project, now)
    with Connection(promotion.index, credentials_for(promotion.index)) as connection:
        server = remote_index.examine(promotion.index, connection)
        if server.kind is not Kind.DEVPI:
            raise UnsupportedByServerError(
                f"{server.kind} has one channel: there is nothing to promote to",
                where=server.url,
                next_step="publish the tested wheel there: python -m builder publish WHEEL "
                "--report REPORT --index URL",
            )
        return _on_devpi(promotion, server, connection, project, cache, now)


def listed(folder: Path, channel: str, what: str) -> tuple[ListedWheel, ...]:
    """Return our wheels of a version, or the one of that name.

    :raises PackageIndexError: the channel has none, or the folder is no index.
    """
    if not index.channels(folder):
        raise PackageIndexError(
            "no directory index there",
            where=str(folder),
            next_step="give --index the folder that holds simple/, or staging/simple/",
        )
    ours = _ours(folder, channel)
    found = tuple(wheel for wheel in ours if what in {wheel.version, wheel.path.name})
    if not found:
        raise _lacks(what, f"{folder} ({channel})", _versions(ours), _elsewhere(folder, channel))
    return found


def _ours(folder: Path, channel: str) -> list[ListedWheel]:
    return [w for w in index.list_wheels(folder, channel) if w.project == DISTRIBUTION]


def _versions(wheels: Sequence[ListedWheel]) -> str:
    return ", ".join(dict.fromkeys(wheel.version for wheel in wheels))


def _elsewhere(folder: Path, channel: str) -> tuple[str, ...]:
    """Return a line for each other channel that lists something of ours."""
    others = [other for other in index.channels(folder) if other != channel]
    listings = ((other, _versions(_ours(folder, other))) for other in others)
    return tuple(f"{other} has  {versions}" for other, versions in listings if versions)


def _lacks(
    what: str, where: str, versions: str, elsewhere: tuple[str, ...] = ()
) -> PackageIndexError:
    return PackageIndexError(
        f"no {DISTRIBUTION} {what} there",
        where=where,
        details=(f"it has  {versions or 'nothing'}", *elsewhere),
        next_step="give a version, or the file name of a wheel, that the channel lists"
        + (", or name another channel" if elsewhere else ""),
    )


def _in_folder(promotion: Promotion, folder: Path, project: Project, now: datetime) -> Outcome:
    wheels = [w.path for w in listed(folder, promotion.source, promotion.what)]
    source = index.simple_folder(folder, promotion.source)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        tested: dict[str, Entry] = {}
        aliases: dict[str, Entry] = {}
        for wheel in wheels:
            verdict = approve(promotion.target, wheel, promotion.reports, project, now)
            unit = gather(wheel, verdict, scratch)
            tested |= {entry.wheel.name: entry for entry in unit.entries()}
            alias = source / UPSTREAM_DISTRIBUTION / alias_name(unit.version)
            if alias.is_file():
                sha256 = require_alias(alias, unit.version)
                aliases[alias.name] = Entry(alias, approved=sha256)
        # The alias first: who sees the wheel sees it too.
        entries = [*(aliases | tested).values()]
        entries.sort(key=lambda entry: parse(entry.wheel).project != UPSTREAM_DISTRIBUTION)
        done = index.publish_together(folder, entries, channel=promotion.target)
    return Outcome(
        index=str(folder),
        kind="directory",
        channel=promotion.target,
        version=unit.version,
        files=tuple(
            PublishedFile(entry.wheel.name, str(entry.approved), each.already_there)
            for entry, each in zip(entries, done, strict=True)
        ),
        notes=(),
        install=install_lines(
            index.simple_folder(folder, promotion.target),
            unit.version,
            with_alias=alias_name(unit.version) in {entry.wheel.name for entry in entries},
        ),
    )


def _on_devpi(
    promotion: Promotion,
    server: Server,
    connection: Connection,
    project: Project,
    cache: Cache,
    now: datetime,
) -> Outcome:
    """Push from stage to stage: the files are what the reports are about before and after it."""
    user = server.stage.partition("/")[0]
    name = promotion.target if "/" in promotion.target else f"{user}/{promotion.target}"
    root = server.url.rstrip("/").rsplit("/", 2)[0]
    target = remote_index.examine(f"{root}/{name}/", connection)
    channel = publish.channel_of(target, None)
    publish.require_keeping(target, channel)
    offered = _listing(server, connection)
    version, wheels = _pushed(promotion.what, offered[DISTRIBUTION], server)
    _require_wheels_alone(version, offered, server)
    if server.volatile:
        raise UnsupportedByServerError(
            "the index is volatile: a wheel could be replaced between its check and the push",
            where=server.url,
            next_step=f"devpi index {server.stage} volatile=False",
        )
    aliases = (f for f in offered[UPSTREAM_DISTRIBUTION] if f.name == alias_name(version))
    alias = next(aliases, None)
    with atomic.scratch_folder(cache.work) as scratch:
        entries: list[Entry] = []
        if alias is not None:
            path = remote_index.download(alias, scratch / "theirs", server, connection)
            entries = [Entry(path, approved=require_alias(path, version))]
        for file in wheels:
            wheel = remote_index.download(file, scratch, server, connection)
            verdict = approve(channel, wheel, promotion.reports, project, now)
            unit = gather(wheel, verdict, scratch / "ours")
            if alias is None and unit.alias is not None:
                raise PackageIndexError(
                    "the wheel requires its alias, and the index has none of that version",
                    where=server.url,
                    details=(unit.alias.name,),
                    next_step=f"publish {file.name} there again: the alias goes with it",
                )
            entries.append(unit.entries()[-1])
        there = _listing(target, connection)
        before = _held(there, version, target, connection)
        _copy(entries, there, server, target, version, connection)
    approved = {entry.wheel.name: str(entry.approved) for entry in entries}
    after = _held(_listing(target, connection), version, target, connection)
    if after != approved | before:
        raise UploadFailedError(
            "the index has not what was promoted; somebody else may have uploaded just now",
            where=target.url,
            details=tuple(
                f"{sha256}  {name}{'' if name in approved | before else '  which no report is about'}"
                for name, sha256 in sorted(after.items())
            ),
            next_step="remove what no report is about (devpi remove --force --index INDEX URL), then run the "
            "command again",
        )
    return Outcome(
        index=target.url,
        kind=str(target.kind),
        channel=channel,
        version=version,
        files=tuple(PublishedFile(n, sha256, n in before) for n, sha256 in approved.items()),
        notes=(),
        install=install_lines(
            target.simple, version, complete=target.complete, with_alias=alias is not None
        ),
    )


def _listing(server: Server, connection: Connection) -> _Listing:
    return {
        project: remote_index.list_files(server, project, connection)
        for project in (DISTRIBUTION, UPSTREAM_DISTRIBUTION)
    }


def _copy(
    entries: Sequence[Entry],
    there: _Listing,
    server: Server,
    target: Server,
    version: str,
    connection: Connection,
) -> None:
    """Push each project that the target lacks; upload what is missing of the others.

    devpi refuses the push of a version of which a non-volatile index has one file already, such as
    another machine's wheel.

    :param there: what the target has.
    """
    missing = [entry for entry in entries if not _has(there, entry, target, connection)]
    for project in (UPSTREAM_DISTRIBUTION, DISTRIBUTION):  # the alias first, as everywhere
        all_, waiting = (
            [entry for entry in some if parse(entry.wheel).project == project]
            for some in (entries, missing)
        )
        if waiting and waiting == all_:
            remote_index.push(server, project, version, target.stage, connection)
        else:
            for entry in waiting:
                publish.send(entry, target, connection)


def _has(there: _Listing, entry: Entry, target: Server, connection: Connection) -> bool:
    name, sha256 = entry.wheel.name, str(entry.approved)
    files = there[parse(entry.wheel).project]
    return publish.held(name, sha256, files, target, connection) is not None


def _pushed(what: str, files: Sequence[RemoteFile], server: Server) -> tuple[str, list[RemoteFile]]:
    """Return what devpi's push takes along: all files of the version.

    :raises UnsupportedByServerError: one wheel of several was asked for.
    """
    wheels = [file for file in files if file.name.endswith(".whl")]
    found = [f for f in wheels if what in {f.name, version_of(Path(f.name))}]
    if not found:
        versions = dict.fromkeys(version_of(Path(file.name)) for file in wheels)
        raise _lacks(what, server.url, ", ".join(versions))
    version = version_of(Path(found[0].name))
    pushed = [file for file in wheels if version_of(Path(file.name)) == version]
    if len(pushed) != len(found):
        raise UnsupportedByServerError(
            "devpi pushes all files of a version, not one wheel of it",
            where=server.url,
            details=tuple(file.name for file in pushed),
            next_step=f"promote {version}, with a report for each of them",
        )
    return version, pushed


def _require_wheels_alone(version: str, offered: _Listing, server: Server) -> None:
    """Refuse to push what no report is about: an sdist, say, which installers build and run.

    :raises UnsupportedByServerError: the version has a file that is no wheel of ours.
    """
    other = [file for file in _files_of(version, offered) if not _is_ours(file, version)]
    if other:
        raise UnsupportedByServerError(
            "devpi pushes all files of a version, and no report can be about this one",
            where=server.url,
            details=tuple(file.name for file in other),
            next_step=f"devpi remove --force --index {server.stage} {other[0].url}, then promote again",
        )


def _files_of(version: str, listing: _Listing) -> list[RemoteFile]:
    """Return all that a push of the version takes, the alias included."""
    return [
        file
        for project, files in listing.items()
        for file in files
        if _is_of(file, project, version)
    ]


def _is_ours(file: RemoteFile, version: str) -> bool:
    """Tell a wheel, which needs a report, and the alias, whose version determines its bytes."""
    if not file.name.endswith(".whl"):
        return False
    return file.name == alias_name(version) or parse(Path(file.name)).project == DISTRIBUTION


def _is_of(file: RemoteFile, project: str, version: str) -> bool:
    """Tell whether a push of the version takes the file; where its name is in doubt, it does."""
    if file.name.endswith(".whl"):
        return version_of(Path(file.name)) == version
    try:
        name, found = parse_sdist_filename(file.name)
    except InvalidSdistFilename:
        return True
    return (name, str(found)) == (project, version)


def _held(
    listing: _Listing, version: str, server: Server, connection: Connection
) -> dict[str, str]:
    """Return the sha256 of each file that an index has of a version, the alias included."""
    return {
        file.name: remote_index.sha256_of(file, server, connection)
        for file in _files_of(version, listing)
    }


def yank(location: str, channel: str, what: str, reason: str | None) -> tuple[ListedWheel, ...]:
    """Mark wheels in a directory index as not to be taken any more (PEP 592); None undoes it.

    What installs by an exact pin goes on installing. The alias follows its wheels.

    :raises UnsupportedByServerError: neither pypiserver nor devpi knows the mark.
    :raises PackageIndexError: the channel has no such wheel.
    """
    folder = publish.folder_of(location)
    if folder is None:
        with Connection(location, credentials_for(location)) as connection:
            server = remote_index.examine(location, connection)
        raise UnsupportedByServerError(
            f"{server.kind} cannot yank (PEP 592)",
            where=server.url,
            next_step="publish a newer revision (+glm5.N), which installers prefer; or delete the "
            "file on the server",
        )
    marked = {wheel.path.name for wheel in listed(folder, channel, what)}
    everything = index.list_wheels(folder, channel)
    versions = {wheel.version for wheel in everything if wheel.path.name in marked}
    for version in versions:
        ours = [w for w in everything if w.project == DISTRIBUTION and w.version == version]
        left = [w for w in ours if w.path.name not in marked and w.yanked is None]
        if not left:  # the alias stands for nothing any more; or again, where this undoes it
            marked.add(alias_name(version))
    wheels = [wheel for wheel in everything if wheel.path.name in marked]
    index.set_yanked(folder, channel, wheels, reason)
    return tuple(w for w in index.list_wheels(folder, channel) if w.path.name in marked)
