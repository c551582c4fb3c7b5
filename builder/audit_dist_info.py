"""The audit of a wheel's ``.dist-info``: METADATA, entry points, WHEEL, SBOM and the rest.

Each has to be what the trees, the rename and the series' settings make of upstream's own.
"""

from __future__ import annotations

import re
from pathlib import Path
from zipfile import ZipFile

from builder import alias, metadata
from builder.classify import Kind
from builder.errors import AuditError, UnfaithfulModeError
from builder.locations import DISTRIBUTION
from builder.repack import WheelInputs, metadata_members, own_members
from builder.wheel_archive import SIGNATURES, Content, dist_info_of
from builder.wheel_name import dist_info_name

REBUILD = "python -m builder --tag TAG, from a clean checkout; do not publish this file"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_OF_THE_BUILD = ("METADATA", "top_level.txt")


def fault(wheel: Path, member: str, what: str) -> AuditError:
    """Return the error that names a member, or a field of METADATA."""
    return AuditError(f"{member} {what}", where=wheel.name, next_step=REBUILD)


def check_dist_info(wheel: Path, inputs: WheelInputs, *, compiled: bool) -> None:
    """Compare every member of the folder with what the trees say.

    :raises AuditError: naming the first one that nothing explains.
    """
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
        raise fault(wheel, f"{dist_info}/{name}", what)


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
        raise fault(wheel, "METADATA", "is not one that installers read: its header is damaged")
    before, after = metadata.parse(official), metadata.parse(ours)
    expected = {"Name": [DISTRIBUTION], "Version": [inputs.version]}
    for name in sorted({key for key, _ in (*before.fields, *after.fields)}):
        was, now = sorted(before.values(name)), sorted(after.values(name))
        if name == "Requires-Dist":
            now = _without_own(wheel, now, inputs)
        if name in expected:
            if now != expected[name]:
                raise fault(wheel, f"METADATA {name}", f"is {now}, {expected[name]} is expected")
        elif was != now and not _metadata_patches(inputs):
            what = f"differs and no patch explains it: {_odd_one(was, now)}"
            raise fault(wheel, f"METADATA {name}", what)
    if any(item.kind is Kind.BUILD for item in inputs.touched):
        return
    try:
        text = metadata.patched_metadata(
            official, inputs.before, inputs.after, inputs.version, inputs.pin.cuda,
            inputs.own_requirements,
        )  # fmt: skip
    except UnfaithfulModeError:  # only upstream's own code knows, and that was run
        return
    computed = metadata.parse(text)
    for name in sorted({key for key, _ in (*computed.fields, *after.fields)}):
        want, have = sorted(computed.values(name)), sorted(after.values(name))
        if want != have:
            what = f"is not what the patches make: {_odd_one(want, have)}"
            raise fault(wheel, f"METADATA {name}", what)
    if computed.body.strip() != after.body.strip():
        raise fault(wheel, "METADATA", "has another description than the tree")


def _without_own(wheel: Path, lines: list[str], inputs: WheelInputs) -> list[str]:
    """Return what the official wheel and the patches have to explain."""
    for own in inputs.own_requirements:
        if lines.count(own) != 1:
            what = f"has {own} {lines.count(own)} times; once is expected ({alias.SETTING})"
            raise fault(wheel, "METADATA Requires-Dist", what)
    return [line for line in lines if line not in inputs.own_requirements]


def _odd_one(want: list[str], have: list[str]) -> str:
    """Return a value that stands in one list more often than in the other."""
    return next(v for v in (*have, *want) if want.count(v) != have.count(v))


def _metadata_patches(inputs: WheelInputs) -> set[str]:
    kinds = (Kind.METADATA, Kind.BUILD)
    return {patch for item in inputs.touched if item.kind in kinds for patch in item.patches}
