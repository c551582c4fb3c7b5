"""Stage audit: the proof that the wheel differs from the official one in just what the series says.

Every byte is read again: each RECORD hash is recomputed, each member compared with upstream's, and
each difference must be what a patch or the rename makes of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from builder import alias, atomic
from builder.audit_dist_info import REBUILD, check_dist_info, fault
from builder.classify import Kind, TouchedPath
from builder.console import say
from builder.digests import sha256_of
from builder.errors import AuditError
from builder.locations import Cache
from builder.repack import WheelInputs, own_members
from builder.wheel_archive import (
    CHUNK,
    SIGNATURES,
    UNREADABLE,
    Content,
    RecordEntry,
    dist_info_of,
    read_record,
    record_hash,
    record_lines,
)
from builder.wheel_name import dist_info_name

AUDIT_FORMAT = 3  # raised when the audit asks more than before: cached results count no longer


@dataclass(frozen=True)
class Difference:
    """A member that is not the official one, and what explains it."""

    member: str
    change: str  # added, changed or removed
    explained_by: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """The result for one wheel: everything that differs is in ``differences``."""

    wheel_sha256: str
    official_sha256: str
    members: int
    identical: int
    compiled: int
    differences: tuple[Difference, ...]


def audit(wheel: Path, inputs: WheelInputs, cache: Cache, *, compiled: bool = False) -> Audit:
    """Audit the wheel, or look the result up where these very files were audited before.

    :param compiled: the wheel was built from source, so its extensions are not upstream's.
    :raises AuditError: naming the member, field or tag that nothing explains.
    """
    ours, theirs = sha256_of(wheel), sha256_of(inputs.official)
    parts = [str(AUDIT_FORMAT), ours, theirs, inputs.applied.head, wheel.name, str(compiled),
             *inputs.own_requirements]  # fmt: skip
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    record = cache.audits / f"{key}.json"
    if record.exists():
        try:
            data = json.loads(record.read_text())
            differences = tuple(
                Difference(d["member"], d["change"], tuple(d["explained_by"]))
                for d in data.pop("differences")
            )
            return Audit(**data, differences=differences)
        except (ValueError, TypeError, KeyError):
            record.unlink()
    say(f"audit: {wheel.name}")
    result = _audit(wheel, inputs, ours, theirs, compiled=compiled)
    atomic.write_text(record, json.dumps(asdict(result), indent=1))
    return result


def _audit(wheel: Path, inputs: WheelInputs, ours: str, theirs: str, *, compiled: bool) -> Audit:
    dist_info = dist_info_name(inputs.version)
    try:
        with ZipFile(wheel) as archive, ZipFile(inputs.official) as official:
            names = archive.namelist()
            if dist_info_of(names, wheel.name) != dist_info:
                raise fault(wheel, dist_info, "is not the name of the wheel's .dist-info folder")
            if len(names) != len(set(names)):
                twice = next(name for name in names if names.count(name) > 1)
                raise fault(wheel, twice, "stands in the archive twice")
            _check_names(wheel, names, dist_info)
            _check_record_lines(wheel, record_lines(archive, dist_info), dist_info)
            old = dist_info_of(official.namelist(), inputs.official.name)
            record, known = read_record(archive, dist_info), read_record(official, old)
            modes = {i.filename: i.external_attr >> 16 & 0o777 for i in official.infolist()}
            _check_modes(wheel, archive, modes, inputs, old, dist_info)
        _check_record(wheel, names, record, dist_info)
        _check_hashes(wheel, record)
        differences = list(_differences(wheel, inputs, record, known, old, compiled=compiled))
        check_dist_info(wheel, inputs, compiled=compiled)
        differences += [
            Difference(f"{dist_info}/METADATA: {line}", "added", (alias.SETTING,))
            for line in inputs.own_requirements
        ]
    except UNREADABLE as error:
        raise AuditError(
            f"not a readable wheel: {error}", where=wheel.name, next_step=REBUILD
        ) from error
    renamed = {n.replace(f"{old}/", f"{dist_info}/", 1): entry for n, entry in known.items()}
    identical = sum(renamed.get(name) == entry for name, entry in record.items())
    return Audit(
        wheel_sha256=ours,
        official_sha256=theirs,
        members=len(names),
        identical=identical,
        compiled=sum(n.endswith(".so") and known.get(n) == record.get(n) for n in record),
        differences=tuple(sorted(differences, key=lambda item: item.member)),
    )


def _check_names(wheel: Path, names: list[str], dist_info: str) -> None:
    """Refuse what would be written outside of the environment, and signatures, which sign nothing."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or name != str(path):
            raise fault(wheel, name, "is not the name of a file inside the wheel")
    for name in SIGNATURES:
        if f"{dist_info}/{name}" in names:
            raise fault(wheel, f"{dist_info}/{name}", "is in no wheel that this tool builds")


def _check_record_lines(wheel: Path, lines: list[list[str]], dist_info: str) -> None:
    """Refuse what an installer would read otherwise: pip deletes what RECORD lists, hash or not."""
    own, seen = f"{dist_info}/RECORD", set()
    for line in lines:
        path, *rest = line or [""]
        if path in seen:
            raise fault(wheel, path, "is listed in RECORD twice")
        seen.add(path)
        if not (rest == ["", ""] if path == own else len(rest) == 2 and all(rest)):
            raise fault(wheel, path or "an empty line", f"stands in RECORD as {','.join(line)!r}")
    if own not in seen:
        raise fault(wheel, own, "is not listed in itself")


def _check_record(
    wheel: Path, names: list[str], record: dict[str, RecordEntry], dist_info: str
) -> None:
    expected = set(names) - {f"{dist_info}/RECORD"}
    if missing := sorted(expected - set(record)):
        raise fault(wheel, missing[0], "is not listed in RECORD")
    if extra := sorted(set(record) - expected):
        raise fault(wheel, extra[0], "is listed in RECORD and not in the archive")


def _check_hashes(wheel: Path, record: dict[str, RecordEntry]) -> None:
    """Recompute every hash. zlib and hashlib let go of the interpreter lock: two threads."""
    with ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    order = sorted(record, key=lambda name: -sizes[name])
    with ThreadPoolExecutor(2) as pool:
        for faults in pool.map(
            _hash_faults, repeat(wheel), (order[::2], order[1::2]), repeat(record)
        ):
            for name, what in faults:
                raise fault(wheel, name, what)


def _hash_faults(
    wheel: Path, names: Iterable[str], record: dict[str, RecordEntry]
) -> list[tuple[str, str]]:
    faults = []
    with ZipFile(wheel) as archive:
        for name in names:
            digest, size = hashlib.sha256(), 0
            try:
                with archive.open(name) as member:
                    while chunk := member.read(CHUNK):
                        digest.update(chunk)
                        size += len(chunk)
            except UNREADABLE as error:
                faults.append((name, f"is damaged: {error}"))
                continue
            if RecordEntry(record_hash(digest.digest()), size) != record[name]:
                faults.append((name, "is not what RECORD says (sha256 or size differ)"))
    return faults


def _check_modes(
    wheel: Path,
    archive: ZipFile,
    modes: dict[str, int],
    inputs: WheelInputs,
    old: str,
    dist_info: str,
) -> None:
    patched = {item.path: item.mode for item in inputs.touched if item.present}
    for info in archive.infolist():
        if info.filename == f"{dist_info}/RECORD":
            continue
        before = modes.get(info.filename.replace(f"{dist_info}/", f"{old}/", 1))
        expected = patched.get(info.filename, before)
        actual = info.external_attr >> 16 & 0o777
        if expected is not None and (actual ^ expected) & 0o111:
            raise fault(wheel, info.filename, f"has mode {actual:o}, {expected:o} is expected")


def _differences(
    wheel: Path,
    inputs: WheelInputs,
    record: dict[str, RecordEntry],
    known: dict[str, RecordEntry],
    old: str,
    *,
    compiled: bool,
) -> Iterable[Difference]:
    """Yield each difference with its explanation; raise where there is none."""
    dist_info = dist_info_name(inputs.version)
    touched = {item.path: item for item in inputs.touched}
    for path, item in touched.items():
        if item.kind is Kind.SHIPS and item.present and path not in record:
            raise fault(wheel, path, f"is missing, {item.patches[-1]} adds or changes it")
    own = own_members(inputs)
    ours = {name for name in record if not name.startswith(f"{dist_info}/")}
    theirs = {name for name in known if not name.startswith(f"{old}/")}
    for name in sorted(ours | theirs):
        before, after = known.get(name), record.get(name)
        if before == after:
            _check_untouched(wheel, inputs, touched.get(name), after)
            continue
        change = "added" if before is None else "removed" if after is None else "changed"
        yield Difference(
            name, change, _explain(wheel, inputs, touched, own, name, after, compiled=compiled)
        )


def _check_untouched(
    wheel: Path, inputs: WheelInputs, item: TouchedPath | None, entry: RecordEntry | None
) -> None:
    """A path that a patch changes cannot be upstream's member still."""
    if item is not None and item.kind is Kind.SHIPS and entry != _entry(inputs.after(item.path)):
        raise fault(wheel, item.path, f"is still upstream's, {item.patches[-1]} changes it")


def _explain(
    wheel: Path,
    inputs: WheelInputs,
    touched: dict[str, TouchedPath],
    own: dict[str, Content],
    name: str,
    entry: RecordEntry | None,
    *,
    compiled: bool,
) -> tuple[str, ...]:
    if name in own and name not in touched:
        source = own[name].source
        if isinstance(source, bytes) and entry == _entry(source):
            return ("rename",)
        raise fault(wheel, name, "is not what the rename makes of it")
    item = touched.get(name)
    if item is not None and item.kind is Kind.SHIPS:
        if entry == _entry(inputs.after(name)):
            return item.patches
        raise fault(wheel, name, f"is not what {', '.join(item.patches)} makes of it")
    builders = tuple(
        sorted(
            {p for i in inputs.touched if i.kind in (Kind.BUILD, Kind.COMPILED) for p in i.patches}
        )
    )
    tree = inputs.after(name) if entry is not None else None
    if tree is not None and entry != _entry(tree):
        raise fault(wheel, name, "is not the file of the patched tree")
    is_extension = name.endswith(".so")
    if builders and not is_extension and _is_in_a_package(name, inputs):
        return builders  # upstream's build, changed by these, made or left out the file
    if compiled:
        return (*builders, "built from source")
    raise fault(wheel, name, "differs from the official wheel's, and no patch explains it")


def _is_in_a_package(name: str, inputs: WheelInputs) -> bool:
    """Tell whether upstream's build could put it there: not beside its packages, as a .pth is."""
    if re.match(r"vllm\w*/", name):
        return True
    with ZipFile(inputs.official) as official:
        tops = {n.partition("/")[0] for n in official.namelist() if "/" in n}
    return "/" in name and name.partition("/")[0] in tops


def _entry(data: bytes | None) -> RecordEntry | None:
    if data is None:
        return None
    return RecordEntry(record_hash(hashlib.sha256(data).digest()), len(data))
