"""sha256 of files."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Return the file's sha256 (hex); a file that did not change is read once in a run."""
    stat = path.stat()
    return _sha256(path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@functools.cache
def _sha256(path: Path, *_identity: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
