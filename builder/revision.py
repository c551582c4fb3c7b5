"""N of ``+glm5.N``, kept with the digest of what ships: ``patches/TAG/revision``.

The digest covers everything that decides a wheel's bytes: upstream's files, each patch's name and
bytes, the series' settings and the wheel format. When it changes, N has to be raised, since an
index never holds two wheels of one version.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

from builder import atomic
from builder.errors import RevisionError
from builder.pin import Pin
from builder.series import Series

# Raised whenever this tool would write other bytes from the same inputs.
WHEEL_FORMAT = 1


@dataclass(frozen=True)
class Revision:
    number: int
    digest: str


def digest_of(pin: Pin, series: Series) -> str:
    """Return the sha256 (hex) over all that decides the wheel's bytes."""
    parts = [f"wheel-format {WHEEL_FORMAT}", f"alias {series.requires_alias}", pin.sdist.sha256]
    parts += [f"{arch} {file.sha256}" for arch, file in sorted(pin.wheels.items())]
    parts += [
        f"{entry.path.name} {hashlib.sha256(entry.path.read_bytes()).hexdigest()}"
        for entry in series.entries
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_revision(series: Series) -> Revision | None:
    """Return what the series' folder holds; None where no revision was ever written."""
    path = _path(series)
    if not path.exists():
        return None
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        number, digest = data["revision"], data["digest"]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
        raise RevisionError(
            f"not a revision file: {error}",
            where=str(path),
            next_step="restore it from version control: which numbers are taken stands only there",
        ) from error
    if type(number) is not int or number < 1:
        raise RevisionError(
            f"revision is {number!r}, a whole number from 1 on is expected",
            where=str(path),
            next_step="correct the number",
        )
    return Revision(number, str(digest))


def checked_revision(pin: Pin, series: Series) -> int:
    """Return N.

    :raises RevisionError: what ships has changed since N was set.
    """
    revision = read_revision(series)
    if revision is None or revision.digest != digest_of(pin, series):
        what = "never set" if revision is None else f"still {revision.number}"
        raise RevisionError(
            f"what ships in the series {series.tag} has changed and its revision is {what}",
            where=str(_path(series)),
            next_step=f"python -m builder revision --tag {series.tag} --raise",
        )
    return revision.number


def raise_revision(pin: Pin, series: Series) -> Revision:
    """Write the next N with the present digest; nothing changes where the digest is the same."""
    old, digest = read_revision(series), digest_of(pin, series)
    if old is not None and old.digest == digest:
        return old
    new = Revision((old.number if old else 0) + 1, digest)
    atomic.write_text(_path(series), f'revision = {new.number}\ndigest = "{new.digest}"\n')
    return new


def _path(series: Series) -> Path:
    return series.folder / "revision"
