"""Stage checkout: the release as one commit in the shared repository, tagged like upstream.

From the sdist by default: the same bytes give the same commit id on every machine. The commit is
made by ``git fast-import`` straight from the archive, so that no file is written twice and nothing
is filtered: what upstream's own .gitignore hides stays, what its build generated is dropped.
"""

from __future__ import annotations

import configparser
import stat
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from builder import atomic
from builder.console import say
from builder.credentials import redacted
from builder.errors import SourceMismatchError, UnsafeArchiveError
from builder.locations import Cache
from builder.pin import Pin
from builder.repository import Git, GitError, open_repository

AUTHOR = "upstream vLLM release <upstream@vllm-glm5.invalid>"


@dataclass(frozen=True)
class SourceTree:
    """A release as a commit.

    :param commit: its id in ``repository``.
    :param upstream_commit: upstream's own commit id as far as it is known.
    """

    repository: Git
    tag: str
    commit: str
    upstream_commit: str


@contextmanager
def using_repository(cache: Cache) -> Iterator[None]:
    """Let one process at a time write to the shared repository; clear up after a killed one."""
    with atomic.exclusive(cache.root / "git", "the source repository"):
        # A git that is killed leaves its lock files, and then refuses for ever.
        for stale in (
            *cache.repository.glob("*.lock"),
            *(cache.repository / "refs").rglob("*.lock"),
            *(cache.repository / "objects").glob("*/tmp_*"),
        ):
            stale.unlink(missing_ok=True)
        atomic.clear_up(cache.root)
        yield


def from_sdist(pin: Pin, sdist: Path, cache: Cache) -> SourceTree:
    """Import the verified sdist, unless that was done before.

    :raises UnsafeArchiveError: a member would leave the tree; nothing of it is kept.
    """
    repository = open_repository(cache)
    if (known := imported(repository, pin)) is not None:
        return SourceTree(repository, pin.tag, known, pin.commit)
    ref = f"refs/tags/{pin.tag}"
    say(f"checkout {pin.tag}: importing {pin.sdist.name}")
    with atomic.scratch_folder(cache.work) as scratch:
        # In a repository of its own: of an archive that is refused, and of a run that is killed,
        # nothing gets into the shared one.
        fresh = Git(scratch)
        fresh.run("init", "--bare", "--quiet", "--template=", "--initial-branch=main")
        _import(fresh, ref, _message(pin), sdist)
        commit = fresh.text("rev-parse", ref)
        _move_pack(fresh, repository)
    repository.run("update-ref", ref, commit)
    return SourceTree(repository, pin.tag, commit, pin.commit)


def imported(repository: Git, pin: Pin) -> str | None:
    """Return the id of the tag's commit where that is an import of the pinned sdist."""
    known = repository.attempt("log", "-1", "--format=%H%n%B", f"refs/tags/{pin.tag}")
    if known.returncode:
        return None
    commit, _, message = known.stdout.decode(errors="replace").partition("\n")
    return commit if message.strip() == _message(pin).strip() else None


def _message(pin: Pin) -> str:
    return f"vLLM {pin.tag}\n\nsdist {pin.sdist.name}\nsha256 {pin.sdist.sha256}\n"


def _move_pack(source: Git, target: Git) -> None:
    folder = target.folder / "objects" / "pack"
    files = (source.folder / "objects" / "pack").glob("pack-*")
    for file in sorted(files, key=lambda path: path.suffix == ".idx"):  # git looks for .idx
        file.replace(folder / file.name)
    atomic.sync_folder(folder)


def _import(repository: Git, ref: str, message: str, sdist: Path) -> None:
    """Feed the archive to fast-import; the ref moves only if every member was taken."""
    command = repository.command(
        "-c", "core.compression=1",  # a third of the time, a tenth more space
        "-c", "fastimport.unpackLimit=0",  # one pack, however small the release is
        "fast-import", "--quiet", "--force", "--done",
    )  # fmt: skip
    with subprocess.Popen(
        command,
        cwd=repository.folder,
        env=repository.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as importer:
        assert importer.stdin is not None  # noqa: S101 - for the type checker
        assert importer.stderr is not None  # noqa: S101
        write = importer.stdin.write
        entries = []
        newest = 0
        try:
            for mark, (member, data) in enumerate(_members(sdist), start=1):
                newest = max(newest, int(member.mtime))
                mode = b"100755" if member.mode & stat.S_IXUSR else b"100644"
                mode = b"120000" if member.issym() else mode
                entries.append(b"M %s :%d %s\n" % (mode, mark, quoted(_path(member))))
                write(b"blob\nmark :%d\ndata %d\n" % (mark, len(data)))
                write(data)
                write(b"\n")
            body = message.encode()
            write(f"commit {ref}\ncommitter {AUTHOR} {newest} +0000\n".encode())
            write(b"data %d\n%s\ndeleteall\n" % (len(body), body))
            write(b"".join(entries))
            write(b"done\n")
            importer.stdin.close()
        except BrokenPipeError:  # fast-import ended early; its message says why
            with suppress(BrokenPipeError):
                importer.stdin.close()
        except BaseException:
            importer.kill()
            with suppress(BrokenPipeError):  # it must not take the place of the cause
                importer.stdin.close()
            raise
        said = importer.stderr.read().decode(errors="replace")
    if importer.returncode:
        lines = said.strip().splitlines()
        if atomic.says_disk_full(lines, repository.folder):
            raise atomic.disk_full_error(repository.folder)
        raise GitError(
            f"git fast-import failed with status {importer.returncode}",
            where=sdist.name,
            details=tuple(lines[:8]),
            next_step="delete the file from the cache and run the command again",
        )


def _members(sdist: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield what a clone of upstream would hold, with its bytes: not what building generated.

    Every member is checked, those that are left out too.
    """
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                _check(member, sdist)
                path = _path(member)
                if member.isdir() or path in ("", "PKG-INFO", "vllm/_version.py"):
                    continue
                if path.partition("/")[0].endswith(".egg-info"):
                    continue
                if member.issym():
                    yield member, member.linkname.encode("utf-8", "surrogateescape")
                    continue
                file = archive.extractfile(member)
                data = file.read() if file else b""
                if path == "setup.cfg" and _is_generated(data):
                    continue
                yield member, data
    except (tarfile.TarError, EOFError, zlib.error, OSError, KeyError) as error:
        raise UnsafeArchiveError(
            f"not a readable .tar.gz: {error}",
            where=sdist.name,
            next_step="delete the file from the cache and run the command again",
        ) from error


def _is_generated(setup_cfg: bytes) -> bool:
    """Tell setuptools' own setup.cfg, which has nothing but [egg_info], from upstream's."""
    config = configparser.ConfigParser()
    try:
        config.read_string(setup_cfg.decode())
    except (configparser.Error, UnicodeDecodeError):
        return False
    return set(config.sections()) <= {"egg_info"}


def _check(member: tarfile.TarInfo, sdist: Path) -> None:
    path = PurePosixPath(member.name)
    reason = ""
    if path.is_absolute():
        reason = "an absolute path"
    elif ".." in path.parts:
        reason = "a path with '..'"
    elif ".git" in (part.lower() for part in path.parts):
        reason = "a path inside .git"
    elif (member.issym() or member.islnk()) and _leaves_tree(member):
        reason = f"a link that leaves the tree, to {member.linkname}"
    elif not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        reason = "neither a file, a folder nor a link"
    if reason:
        raise UnsafeArchiveError(
            f"member {member.name!r} is {reason}; nothing was unpacked",
            where=sdist.name,
            next_step="do not use this file: compare its sha256 with upstream's release page",
        )


def _leaves_tree(link: tarfile.TarInfo) -> bool:
    """Follow the target of a link part by part: below the archive's own folder all the way."""
    target = PurePosixPath(link.linkname)
    parts = target.parts
    if link.issym():  # relative to the link; a hard link names a member from the top
        parts = (*PurePosixPath(link.name).parent.parts, *parts)
    depth = 0
    for part in parts:
        depth += -1 if part == ".." else 1
        if depth < 1:
            return True
    return target.is_absolute()


def _path(member: tarfile.TarInfo) -> str:
    """Return the path below the archive's top folder."""
    return "/".join(PurePosixPath(member.name).parts[1:])


def quoted(path: str) -> bytes:
    """Quote a path as fast-import wants it (C style) where it must."""
    if path.startswith('"') or "\n" in path or path != path.strip():
        escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'.encode("utf-8", "surrogateescape")
    return path.encode("utf-8", "surrogateescape")


def from_git(pin: Pin, sdist: Path, url: str, cache: Cache) -> SourceTree:
    """Fetch upstream's tag from ``url`` and check it against the pin and the sdist.

    :raises SourceMismatchError: the tag is not the pinned commit, or its tree is not the sdist's.
    """
    imported = from_sdist(pin, sdist, cache)
    repository = imported.repository
    ref = f"refs/upstream/{pin.tag}"
    shown = redacted(url)
    known = repository.resolve(ref)
    if known is None or not known.startswith(pin.commit):
        say(f"fetch {pin.tag} from {shown}")
        if Path(url).exists():
            url = str(Path(url).absolute())  # git runs in another folder
        fetched = repository.attempt(
            "fetch", "--quiet", "--no-tags", "--depth=1", "--", url,
            f"+refs/tags/{pin.tag}:{ref}", network=True,
        )  # fmt: skip
        if fetched.returncode:
            said = redacted(fetched.stderr.decode(errors="replace")).strip().splitlines()
            if atomic.says_disk_full(said, cache.repository):
                raise atomic.disk_full_error(cache.repository)
            raise SourceMismatchError(
                f"tag {pin.tag} cannot be fetched",
                where=shown,
                details=tuple(said[-5:]),
                next_step="check the URL and the network; the sdist (the default source) needs neither",
            )
        known = repository.text("rev-parse", f"{ref}^{{commit}}")
    if not known.startswith(pin.commit):
        repository.run("update-ref", "-d", ref)
        raise SourceMismatchError(
            f"tag {pin.tag} is commit {known}, the pin says {pin.commit}",
            where=shown,
            next_step="a moved tag or a foreign repository: do not build from it before you know why",
        )
    differences = _tree_differences(repository, imported.commit, known)
    if differences:
        raise SourceMismatchError(
            f"the tag's tree differs from the sdist's in {len(differences)} paths",
            where=shown,
            details=tuple(differences[:20]),
            next_step="find out which of the two is upstream's release before you build from either",
        )
    return SourceTree(repository, pin.tag, known, known)


def _tree_differences(repository: Git, sdist: str, tag: str) -> list[str]:
    """List paths that differ, symbolic links apart: an sdist holds their targets' bytes."""
    raw = repository.run("diff-tree", "-r", "-z", "--no-renames", sdist, tag).decode()
    fields = raw.split("\0")
    found = []
    for header, path in zip(fields[::2], fields[1::2], strict=False):
        _, new_mode, _, _, status = header.removeprefix(":").split(" ")
        if new_mode != "120000":
            found.append(f"{status} {path}")
    return found
