"""Blobs read through one git process, and a commit with changes that nobody has committed yet."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from builder import atomic
from builder.locations import Cache
from builder.repository import Git, GitError


class Objects:
    """Blobs of a repository by any name git knows (``v0.20.2:vllm/envs.py``, a blob id).

    A process per blob would take most of the time that trying a series takes.
    """

    def __init__(self, repository: Git, scratch: Path, process: subprocess.Popen[bytes]) -> None:
        self.repository = repository
        self.scratch = Git(scratch)
        self._process = process
        self._known: dict[str, tuple[bytes, bytes] | None] = {}

    def read(self, name: str) -> bytes | None:
        """Return the blob's bytes, or None where there is no such blob."""
        found = self._look_up(name)
        return found[1] if found is not None and found[0] == b"blob" else None

    def is_folder(self, name: str) -> bool:
        """Tell whether a folder has the name."""
        found = self._look_up(name)
        return found is not None and found[0] == b"tree"

    def _look_up(self, name: str) -> tuple[bytes, bytes] | None:
        """Return the type and the bytes of what has the name."""
        if name not in self._known:
            self._known[name] = self._ask(name)
        return self._known[name]

    def read_id(self, blob: str) -> bytes | None:
        """Return a blob by its full id; an abbreviated one might name another blob tomorrow."""
        return self.read(blob) if len(blob) == 40 else None

    def _ask(self, name: str) -> tuple[bytes, bytes] | None:
        if "\n" in name:  # would be two questions
            result = self.repository.attempt("cat-file", "blob", name)
            return None if result.returncode else (b"blob", result.stdout)
        ask, answer = self._process.stdin, self._process.stdout
        assert ask is not None  # noqa: S101 - for the type checker
        assert answer is not None  # noqa: S101
        try:
            ask.write(name.encode("utf-8", "surrogateescape") + b"\n")
            ask.flush()
        except BrokenPipeError as error:
            with suppress(BrokenPipeError):  # the question is still in the buffer
                ask.close()
            raise self._ended(name) from error
        line = answer.readline()
        fields = line.split()
        if line and (len(fields) != 3 or not fields[2].isdigit()):  # "NAME missing", "ambiguous"
            return None
        size = int(fields[2]) if line else 0
        data = answer.read(size + 1)
        if len(data) <= size:  # no answer is not the answer that there is no such file
            raise self._ended(name)
        return fields[1], data[:-1]

    def _ended(self, name: str) -> GitError:
        return GitError(
            f"git cat-file ended before it gave {name}",
            where=str(self.repository.folder),
            next_step="run the command again; if it stays, an object is damaged: `python -m builder "
            "clean` deletes the cache, which is made anew",
        )


@contextmanager
def open_objects(repository: Git, cache: Cache) -> Iterator[Objects]:
    """Give the reader, with a scratch folder for files that git commands want on the disk."""
    with (
        atomic.scratch_folder(cache.work) as scratch,
        subprocess.Popen(
            repository.command("cat-file", "--batch"),
            cwd=repository.folder,
            env=repository.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process,
    ):
        yield Objects(repository, scratch, process)


@dataclass(frozen=True)
class Tree:
    """A commit's files, some of them changed: ``changed`` holds bytes, or None for a deleted file."""

    objects: Objects
    commit: str
    changed: Mapping[str, bytes | None] = field(default_factory=dict)

    def read(self, path: str) -> bytes | None:
        if path in self.changed:
            return self.changed[path]
        return self.objects.read(f"{self.commit}:{path}")

    def is_folder(self, path: str) -> bool:
        """Tell whether a folder has the name."""
        below = f"{path}/"
        added = any(p.startswith(below) and data is not None for p, data in self.changed.items())
        return added or self.objects.is_folder(f"{self.commit}:{path}")

    def with_changes(self, changes: Mapping[str, bytes | None]) -> Tree:
        return replace(self, changed={**self.changed, **changes})
