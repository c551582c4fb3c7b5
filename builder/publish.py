"""The stage that publishes: a wheel and its GPU report in, an entry of an index out.

Nothing but staging takes a wheel without a report that satisfies the channel's policy, and what is
published is what the report is about: the directory index compares the bytes that it copies, a
server is read after the upload.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from builder import index, metadata, remote_index, uploading
from builder.connection import Connection
from builder.console import say
from builder.credentials import credentials_for
from builder.errors import (
    UnsupportedByServerError,
    UploadFailedError,
    VersionExistsError,
)
from builder.index import STABLE, STAGING, Entry
from builder.install_lines import install_lines
from builder.locations import Project
from builder.remote_index import Kind, RemoteFile, Server
from builder.unit import Unit, approve, gather
from builder.wheel_file import parse, read_metadata

_SETTLE = 2  # seconds between looks at a file that another publisher may be sending


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    :param index: a folder, or the URL of a server.
    :param channel: None takes the index's own: devpi's name of it, else stable.
    :param require_metadata: refuse a server whose pages say neither Requires-Python nor METADATA.
    """

    wheel: Path
    index: str
    reports: tuple[Path, ...] = ()
    channel: str | None = None
    require_metadata: bool = False


@dataclass(frozen=True)
class PublishedFile:
    """A file as the index lists it now."""

    name: str
    sha256: str
    already_there: bool


@dataclass(frozen=True)
class Sent:
    """A file of ours as a server lists it."""

    file: RemoteFile
    sha256: str
    already_there: bool


@dataclass(frozen=True)
class Outcome:
    """Where a version can be installed from now.

    :param notes: what this kind of index cannot do.
    :param install: the lines for pip and uv.
    """

    index: str
    kind: str
    channel: str
    version: str
    files: tuple[PublishedFile, ...]
    notes: tuple[str, ...]
    install: tuple[str, ...]


def folder_of(location: str) -> Path | None:
    """Return the folder of a directory index; None where the text is the URL of a server.

    :raises UnsupportedByServerError: it is neither, such as a variable of a CI that is not set.
    """
    neither = UnsupportedByServerError(
        "neither a folder nor the URL of a package server",
        where=f"--index {location.rpartition('@')[2]!r}",  # who mistypes may have credentials
        next_step="give --index a folder, or a URL that begins with https:// or http://",
    )
    try:
        parts = urlsplit(location)
    except ValueError as error:
        raise neither from error
    is_url = parts.scheme in {"http", "https"}
    if is_url and (parts.query or parts.fragment):
        raise UnsupportedByServerError(
            "the URL of an index has neither a query nor a fragment",
            where=urlunsplit((*parts[:1], parts.netloc.rpartition("@")[2], parts.path, "", "")),
            next_step="give the URL without what begins with ? or #; a token is the password of "
            "TWINE_PASSWORD, ~/.netrc or the keyring",
        )
    if is_url and parts.netloc:
        return None
    is_file = parts.scheme == "file" and parts.netloc in {"", "localhost"}
    if not location.strip() or is_url or ("://" in location and not is_file):
        raise neither
    return Path(unquote(parts.path) if is_file else location).absolute()


def publish(request: Request, project: Project, now: datetime) -> Outcome:
    """Publish a wheel, and the alias that lies beside it or that it requires.

    :raises ReportRefused: no report lets it into the channel; nothing was changed.
    :raises VersionExistsError: the index has other bytes under that version.
    :raises UploadRefusedError, UnsupportedByServerError, UploadFailedError: a server's refusals.
    """
    folder = folder_of(request.index)
    if folder is not None:
        return _into_folder(request, folder, project, now)
    credentials = credentials_for(request.index)
    with Connection(request.index, credentials) as connection:
        server = remote_index.examine(request.index, connection)
        return _to_server(request, server, connection, project, now)


def _into_folder(request: Request, folder: Path, project: Project, now: datetime) -> Outcome:
    channel = request.channel or STABLE
    verdict = approve(channel, request.wheel, request.reports, project, now)
    with tempfile.TemporaryDirectory() as scratch:
        unit = gather(request.wheel, verdict, Path(scratch))
        entries = unit.entries()
        published = index.publish_together(folder, entries, channel=channel)
        files = tuple(
            PublishedFile(entry.wheel.name, entry.approved or unit.sha256, done.already_there)
            for entry, done in zip(entries, published, strict=True)
        )
    return Outcome(
        index=str(folder),
        kind="directory",
        channel=channel,
        version=unit.version,
        files=files,
        notes=_missing_provenance(unit),
        install=install_lines(
            index.simple_folder(folder, channel), unit.version, with_alias=unit.alias is not None
        ),
    )


def _missing_provenance(unit: Unit) -> tuple[str, ...]:
    if any(name.endswith(".provenance.json") for name in unit.beside):
        return ()
    return (f"no {unit.wheel.name}.provenance.json lies beside the wheel: none was published",)


def channel_of(server: Server, asked: str | None) -> str:
    """Return the channel that an index of a server is.

    A devpi index is the channel that its name says. Everything else is released to users, and asks
    for a report.

    :raises UnsupportedByServerError: that index is another channel.
    """
    name = server.stage.rpartition("/")[2]
    own = name if name == STAGING or name.startswith(STABLE) else None
    if asked == STAGING != own:
        raise UnsupportedByServerError(
            "staging on a server is a devpi index of that name; all others take tested wheels only",
            where=server.url,
            next_step="give --report, or --index https://HOST/USER/staging/ of a devpi server",
        )
    if own is not None and asked not in {None, own}:
        raise UnsupportedByServerError(
            f"the index {server.stage} is the channel {own}, not {asked}",
            where=server.url,
            next_step="leave --channel out, or give another index; python -m builder promote takes "
            "a wheel from one to the other",
        )
    if asked is not None and not asked.startswith(STABLE) and asked != name:
        raise UnsupportedByServerError(
            f"the channel {asked} on a server is a devpi index of that name",
            where=server.url,
            next_step=f"give the URL of the index {asked}, or --channel {STABLE}",
        )
    return asked or own or STABLE


def _to_server(
    request: Request, server: Server, connection: Connection, project: Project, now: datetime
) -> Outcome:
    channel = channel_of(server, request.channel)
    require_keeping(server, channel)
    if request.require_metadata and server.kind is not Kind.DEVPI:
        raise UnsupportedByServerError(
            f"the pages of {server.kind} have neither requires-python nor metadata (PEP 658)",
            where=server.url,
            next_step="leave --require-metadata out, or publish to a directory index or to devpi",
        )
    verdict = approve(channel, request.wheel, request.reports, project, now)
    remote_index.require_upload_right(server, connection)
    if not server.loses_cut_uploads:
        say(
            "this server runs on wsgiref, which keeps the first half of an upload that is cut: "
            "install waitress beside it (pip install waitress), which it takes by itself"
        )
    with tempfile.TemporaryDirectory() as scratch:
        unit = gather(request.wheel, verdict, Path(scratch))
        sent = tuple(send(entry, server, connection) for entry in unit.entries())
        listed = sent[-1].file
        notes = _notes(unit, listed, server)
    if request.require_metadata and not listed.has_metadata:
        raise UnsupportedByServerError(
            "the wheel is published, and the page has no metadata (PEP 658)",
            where=server.url,
            next_step="start devpi-server with --enable-core-metadata",
        )
    return Outcome(
        index=server.url,
        kind=str(server.kind),
        channel=channel,
        version=unit.version,
        files=tuple(PublishedFile(s.file.name, s.sha256, s.already_there) for s in sent),
        notes=notes,
        install=install_lines(
            server.simple, unit.version, complete=server.complete, with_alias=unit.alias is not None
        ),
    )


def require_keeping(server: Server, channel: str) -> None:
    """Refuse an index where what is released could be replaced, or be there without a report.

    :raises UnsupportedByServerError: it is volatile, or inherits a staging index.
    """
    if server.volatile and channel != STAGING:
        raise UnsupportedByServerError(
            "the index is volatile: anybody who may upload can replace a released wheel",
            where=server.url,
            next_step=f"devpi index {server.stage} volatile=False",
        )
    untested = [name for name in server.bases if name.rpartition("/")[2] == STAGING]
    if untested and channel != STAGING:
        raise UnsupportedByServerError(
            f"the index inherits {untested[0]}: all that is staged there is released here",
            where=server.url,
            next_step=f"devpi index {server.stage} bases-={untested[0]}",
        )


def held(
    name: str,
    sha256: str,
    files: Iterable[RemoteFile],
    server: Server,
    connection: Connection,
    ours: Path | None = None,
) -> RemoteFile | None:
    """Return what the server lists under this name, where it has these bytes.

    :param files: what it lists of the wheel's project.
    :param ours: the wheel, to compare with what an upload that was cut may have left.
    :raises VersionExistsError: it has another wheel of that version for that machine.
    """
    wheel = parse(Path(name))
    for file in files:
        if not file.name.endswith(".whl") or not wheel.excludes(parse(Path(file.name))):
            continue
        theirs = remote_index.sha256_of(file, server, connection)
        if file.name == name and theirs == sha256:
            return file
        facts = (f"sha256 there  {theirs}  {file.name}", f"sha256 given  {sha256}  {name}")
        if ours and file.name == name and remote_index.is_cut(file, ours, server, connection):
            raise _CutError(
                "the server has the first part of this wheel, from an upload that was cut",
                where=file.url,
                details=facts,
                next_step=f"delete {file.name} on the server, then publish again",
            )
        raise VersionExistsError(
            f"the server has another wheel of {wheel.project} {wheel.version} for that machine",
            where=file.url,
            details=facts,
            next_step="raise N of +glm5.N (python -m builder revision --tag TAG --raise) and "
            "build again; what was published stays as it is",
        )
    return None


class _CutError(VersionExistsError):
    """A part of the wheel is there; it is whole soon where another publisher sends it just now."""


def _settled(
    entry: Entry, sha256: str, server: Server, connection: Connection
) -> RemoteFile | None:
    """Look again where another publisher may be sending this very file just now."""
    project, before = parse(entry.wheel).project, ""
    while True:
        files = remote_index.list_files(server, project, connection)
        try:
            return held(entry.wheel.name, sha256, files, server, connection, entry.wheel)
        except _CutError as error:
            if error.details[0] == before:  # nobody is sending it
                raise
            before = error.details[0]
        time.sleep(_SETTLE)


def send(entry: Entry, server: Server, connection: Connection) -> Sent:
    """Upload one approved wheel, and see it listed.

    :raises VersionExistsError: the server has other bytes under that version.
    :raises UploadFailedError: it is not listed.
    """
    sha256 = entry.approved
    assert sha256 is not None  # noqa: S101 - a unit's entries have one
    before = _settled(entry, sha256, server, connection)
    if before is not None:
        return Sent(before, sha256, already_there=True)
    failure = None
    try:
        uploading.upload(entry.wheel, sha256, server, connection)
    except UploadFailedError as error:
        # The answer alone may be lost, or another publisher was quicker with the same bytes.
        failure = error
    after = _settled(entry, sha256, server, connection)
    if after is None:
        raise failure or UploadFailedError(
            "the server took the file and does not list it",
            where=server.simple,
            next_step="look into the server's log, then run the command again",
        )
    return Sent(after, sha256, already_there=False)


def _notes(unit: Unit, listed: RemoteFile, server: Server) -> tuple[str, ...]:
    notes = []
    if unit.beside:
        notes.append(
            f"{server.kind} keeps no attestations (PEP 740) and no other files: "
            f"{', '.join(sorted(unit.beside))} stay where you have them"
        )
    notes += _missing_provenance(unit)
    if not listed.has_metadata:
        notes.append(
            f"the page of {server.kind} has no metadata (PEP 658): installers read it from the "
            "wheel"
            + (", which --enable-core-metadata changes" if server.kind is Kind.DEVPI else "")
        )
    if listed.requires_python is None and _requires_python(unit.wheel):
        notes.append(
            f"the page of {server.kind} has no requires-python: an unfit Python finds out late"
        )
    return tuple(notes)


def _requires_python(wheel: Path) -> str | None:
    with wheel.open("rb") as file:
        fields = metadata.parse(read_metadata(file, wheel).decode())
    return next(iter(fields.values("Requires-Python")), None)
