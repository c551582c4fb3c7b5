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

from builder import atomic, metadata
from builder.classify import Kind, TouchedPath
from builder.console import say
from builder.digests import sha256_of
from builder.errors import AuditError, UnfaithfulModeError
from builder.locations import DISTRIBUTION, Cache
from builder.repack import WheelInputs, metadata_members, own_members
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

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_OF_THE_BUILD = ("METADATA", "top_level.txt")
AUDIT_FORMAT = 3  # raised when the audit asks more than before: cached results count no longer
_REBUILD = "python -m builder --tag TAG, from a clean checkout; do not publish this file"


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
    parts = [str(AUDIT_FORMAT), ours, theirs, inputs.applied.head, wheel.name, str(compiled)]
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
                raise _fault(wheel, dist_info, "is not the name of the wheel's .dist-info folder")
            if len(names) != len(set(names)):
                twice = next(name for name in names if names.count(name) > 1)
                raise _fault(wheel, twice, "stands in the archive twice")
            _check_names(wheel, names, dist_info)
            _check_record_lines(wheel, record_lines(archive, dist_info), dist_info)
            old = dist_info_of(official.namelist(), inputs.official.name)
            record, known = read_record(archive, dist_info), read_record(official, old)
            modes = {i.filename: i.external_attr >> 16 & 0o777 for i in official.infolist()}
            _check_modes(wheel, archive, modes, inputs, old, dist_info)
        _check_record(wheel, names, record, dist_info)
        _check_hashes(wheel, record)
        differences = list(_differences(wheel, inputs, record, known, old, compiled=compiled))
        _check_dist_info(wheel, inputs, compiled=compiled)
    except UNREADABLE as error:
        raise AuditError(
            f"not a readable wheel: {error}", where=wheel.name, next_step=_REBUILD
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


def _fault(wheel: Path, member: str, what: str) -> AuditError:
    return AuditError(f"{member} {what}", where=wheel.name, next_step=_REBUILD)


def _check_names(wheel: Path, names: list[str], dist_info: str) -> None:
    """Refuse what would be written outside of the environment, and signatures, which sign nothing."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or name != str(path):
            raise _fault(wheel, name, "is not the name of a file inside the wheel")
    for name in SIGNATURES:
        if f"{dist_info}/{name}" in names:
            raise _fault(wheel, f"{dist_info}/{name}", "is in no wheel that this tool builds")


def _check_record_lines(wheel: Path, lines: list[list[str]], dist_info: str) -> None:
    """Refuse what an installer would read otherwise: pip deletes what RECORD lists, hash or not."""
    own, seen = f"{dist_info}/RECORD", set()
    for line in lines:
        path, *rest = line or [""]
        if path in seen:
            raise _fault(wheel, path, "is listed in RECORD twice")
        seen.add(path)
        if not (rest == ["", ""] if path == own else len(rest) == 2 and all(rest)):
            raise _fault(wheel, path or "an empty line", f"stands in RECORD as {','.join(line)!r}")
    if own not in seen:
        raise _fault(wheel, own, "is not listed in itself")


def _check_record(
    wheel: Path, names: list[str], record: dict[str, RecordEntry], dist_info: str
) -> None:
    expected = set(names) - {f"{dist_info}/RECORD"}
    if missing := sorted(expected - set(record)):
        raise _fault(wheel, missing[0], "is not listed in RECORD")
    if extra := sorted(set(record) - expected):
        raise _fault(wheel, extra[0], "is listed in RECORD and not in the archive")


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
                raise _fault(wheel, name, what)


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
            raise _fault(wheel, info.filename, f"has mode {actual:o}, {expected:o} is expected")


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
            raise _fault(wheel, path, f"is missing, {item.patches[-1]} adds or changes it")
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
        raise _fault(wheel, item.path, f"is still upstream's, {item.patches[-1]} changes it")


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
        raise _fault(wheel, name, "is not what the rename makes of it")
    item = touched.get(name)
    if item is not None and item.kind is Kind.SHIPS:
        if entry == _entry(inputs.after(name)):
            return item.patches
        raise _fault(wheel, name, f"is not what {', '.join(item.patches)} makes of it")
    builders = tuple(
        sorted(
            {p for i in inputs.touched if i.kind in (Kind.BUILD, Kind.COMPILED) for p in i.patches}
        )
    )
    tree = inputs.after(name) if entry is not None else None
    if tree is not None and entry != _entry(tree):
        raise _fault(wheel, name, "is not the file of the patched tree")
    is_extension = name.endswith(".so")
    if builders and not is_extension and _is_in_a_package(name, inputs):
        return builders  # upstream's build, changed by these, made or left out the file
    if compiled:
        return (*builders, "built from source")
    raise _fault(wheel, name, "differs from the official wheel's, and no patch explains it")


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


def _check_dist_info(wheel: Path, inputs: WheelInputs, *, compiled: bool) -> None:
    """Compare METADATA, entry points, WHEEL, SBOM and the rest with what the trees say."""
    dist_info = dist_info_name(inputs.version)
    with ZipFile(wheel) as archive, ZipFile(inputs.official) as official:
        theirs = _about(official, dist_info_of(official.namelist(), inputs.official.name))
        ours = _about(archive, dist_info)
    _check_metadata(wheel, inputs, theirs["METADATA"].decode(), ours.get("METADATA", b"").decode())
    builders = {p for i in inputs.touched if i.kind is Kind.BUILD for p in i.patches}
    expected = dict(theirs)
    written: dict[str, Content | None] = dict(own_members(inputs))
    try:
        written |= metadata_members(inputs)
    except UnfaithfulModeError:  # only upstream's own code knows, and that was run
        builders |= _metadata_patches(inputs)
    for name, content in written.items():
        if not name.startswith(f"{dist_info}/"):
            continue
        short = name.removeprefix(f"{dist_info}/")
        if content is None:
            expected.pop(short, None)
        else:
            expected[short] = b"".join(content.chunks())
    for name in sorted((expected.keys() | ours.keys()) - {"METADATA"}):
        want, have = expected.get(name), ours.get(name)
        own = name == "WHEEL" or name.startswith("sboms/")
        if want == have or (builders and not own and _may_follow_the_build(name, want, have)):
            continue
        if name == "WHEEL" and compiled and _without_tags(want) == _without_tags(have):
            continue
        what = "is not what the patches and the rename make of it"
        if want is None:
            what = "is in no official wheel and no patch adds it"
        elif have is None:
            what = "is missing"
        elif name.startswith("sboms/"):
            what = "describes other inputs"
        raise _fault(wheel, f"{dist_info}/{name}", what)


def _may_follow_the_build(name: str, want: bytes | None, have: bytes | None) -> bool:
    """Tell whether a changed build may change this member: none that it did not write before.

    An entry point that is new or changed has to lead into upstream's package.
    """
    if name != "entry_points.txt":
        return name in _OF_THE_BUILD or name.startswith("licenses/")
    before = (want or b"").decode().splitlines()
    lines = [line for line in (have or b"").decode().splitlines() if line not in before]
    return all(
        re.fullmatch(r"\[[\w.-]+\]|\s*|[^=\[]+=\s*vllm\w*([.:][\w.:]+)?\s*", x) for x in lines
    )


def _about(archive: ZipFile, dist_info: str) -> dict[str, bytes]:
    """Return the members of the dist-info folder, RECORD and its signatures apart."""
    names = (name for name in archive.namelist() if name.startswith(f"{dist_info}/"))
    shorts = {name.removeprefix(f"{dist_info}/"): name for name in names}
    return {
        short: archive.read(name)
        for short, name in shorts.items()
        if short != "RECORD" and short not in SIGNATURES
    }


def _without_tags(wheel_file: bytes | None) -> list[bytes]:
    return [line for line in (wheel_file or b"").splitlines() if not line.startswith(b"Tag:")]


def _check_metadata(wheel: Path, inputs: WheelInputs, official: str, ours: str) -> None:
    head = ours.partition("\n\n")[0]
    if not head.startswith("Metadata-Version:") or _CONTROL.search(head):
        raise _fault(wheel, "METADATA", "is not one that installers read: its header is damaged")
    before, after = metadata.parse(official), metadata.parse(ours)
    expected = {"Name": [DISTRIBUTION], "Version": [inputs.version]}
    for name in sorted({key for key, _ in (*before.fields, *after.fields)}):
        was, now = sorted(before.values(name)), sorted(after.values(name))
        if name in expected:
            if now != expected[name]:
                raise _fault(wheel, f"METADATA {name}", f"is {now}, {expected[name]} is expected")
        elif was != now and not _metadata_patches(inputs):
            what = f"differs and no patch explains it: {_odd_one(was, now)}"
            raise _fault(wheel, f"METADATA {name}", what)
    if any(item.kind is Kind.BUILD for item in inputs.touched):
        return
    try:
        text = metadata.patched_metadata(
            official, inputs.before, inputs.after, inputs.version, inputs.pin.cuda
        )
    except UnfaithfulModeError:  # only upstream's own code knows, and that was run
        return
    computed = metadata.parse(text)
    for name in sorted({key for key, _ in (*computed.fields, *after.fields)}):
        want, have = sorted(computed.values(name)), sorted(after.values(name))
        if want != have:
            what = f"is not what the patches make: {_odd_one(want, have)}"
            raise _fault(wheel, f"METADATA {name}", what)
    if computed.body.strip() != after.body.strip():
        raise _fault(wheel, "METADATA", "has another description than the tree")


def _odd_one(want: list[str], have: list[str]) -> str:
    """Return a value that stands in one list more often than in the other."""
    return next(v for v in (*have, *want) if want.count(v) != have.count(v))


def _metadata_patches(inputs: WheelInputs) -> set[str]:
    kinds = (Kind.METADATA, Kind.BUILD)
    return {patch for item in inputs.touched if item.kind in kinds for patch in item.patches}
