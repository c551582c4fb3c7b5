"""Write a wheel from the official one: members copied compressed, others stored, RECORD anew.

Nothing is deflated here: a member is either copied with upstream's compressed bytes or stored, so
that no zlib decides what the file looks like. Times, modes and order are fixed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from builder.errors import AuditError

CHUNK = 1 << 20
_TIME = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")  # APPNOTE.TXT 4.3.7
SIGNATURES = ("RECORD.jws", "RECORD.p7s")

# What zipfile, csv and decoding raise on a file that is no readable wheel.
UNREADABLE = (
    zipfile.BadZipFile, zlib.error, struct.error, csv.Error, EOFError, LookupError, ValueError,
    NotImplementedError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True)
class Content:
    """New bytes of a member, in memory or in a file; ``mode`` holds the permission bits."""

    source: bytes | Path
    mode: int = 0o644

    def chunks(self) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
        else:
            with self.source.open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk


@dataclass(frozen=True)
class RecordEntry:
    """A line of RECORD: ``sha256=`` and the urlsafe base64 digest without padding, and bytes."""

    hash: str
    size: int


def dist_info_of(names: list[str], where: str) -> str:
    """Return the wheel's one ``.dist-info`` folder name.

    :raises AuditError: there are none or several (pip refuses such a wheel).
    """
    folders = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    if len(folders) != 1:
        raise AuditError(
            f"the wheel has {len(folders)} .dist-info folders",
            where=where,
            details=tuple(sorted(folders)),
            next_step="build the wheel again",
        )
    return folders.pop()


def read_record(archive: zipfile.ZipFile, dist_info: str) -> dict[str, RecordEntry]:
    """Read RECORD; its own line, which has no hash, is left out."""
    return {
        path: RecordEntry(digest, int(size or 0))
        for path, digest, size in record_lines(archive, dist_info)
        if digest
    }


def record_lines(archive: zipfile.ZipFile, dist_info: str) -> list[list[str]]:
    """Return the lines of RECORD as they stand there: path, hash and size, as text."""
    return list(csv.reader(io.StringIO(archive.read(f"{dist_info}/RECORD").decode())))


def record_hash(digest: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def write_wheel(
    official: Path,
    out: IO[bytes],
    overlay: Mapping[str, Content],
    removed: frozenset[str],
    dist_info: str,
) -> None:
    """Write the wheel to ``out``.

    :param overlay: members by name that are new or differ from the official ones; those of the
        dist-info folder under its new name, RECORD excepted.
    :param removed: official members that are left out.
    :param dist_info: the name of the new dist-info folder.
    """
    with zipfile.ZipFile(official) as source, zipfile.ZipFile(out, "w") as target:
        old_dist_info = dist_info_of(source.namelist(), official.name)
        record = read_record(source, old_dist_info)
        lines: list[tuple[str, RecordEntry]] = []
        pending = dict(overlay)

        def store(name: str) -> None:
            lines.append((name, _store(target, name, pending.pop(name))))

        infos = source.infolist()
        package = [i for i in infos if not i.filename.startswith(f"{old_dist_info}/")]
        about = [i for i in infos if i.filename.startswith(f"{old_dist_info}/")]
        for info in package:
            _carry(source, target, info, info.filename, pending, removed, record, lines, store)
        for name in sorted(n for n in pending if not n.startswith(f"{dist_info}/")):
            store(name)
        for info in about:
            short = info.filename.removeprefix(f"{old_dist_info}/")
            if short == "RECORD" or short in SIGNATURES:
                continue
            name = f"{dist_info}/{short}"
            _carry(source, target, info, name, pending, removed, record, lines, store)
        for name in sorted(pending):
            store(name)
        _store(target, f"{dist_info}/RECORD", Content(_render_record(lines, dist_info)))


def _carry(
    source: zipfile.ZipFile,
    target: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    name: str,
    pending: Mapping[str, Content],
    removed: frozenset[str],
    record: Mapping[str, RecordEntry],
    lines: list[tuple[str, RecordEntry]],
    store: object,
) -> None:
    """Write the replacement of an official member, or the member itself, or nothing."""
    if info.is_dir() or info.filename in removed:
        return
    if name in pending:
        store(name)  # type: ignore[operator]
        return
    if info.filename not in record:
        raise AuditError(
            f"member {info.filename} of the official wheel is not in its RECORD",
            where=str(source.filename),
            next_step="compare the file with upstream's release page",
        )
    _copy_compressed(source, target, info, name)
    lines.append((name, record[info.filename]))


def _copy_compressed(
    source: zipfile.ZipFile, target: zipfile.ZipFile, info: zipfile.ZipInfo, name: str
) -> None:
    """Copy a member's compressed bytes; its times and modes stay."""
    assert source.fp is not None  # noqa: S101 - both are open
    assert target.fp is not None  # noqa: S101
    source.fp.seek(info.header_offset)
    header = _LOCAL_HEADER.unpack(source.fp.read(_LOCAL_HEADER.size))
    if header[0] != b"PK\x03\x04":
        raise AuditError(
            f"member {info.filename} has no local header where the directory says",
            where=str(source.filename),
            next_step="delete the file from the cache and run the command again",
        )
    source.fp.seek(header[-2] + header[-1], 1)  # name and extra field
    copy = zipfile.ZipInfo(name, info.date_time)
    copy.compress_type = info.compress_type
    copy.create_system = info.create_system
    copy.create_version = info.create_version
    copy.extract_version = info.extract_version
    copy.external_attr = info.external_attr
    copy.flag_bits = info.flag_bits & ~0x08  # sizes stand in the header: no data descriptor
    copy.CRC, copy.file_size, copy.compress_size = info.CRC, info.file_size, info.compress_size
    target.fp.seek(target.start_dir)
    copy.header_offset = target.fp.tell()
    target.fp.write(copy.FileHeader())
    left = info.compress_size
    while left:
        chunk = source.fp.read(min(CHUNK, left))
        if not chunk:
            raise AuditError(
                f"member {info.filename} is cut short",
                where=str(source.filename),
                next_step="delete the file from the cache and run the command again",
            )
        target.fp.write(chunk)
        left -= len(chunk)
    # zipfile has no call for a member that is compressed already: these are what its own writer
    # sets when a member is closed.
    target.filelist.append(copy)
    target.NameToInfo[name] = copy
    target.start_dir = target.fp.tell()
    target._didModify = True  # type: ignore[attr-defined]  # noqa: SLF001


def _store(target: zipfile.ZipFile, name: str, content: Content) -> RecordEntry:
    info = zipfile.ZipInfo(name, _TIME)
    info.create_system = 3  # unix: the mode counts
    info.external_attr = (0o100000 | content.mode) << 16
    if isinstance(content.source, bytes):
        info.file_size = len(content.source)
    else:
        info.file_size = content.source.stat().st_size
    size, digest = 0, hashlib.sha256()
    with target.open(info, "w") as file:
        for chunk in content.chunks():
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return RecordEntry(record_hash(digest.digest()), size)


def _render_record(lines: list[tuple[str, RecordEntry]], dist_info: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows((name, entry.hash, entry.size) for name, entry in lines)
    writer.writerow((f"{dist_info}/RECORD", "", ""))
    return text.getvalue().encode()
