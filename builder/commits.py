"""Commits made without a work tree: the patches of a series, rebuilt on another release.

Author, date and message are those of the commit that the patch was before; the committer is what
``apply`` uses, so that applying the exported patch gives the same id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from builder import atomic
from builder.checkout import quoted
from builder.locations import Cache
from builder.repository import IDENTITY, Git


@dataclass(frozen=True)
class NewCommit:
    """A commit to make: what it changes, and the commit whose author and message it takes over.

    :param changes: bytes by path; None for a file that goes.
    :param modes: the modes of files that are new, such as ``100755``.
    """

    like: str
    changes: Mapping[str, bytes | None]
    modes: Mapping[str, str]


def author_and_message(repository: Git, commit: str) -> tuple[bytes, bytes]:
    """Return the author with the date, as git stores them, and the message."""
    head, _, message = repository.run("cat-file", "commit", commit).partition(b"\n\n")
    author = next(line for line in head.split(b"\n") if line.startswith(b"author "))
    return author.removeprefix(b"author "), message


def make_commits(
    repository: Git, parent: str, commits: Sequence[NewCommit], ref: str, cache: Cache
) -> list[str]:
    """Make the commits on ``parent``, one on the other; return their ids. ``ref`` keeps them."""
    if not commits:
        return []
    paths = sorted({path for commit in commits for path in commit.changes})
    modes = _modes(repository, parent, paths)
    stream: list[bytes] = []
    for mark, commit in enumerate(commits, start=1):
        author, message = author_and_message(repository, commit.like)
        date = b" ".join(author.rsplit(b" ", 2)[1:])
        stream += [
            b"commit %s\nmark :%d\n" % (ref.encode(), mark),
            b"author %s\n" % author,
            f"committer {IDENTITY[0]} <{IDENTITY[1]}> ".encode() + date + b"\n",
            b"data %d\n%s\n" % (len(message), message),
            b"from %s\n" % (parent.encode() if mark == 1 else b":%d" % (mark - 1)),
        ]
        for path, data in commit.changes.items():
            if data is None:
                stream.append(b"D %s\n" % quoted(path))
                continue
            mode = modes.setdefault(path, commit.modes.get(path, "100644"))
            stream.append(b"M %s inline %s\n" % (mode.encode(), quoted(path)))
            stream.append(b"data %d\n%s\n" % (len(data), data))
    stream.append(b"done\n")
    with atomic.scratch_folder(cache.work) as scratch:
        marks = scratch / "marks"
        repository.run(
            "fast-import", "--quiet", "--force", "--done", f"--export-marks={marks}",
            stdin=b"".join(stream),
        )  # fmt: skip
        ids = dict(line.split() for line in marks.read_text().splitlines())
    return [ids[f":{mark}"] for mark in range(1, len(commits) + 1)]


def _modes(repository: Git, commit: str, paths: Sequence[str]) -> dict[str, str]:
    listed = repository.run(
        "ls-tree", "-z", "--full-tree", "-r", commit, "--", *paths
    ).decode("utf-8", "surrogateescape")  # fmt: skip
    entries = (entry.partition("\t") for entry in listed.split("\0") if entry)
    return {path: facts[:6] for facts, _, path in entries}
