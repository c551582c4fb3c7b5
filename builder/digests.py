"""sha256 of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

_known: dict[tuple[Path | int | None, ...], str] = {}


def sha256_of(path: Path) -> str:
    """Return the file's sha256 (hex); a file that did not change is read once in a run.

    A wheel in the cache, in dist and in the index is one file with several links.
    """
    stat = path.stat()
    # Of a file with one link the name counts too: its inode can soon be another file's.
    name = path if stat.st_nlink == 1 else None
    identity = (
        name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns,
    )  # fmt: skip
    if identity not in _known:
        with path.open("rb") as file:
            _known[identity] = hashlib.file_digest(file, "sha256").hexdigest()
    return _known[identity]
