"""Files and folders that appear whole or not at all: temporary name, fsync, rename.

A run that was killed leaves only names that start with ``.tmp-``; the next one removes those that
nobody holds any more.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from builder.errors import DiskFullError

PREFIX = ".tmp-"


@contextmanager
def disk_full_is_an_error(where: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into an error that says how much is free and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        existing = next(p for p in (where, *where.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        raise DiskFullError(
            f"no space left on the device ({free / 1e6:.0f} MB free); nothing was changed",
            where=str(where),
            next_step="free some space, or set VLLM_GLM5_CACHE to a larger disk, and run again",
        ) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Give a file to write; on success it takes the place of ``path``, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_full_is_an_error(path):
        descriptor, name = tempfile.mkstemp(prefix=f"{PREFIX}{path.name}-", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(mode)
            temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Give a folder that is removed at the end, or by the next caller after a SIGKILL."""
    from filelock import FileLock, Timeout  # noqa: PLC0415 - keeps --help quick

    with disk_full_is_an_error(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for lock_file in parent.glob(f"{PREFIX}*.lock"):
            try:
                with FileLock(lock_file, timeout=0):
                    shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
                    lock_file.unlink(missing_ok=True)
            except Timeout:
                continue  # its owner lives
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            Path(lock.lock_file).unlink(missing_ok=True)


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Let one process at a time make ``path``; say so when another one is at it.

    The operating system drops the lock when its holder dies, SIGKILL included. Leftovers of dead
    writers of ``path`` are removed.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415 - keeps --help quick

    from builder.console import say  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        lock.acquire(timeout=2)
    except Timeout:
        say(f"waiting: another process is at work on {what} ({lock.lock_file})")
        lock.acquire()
    try:
        for leftover in path.parent.glob(f"{PREFIX}{path.name}-*"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        lock.release()
