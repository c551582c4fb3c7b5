"""Stage fetch: the pinned files in the cache, verified by size and sha256."""

from __future__ import annotations

from pathlib import Path

from builder import atomic, package_index
from builder.console import bytes_progress, say
from builder.credentials import redacted
from builder.digests import sha256_of
from builder.errors import HashMismatchError, PackageIndexError
from builder.locations import UPSTREAM_DISTRIBUTION, Cache
from builder.package_index import IndexSettings, ReleaseFile
from builder.pin import Pin, PinnedFile

CHUNK = 1 << 20
RESUMES = 6  # broken connections tolerated for one file in one run


def cached_path(cache: Cache, file: PinnedFile) -> Path:
    """Return where the file lies once it is verified: its hash is its folder."""
    return cache.downloads / file.sha256 / file.name


def fetch(pin: Pin, file: PinnedFile, cache: Cache) -> Path:
    """Return the file's path in the cache; download what is missing of it.

    A file that is there is hashed again, so that a damaged cache is noticed and repaired. Without
    network this works as long as the cache holds the file.

    :raises HashMismatchError: the index serves other bytes than the pinned ones; they are not kept.
    :raises PackageIndexError: the index cannot be reached or lacks the file.
    :raises DiskFullError: the download does not fit.
    """
    path = cached_path(cache, file)
    with atomic.disk_full_is_an_error(path), atomic.exclusive(path, file.name):
        if not is_whole(path, file.sha256):
            settings = package_index.pip_settings()
            listed = _listed(pin, file, settings)
            download(listed, path, settings, sha256=file.sha256, size=file.size)
        return path


def is_whole(path: Path, sha256: str) -> bool:
    """Tell whether the cache holds the file; a damaged one is removed."""
    if not path.exists():
        return False
    if sha256_of(path) == sha256:
        return True
    say(f"{path.name}: the cached copy is damaged; it is fetched again")
    path.unlink()
    return False


def _listed(pin: Pin, file: PinnedFile, settings: IndexSettings) -> ReleaseFile:
    for listed in package_index.release_files(UPSTREAM_DISTRIBUTION, pin.version, settings):
        if listed.name == file.name:
            return listed
    raise PackageIndexError(
        f"the index has {UPSTREAM_DISTRIBUTION} {pin.version} without this file",
        where=file.name,
        next_step="use the index that the pin was written from, or pin again with "
        f"`python -m builder pin {pin.tag} --force` once you know why the file is gone",
    )


def download(
    listed: ReleaseFile,
    path: Path,
    settings: IndexSettings,
    *,
    sha256: str | None,
    size: int | None,
) -> str:
    """Download into ``path``, resuming a part that an earlier run left; return the sha256.

    The caller holds the lock of ``path``.
    """
    import requests  # noqa: PLC0415 - slow to import

    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    expected_size = size or listed.size
    if part.exists() and (expected_size is None or part.stat().st_size > expected_size):
        part.unlink()
    failures = 0
    while True:
        have = part.stat().st_size if part.exists() else 0
        if expected_size is not None and have == expected_size:
            break
        cause = "the server sent less than the file"
        try:
            if _receive(listed, part, settings, have, expected_size):
                break
        except requests.RequestException as error:
            cause = redacted(f"{type(error).__name__}: {error}")[:300]
        failures += 1
        received = part.stat().st_size if part.exists() else 0
        if failures >= RESUMES or (received <= have and failures >= 2):
            raise PackageIndexError(
                f"the connection broke {failures} times; {received} bytes are kept",
                where=redacted(listed.url),
                details=(cause,),
                next_step="run the command again: the download goes on where it stopped",
            )
        say(f"{listed.name}: connection lost at {received / 1e6:.1f} MB, resuming")
    actual = sha256_of(part)
    wanted = sha256 or listed.sha256
    if wanted is not None and actual != wanted:
        actual_size = part.stat().st_size
        part.unlink()
        raise HashMismatchError(
            "the downloaded bytes are not the pinned ones; they were not kept",
            where=listed.name,
            details=(
                f"expected sha256 {wanted} ({expected_size} bytes)",
                f"got      sha256 {actual} ({actual_size} bytes)",
                f"from     {redacted(listed.url)}",
            ),
            next_step="run again; if it stays, the index serves another file: compare with "
            "upstream's release page before you change the pin",
        )
    part.replace(path)
    atomic.sync_folder(path.parent)
    return actual


def _receive(
    listed: ReleaseFile, part: Path, settings: IndexSettings, have: int, size: int | None
) -> bool:
    """Append what the server sends; return whether that is known to be all of it."""
    import os  # noqa: PLC0415

    with (
        package_index.open_file(listed, settings, have) as (offset, chunks),
        part.open("r+b" if 0 < offset <= have else "wb") as file,
        bytes_progress(f"download {listed.name}", size or 0, offset) as advance,
    ):
        file.seek(offset)
        file.truncate()
        for chunk in chunks:
            file.write(chunk)
            advance(len(chunk))
            if size is not None and file.tell() > size:
                break  # not the file, whatever else comes: there may be no end to it
        file.flush()
        os.fsync(file.fileno())
        # A server that closes early without an error leaves a short file: ask for the rest.
        return size is None or file.tell() >= size
