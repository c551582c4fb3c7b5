"""Files and folders that appear whole or not at all: temporary name, fsync, rename.

A run that was killed leaves only names that start with ``PREFIX``; each is locked while its owner
lives, so the next run knows which ones nobody holds any more, and removes them. The prefix is this
tool's own: some of the folders are a user's, where others leave temporary files too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from builder.errors import DiskFullError

PREFIX = ".vllm-glm5-tmp-"
FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
# git's words for a write that failed, and what else may be the cause of one
_WRITE_FAILED = ("couldn't write '", "unable to write", "write error", "failed to write",
                 "could not write")  # fmt: skip
_OTHER_CAUSES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG)
_NEARLY_FULL = 64 << 20  # bytes; what did not fit is not there any more when one looks


def disk_full_error(where: Path) -> DiskFullError:
    """Return the error that says how much is free and what to do."""
    existing = next(p for p in (where, *where.parents) if p.exists())
    disk = os.statvfs(existing)
    free = f"{disk.f_bavail * disk.f_frsize / 1e6:.0f} MB free"
    if _is_without_inodes(disk):
        free += ", but no inode for another file: df -i"
    return DiskFullError(
        f"no space left on the device ({free}); nothing was changed",
        where=str(where),
        next_step="free some space, or write to a larger disk (VLLM_GLM5_CACHE, --out), and run again",
    )


def _is_without_inodes(disk: os.statvfs_result) -> bool:
    return disk.f_files > 0 and disk.f_favail == 0


@contextmanager
def disk_full_is_an_error(where: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into an error that says how much is free and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise disk_full_error(where) from error


def says_disk_full(lines: Iterable[str], where: Path) -> bool:
    """Tell from a program's output that it found no space in ``where``.

    git does not always repeat the system's words: a write that failed without a cause counts where
    the disk is as good as full.
    """
    lines = tuple(lines)

    def hold(words: Iterable[str]) -> bool:
        return any(word in line for line in lines for word in words)

    if hold(tuple(map(os.strerror, FULL))):
        return True
    if not hold(_WRITE_FAILED) or hold(tuple(map(os.strerror, _OTHER_CAUSES))):
        return False
    return is_nearly_full(where)


def is_nearly_full(where: Path, room: int = _NEARLY_FULL) -> bool:
    """Tell whether the disk has less than ``room`` bytes: for programs that do not say so."""
    existing = next(p for p in (where, *where.parents) if p.exists())
    disk = os.statvfs(existing)
    return _is_without_inodes(disk) or disk.f_bavail * disk.f_frsize < room


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(folder: Path, stem: str, suffix: str = "") -> tuple[IO[bytes], Path]:
    """Make a temporary file that is locked as long as it is open."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f"{PREFIX}{stem}", suffix=suffix, dir=folder)
        file = os.fdopen(descriptor, "w+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return file, Path(name)
        file.close()  # another process took it for a dead one's before it was locked


def _remove_dead(files: Iterable[Path]) -> None:
    """Remove temporary files, each with its folder if it has one, whose owners died."""
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where the owner lives
            if path.suffix == ".lock":
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink()


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Give a file to write; on success it takes the place of ``path``, else it is removed."""
    with disk_full_is_an_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(path.parent.glob(f"{PREFIX}{path.name}-*"))
        file, temporary = _temporary(path.parent, f"{path.name}-")
        with file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                temporary.chmod(mode)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        sync_folder(path.parent)


def create(path: Path, data: bytes) -> None:
    """Write a file where there is none; the first of several that do this at once wins."""
    with disk_full_is_an_error(path):
        _remove_dead(path.parent.glob(f"{PREFIX}{path.name}-*"))
        file, temporary = _temporary(path.parent, f"{path.name}-")
        with file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                temporary.chmod(0o644)
                with suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove what has this name, whatever it is; a link goes, and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def copy(source: Path, target: Path) -> None:
    with replacing(target) as file, source.open("rb") as original:
        shutil.copyfileobj(original, file, 1 << 20)


def clear_up(parent: Path) -> None:
    """Remove the scratch folders in ``parent`` whose owners died."""
    _remove_dead(parent.glob(f"{PREFIX}*.lock"))


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Give a folder that is removed at the end, or by the next caller after a SIGKILL."""
    with disk_full_is_an_error(parent):
        parent.mkdir(parents=True, exist_ok=True)
        clear_up(parent)
        lock, lock_path = _temporary(parent, "", ".lock")
        # The lock comes first, so that nobody ever sees the folder without it.
        folder = lock_path.with_suffix("")
        with lock:
            try:
                folder.mkdir(mode=0o700)
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                lock_path.unlink(missing_ok=True)


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Let one process at a time make ``path``; say so when another one is at it.

    The operating system drops the lock when its holder dies, SIGKILL included.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415 - keeps --help quick

    from builder.console import say  # noqa: PLC0415

    with disk_full_is_an_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(path.name + ".lock"))
        try:
            lock.acquire(timeout=2)
        except Timeout:
            say(f"waiting: another process is at work on {what} ({lock.lock_file})")
            lock.acquire()
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            # Nobody writes there who is not allowed to: what is there can be used all the same.
    try:
        yield
    finally:
        lock.release()
