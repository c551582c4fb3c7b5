"""In what two wheels of the same content still differ: the zip file around it.

An installer reads the directory at the end of the file; another program reads the local headers,
what lies before and between them, or the extra fields. A wheel that is vouched for has nothing
there that its build did not write.
"""

from __future__ import annotations

import stat
from itertools import zip_longest
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from builder.wheel_archive import CHUNK

_SHOWN = 80  # characters of a line
_FIELDS = (
    ("compress_type", "is compressed by method {}, {} is expected"),
    ("date_time", "is dated {}, {} is expected"),
    ("create_system", "is of system {}, {} is expected"),
    ("flag_bits", "has the flags {}, {} are expected"),
    ("internal_attr", "has the internal attributes {}, {} are expected"),
    ("extra", "has the extra field {}, {} is expected"),
    ("comment", "has the comment {}, {} is expected"),
)


def first_difference(wheel: Path, rebuilt: Path) -> str:
    """Say where a wheel first differs from what the build writes: member, header or bytes."""
    with ZipFile(wheel) as ours, ZipFile(rebuilt) as theirs:
        names, expected = ours.namelist(), theirs.namelist()
        for name in sorted(set(names) ^ set(expected)):
            return f"{name} is missing" if name in expected else f"{name} is in no build"
        for name, other in zip(names, expected, strict=True):
            if name != other:
                return f"{name} stands in the archive where the build writes {other}"
        pairs = list(zip(ours.infolist(), theirs.infolist(), strict=True))
        for have, want in pairs:
            if (have.CRC, have.file_size) != (want.CRC, want.file_size):
                return _content_difference(ours, theirs, have)
        for have, want in pairs:
            if what := _header_difference(have, want):
                return f"{have.filename} {what}"
        if ours.comment != theirs.comment:
            return f"the archive has the comment {_shown(ours.comment)}"
        starts = [info.header_offset for info in ours.infolist()]
        if starts and starts[0]:
            return f"{starts[0]} bytes stand before the first member"
    at = _first_byte(wheel, rebuilt)
    before = [name for name, start in zip(names, starts, strict=True) if start <= at]
    where = f"in or behind {before[-1]}" if before else "at the start"
    return f"byte {at} of the file is another one, {where}"


def _content_difference(ours: ZipFile, theirs: ZipFile, info: ZipInfo) -> str:
    name = info.filename
    if max(info.file_size, theirs.getinfo(name).file_size) > CHUNK:
        return f"{name} is not what the build makes of it"
    lines = zip_longest(
        ours.read(name).splitlines(keepends=True), theirs.read(name).splitlines(keepends=True)
    )
    number, (have, want) = next(
        (number, pair) for number, pair in enumerate(lines, start=1) if pair[0] != pair[1]
    )
    is_, expected = _shown(have or b""), _shown(want or b"")
    return f"{name} line {number} is {is_}, the build writes {expected}"


def _header_difference(have: ZipInfo, want: ZipInfo) -> str:
    modes = [info.external_attr >> 16 for info in (have, want)]
    if modes[0] != modes[1]:
        return f"has mode {stat.filemode(modes[0])}, {stat.filemode(modes[1])} is expected"
    if have.external_attr != want.external_attr:
        return "has other attributes"
    for field, words in _FIELDS:
        one, two = getattr(have, field), getattr(want, field)
        if one != two:
            return words.format(_shown(one), _shown(two))
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _first_byte(one: Path, two: Path) -> int:
    """Return the place of the first byte that differs, or where the shorter file ends."""
    at = 0
    with one.open("rb") as left, two.open("rb") as right:
        while True:
            a, b = left.read(CHUNK), right.read(CHUNK)
            if a != b or not a:
                pairs = enumerate(zip(a, b, strict=False))
                return at + next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
            at += len(a)
