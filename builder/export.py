"""`export`: the commits of a work tree written back as the series, byte for byte repeatable.

Edit and export are inverses: what was not changed keeps its bytes and its file name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from builder import atomic, series_journal
from builder.apply import AM
from builder.errors import ExportMismatchError, PatchFormatError, SeriesError
from builder.locations import Cache, Project
from builder.patchfile import read_patch
from builder.repository import ATTRIBUTES, Git
from builder.series import Entry, Series

FORMAT_PATCH = (
    "format-patch",
    "--stdout",
    "--keep-subject",  # the counterpart of `am --keep`
    "--zero-commit",  # the commit's id would change with its parents
    "--full-index",  # blob ids that the 3-way of a rebase, and our placement, can look up
    "--no-signature",  # git's version at the end of every file
    "--no-stat",  # a diffstat is noise in review of a patch to a patch
    "--no-renames",  # rename detection differs between versions of git
    "--no-binary",  # refused anyway, and this names the file
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--unified=3",
    "--diff-algorithm=myers",
    "--no-encode-email-headers",  # an author's name stays readable
    "--no-attach",
    "--no-thread",
    "--no-cover-letter",
)

# Whole lines of a message that end it, and first lines of its body that are taken for headers
# (git's mailinfo.c and mailsplit.c).
_ENDS_MESSAGE = re.compile(r"---\s*$|--- \S|diff -|Index: |From \S.*\d:\d\d(:\d\d)? .*\d{4}\s*$")
_IN_BODY_HEADER = re.compile(r"(From|Date|Subject):|>?From\s|\[PATCH\]\s")


@dataclass(frozen=True)
class ExportedPatch:
    """A commit as a patch file: its line in the series, and the file's bytes."""

    line: str
    data: bytes


@dataclass(frozen=True)
class Export:
    """What the series folder would hold after an export, and what that changes."""

    series: Series
    patches: tuple[ExportedPatch, ...]
    written: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def is_noop(self) -> bool:
        return not self.written and not self.removed and self.is_in_order

    @property
    def is_in_order(self) -> bool:
        return [patch.line for patch in self.patches] == [e.line for e in self.series.entries]


def plan_export(
    git: Git, base: str, head: str, series: Series, project: Project, cache: Cache
) -> Export:
    """Work out the patch files of ``base..head``; nothing is written.

    :raises PatchFormatError: a commit that no patch file can carry unchanged.
    :raises SeriesError: merge commits, or two commits of one subject.
    """
    with _isolated(git, cache) as (own, scratch):
        if own.attempt("merge-base", "--is-ancestor", base, head).returncode:
            raise SeriesError(
                f"the branch does not begin at {series.tag}",
                where=str(git.folder),
                next_step=f"rebase it onto the tag {series.tag}",
            )
        if own.text("rev-list", "--merges", f"{base}..{head}"):
            raise SeriesError(
                "the branch holds a merge commit",
                where=str(git.folder),
                next_step="rebase it away: a series is a straight line of commits",
            )
        commits = own.text("rev-list", "--reverse", f"{base}..{head}").split()
        for commit in commits:
            _require_readable(own, commit)
        subjects = [own.text("log", "-1", "--format=%s", commit) for commit in commits]
        for commit, subject in zip(commits, subjects, strict=True):
            _require_plain_message(own, commit, subject)
        data = list(_round_trips(own, base, commits, subjects, scratch))
    lines = _lines(series, project, subjects, data)
    patches = tuple(ExportedPatch(line, raw) for line, raw in zip(lines, data, strict=True))
    current = {entry.line: entry.path for entry in series.entries}
    written = tuple(
        patch.line
        for patch in patches
        if patch.line not in current or current[patch.line].read_bytes() != patch.data
    )
    removed = tuple(line for line in current if line not in set(lines))
    return Export(series, patches, written, removed)


def write_export(export: Export) -> None:
    """Write the changed patch files and the series file, and remove what it no longer names.

    A common patch that this series drops stays: other releases may name it.
    """
    folder = export.series.folder
    files = {patch.line: patch.data for patch in export.patches if patch.line in export.written}
    if not export.is_in_order:
        files["series"] = _series_file(export)
    series_journal.change(
        folder, files, tuple(line for line in export.removed if not line.startswith("../"))
    )


def check_export(export: Export, worktree: Path | None = None) -> None:
    """Refuse files that are not what an export writes (the gate that CI runs).

    :param worktree: whose commits were exported; None for those of the files themselves.
    :raises ExportMismatchError: naming them.
    """
    if not export.is_noop:
        command = shlex.join(["python", "-m", "builder", "export", "--tag", export.series.tag])
        why, next_step = (
            "somebody edited them by hand",
            f"python -m builder edit --tag {export.series.tag}, then {command}",
        )
        if worktree is not None:
            why = f"{worktree} has other commits"
            next_step = f"{command} --worktree {shlex.quote(str(worktree))}"
        raise ExportMismatchError(
            f"the patch files are not what an export writes: {why}",
            where=str(export.series.folder),
            details=(*export.written, *(f"{line} (would go)" for line in export.removed)),
            next_step=next_step,
        )


def _series_file(export: Export) -> bytes:
    """Return the new series file. The comments above the first patch are the file's own and stay;
    those between patches go with the order.
    """
    head = []
    for line in (export.series.folder / "series").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            break
        head.append(line)
    return ("\n".join([*head, *(patch.line for patch in export.patches)]) + "\n").encode()


@contextmanager
def _isolated(git: Git, cache: Cache) -> Iterator[tuple[Git, Path]]:
    """Give a repository with the objects of ``git`` and nothing of its configuration or attributes.

    A user may set anything in the clone that ``edit`` made; what export writes must not depend on
    it. The clone itself is only read.
    """
    with atomic.scratch_folder(cache.work) as scratch:
        folder = scratch / "export.git"
        folder.mkdir()
        own = Git(folder)
        own.run("init", "--bare", "--quiet", "--template=", "--initial-branch=main")
        for name in ("info", "objects/info"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "info" / "attributes").write_text(ATTRIBUTES)
        objects = git.text("rev-parse", "--path-format=absolute", "--git-path", "objects")
        (folder / "objects" / "info" / "alternates").write_text(f"{objects}\n", encoding="utf-8")
        yield own, scratch


def _lines(series: Series, project: Project, subjects: list[str], data: list[bytes]) -> list[str]:
    """Give each commit its line in the series file: the old one where it is the same patch.

    The same patch is one with the same subject; else with the same diff (reworded); else one that
    touches a same file (reworded and amended). A shared patch keeps its name when it is reworded:
    other releases name it.
    """
    if len(set(subjects)) != len(subjects):
        twice = sorted({subject for subject in subjects if subjects.count(subject) > 1})
        raise SeriesError(
            "two commits have the same subject",
            where=twice[0],
            next_step="reword one of them: the subject tells patches apart",
        )
    old = {entry: _identity(entry.path.read_bytes()) for entry in series.entries}
    chosen: list[Entry | None] = [None] * len(data)
    for same in (
        lambda mine, theirs: mine.subject == theirs.subject,
        lambda mine, theirs: mine.diff == theirs.diff,
        lambda mine, theirs: not mine.paths.isdisjoint(theirs.paths),
    ):
        for n, raw in enumerate(data):
            if chosen[n] is None:
                mine = _identity(raw)
                free = [entry for entry in old if entry not in chosen]
                chosen[n] = next((entry for entry in free if same(mine, old[entry])), None)
    number = max(_numbers(project), default=0)
    lines = []
    for entry, subject in zip(chosen, subjects, strict=True):
        if entry is not None and entry.is_common:
            lines.append(entry.line)
            continue
        if entry is None:
            number += 1
        lines.append(f"{entry.number if entry else number:04d}-{slug(subject)}.patch")
    return lines


@dataclass(frozen=True)
class _Identity:
    """What tells a patch file from another."""

    subject: bytes
    diff: bytes
    paths: frozenset[bytes]


def _identity(raw: bytes) -> _Identity:
    head, _, diff = raw.partition(b"\ndiff --git ")
    subject = re.search(rb"^Subject: (.*(?:\n[ \t].*)*)", head, re.MULTILINE)
    paths = re.findall(rb"^(?:diff --git )?\"?a/.+? \"?b/(.+)$", diff, re.MULTILINE)
    return _Identity(subject[1] if subject else b"", diff, frozenset(paths))


def _numbers(project: Project) -> Iterator[int]:
    for path in project.patches.glob("*/*.patch"):
        if path.name[:4].isdigit():
            yield int(path.name[:4])


def slug(subject: str) -> str:
    """Return the subject as git's format-patch puts it into a file name, 52 characters at most."""
    text = re.sub(r"[^A-Za-z0-9._]+", "-", re.sub(r"\.{2,}", ".", subject)).strip("-.")
    return text[:52].strip("-.") or "patch"


def _require_readable(git: Git, commit: str) -> None:
    """Refuse a commit whose author or message git cannot give in UTF-8."""
    raw = git.run("log", "-1", "--format=%an <%ae>%n%B", commit)
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        says = git.run("cat-file", "commit", commit).partition(b"\n\n")[0]
        named = re.search(rb"^encoding (.+)$", says, re.MULTILINE)
        encoding = named[1].decode("ascii", "replace") if named else "UTF-8"
        raise PatchFormatError(
            f"the author or the message of the commit is not in the encoding that it names "
            f"({encoding})",
            where=f"commit {commit[:12]}",
            details=(raw.decode("utf-8", "replace").splitlines()[1],),
            next_step="git config --unset i18n.commitEncoding, then write it anew in UTF-8: "
            "git rebase -i, reword (git commit --amend --reset-author where it is the author)",
        ) from error


def _require_plain_message(git: Git, commit: str, subject: str) -> None:
    lines = git.run("log", "-1", "--format=%B", commit).decode().strip("\n").split("\n")
    body = next((line for line in lines[1:] if line.strip()), "")
    bad = [line for line in lines if _ENDS_MESSAGE.match(line)]
    bad += [body] if _IN_BODY_HEADER.match(body) else []
    if bad:
        raise PatchFormatError(
            f"a message line begins with {bad[0][:12]!r}: a mail reader would cut the message "
            "there or take it for a header",
            where=subject,
            next_step="reword that line of the commit message",
        )
    if len(lines) > 1 and lines[1].strip():
        raise PatchFormatError(
            "the subject runs over two lines: they would be joined",
            where=subject,
            next_step="put a blank line behind the first line of the commit message",
        )
    if git.attempt("diff", "--quiet", f"{commit}^", commit).returncode == 0:
        raise PatchFormatError(
            "the commit changes nothing",
            where=subject,
            next_step="drop the commit: git rebase -i",
        )


def _round_trips(
    git: Git, base: str, commits: list[str], subjects: list[str], scratch: Path
) -> Iterator[bytes]:
    """Yield each commit as a patch file that was applied, compared, and exported again.

    Tree, author and message have to come through; only blank lines and trailing spaces that git
    strips from every message may differ, and what is exported is the stripped one.
    """
    tree = Git(scratch / "tree")
    git.run("worktree", "add", "--detach", "--quiet", str(tree.folder), base)
    file = scratch / "exported.patch"
    for commit, subject in zip(commits, subjects, strict=True):
        data = git.run(*FORMAT_PATCH, "-1", commit)
        parent = tree.text("rev-parse", "HEAD")
        for _ in range(3):
            file.write_bytes(data)
            _require_acceptable(file, subject, scratch)
            result = tree.attempt(*AM, "--", str(file))
            if result.returncode or _facts(tree, "HEAD") != _facts(git, commit):
                raise _lost_on_the_way(subject, result.stderr)
            again = tree.run(*FORMAT_PATCH, "-1", "HEAD")
            if again == data:
                break
            data = again
            tree.run("reset", "--quiet", "--hard", parent)
        else:
            raise _lost_on_the_way(subject, b"each export gives other bytes")
        yield data


def _require_acceptable(file: Path, subject: str, scratch: Path) -> None:
    """Refuse here what `apply` would refuse of the exported file: a binary, a mode, a link."""
    try:
        read_patch(file, scratch / "mail")
    except PatchFormatError as error:
        raise PatchFormatError(
            f"no patch file can hold the commit: {error.what}",
            where=subject,
            next_step=error.next_step,
        ) from error


def _facts(git: Git, commit: str) -> tuple[bytes, bytes]:
    """Return tree and author; and the message as git's own commands strip it."""
    raw = git.run("log", "-1", "--format=%T%n%an%n%ae%n%at%x00%B", commit)
    facts, _, message = raw.partition(b"\0")
    return facts, git.run("stripspace", stdin=message)


def _lost_on_the_way(subject: str, said: bytes) -> PatchFormatError:
    return PatchFormatError(
        "the commit does not survive the way through a patch file",
        where=subject,
        details=tuple(said.decode(errors="replace").strip().splitlines()[:6]),
        next_step="look at its message, author, modes and binary files; nothing was written",
    )
