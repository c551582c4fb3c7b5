"""`export`: the commits of a work tree written back as the series, byte for byte repeatable.

Edit and export are inverses: what was not changed keeps its bytes and its file name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from builder import atomic
from builder.apply import AM
from builder.errors import ExportMismatchError, PatchFormatError, SeriesError
from builder.locations import Cache, Project
from builder.repository import Git
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
        return not self.written and not self.removed and self._same_order()

    def _same_order(self) -> bool:
        return [patch.line for patch in self.patches] == [e.line for e in self.series.entries]


def plan_export(
    git: Git, base: str, head: str, series: Series, project: Project, cache: Cache
) -> Export:
    """Work out the patch files of ``base..head``; nothing is written.

    :raises PatchFormatError: a commit that no patch file can carry unchanged.
    :raises SeriesError: merge commits, or two commits of one subject.
    """
    commits = git.text("rev-list", "--reverse", f"{base}..{head}").split()
    if git.text("rev-list", "--merges", f"{base}..{head}"):
        raise SeriesError(
            "the branch holds a merge commit",
            where=str(git.folder),
            next_step="rebase it away: a series is a straight line of commits",
        )
    if git.text("merge-base", base, head) != base:
        raise SeriesError(
            f"the branch does not begin at {series.tag}",
            where=str(git.folder),
            next_step=f"rebase it onto the tag {series.tag}",
        )
    subjects = [git.text("log", "-1", "--format=%s", commit) for commit in commits]
    for commit, subject in zip(commits, subjects, strict=True):
        _require_plain_message(git, commit, subject)
    data = [git.run(*FORMAT_PATCH, "-1", commit) for commit in commits]
    lines = _lines(series, project, subjects)
    patches = tuple(ExportedPatch(line, raw) for line, raw in zip(lines, data, strict=True))
    _require_round_trip(git, base, commits, patches, cache)
    current = {entry.line: entry.path for entry in series.entries}
    written = tuple(
        patch.line
        for patch in patches
        if patch.line not in current or current[patch.line].read_bytes() != patch.data
    )
    removed = tuple(line for line in current if line not in set(lines))
    return Export(series, patches, written, removed)


def write_export(export: Export) -> None:
    """Write the changed patch files, then the series file, then remove what it no longer names.

    A common patch that this series drops stays: other releases may name it.
    """
    folder = export.series.folder
    for patch in export.patches:
        if patch.line in export.written:
            atomic.write_bytes((folder / patch.line).resolve(), patch.data)
    _write_series_file(export)
    for line in export.removed:
        if not line.startswith("../"):
            (folder / line).unlink(missing_ok=True)


def check_export(export: Export) -> None:
    """Refuse files that are not what an export writes (the gate that CI runs).

    :raises ExportMismatchError: naming them.
    """
    if not export.is_noop:
        raise ExportMismatchError(
            "the patch files are not what an export writes: somebody edited them by hand",
            where=str(export.series.folder),
            details=(*export.written, *(f"{line} (would go)" for line in export.removed)),
            next_step=f"python -m builder edit --tag {export.series.tag}, then python -m builder "
            f"export --tag {export.series.tag}",
        )


def _write_series_file(export: Export) -> None:
    path = export.series.folder / "series"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    names = [patch.line for patch in export.patches]
    if [entry.line for entry in export.series.entries] != names:
        # Comments above the first patch are the file's own; those between patches go with order.
        head = []
        for line in old.splitlines():
            if line.strip() and not line.startswith("#"):
                break
            head.append(line)
        atomic.write_text(path, "\n".join([*head, *names]) + "\n")


def _lines(series: Series, project: Project, subjects: list[str]) -> list[str]:
    """Give each commit its line in the series file: the old one where it is the same patch."""
    if len(set(subjects)) != len(subjects):
        twice = sorted({subject for subject in subjects if subjects.count(subject) > 1})
        raise SeriesError(
            "two commits have the same subject",
            where=twice[0],
            next_step="reword one of them: the subject tells patches apart",
        )
    by_slug = {entry.path.name[5:]: entry for entry in series.entries}
    chosen: list[Entry | None] = [by_slug.get(f"{slug(subject)}.patch") for subject in subjects]
    kept = {entry.line for entry in chosen if entry}
    lost = [entry for entry in series.entries if entry.line not in kept]
    if len(lost) == chosen.count(None) > 0:  # reworded subjects keep number and folder, in order
        spare = iter(lost)
        chosen = [entry or next(spare) for entry in chosen]
    number = max(_numbers(project), default=0)
    lines = []
    for entry, subject in zip(chosen, subjects, strict=True):
        if entry is None:
            number += 1
            lines.append(f"{number:04d}-{slug(subject)}.patch")
        else:
            folder = entry.line.rpartition("/")[0]
            name = f"{entry.number:04d}-{slug(subject)}.patch"
            lines.append(f"{folder}/{name}" if folder else name)
    return lines


def _numbers(project: Project) -> Iterator[int]:
    for path in project.patches.glob("*/*.patch"):
        if path.name[:4].isdigit():
            yield int(path.name[:4])


def slug(subject: str) -> str:
    """Return the subject as git's format-patch puts it into a file name, 52 characters at most."""
    text = re.sub(r"[^A-Za-z0-9._]+", "-", re.sub(r"\.{2,}", ".", subject)).strip("-.")
    return text[:52].strip("-.")


def _require_plain_message(git: Git, commit: str, subject: str) -> None:
    body = git.text("log", "-1", "--format=%B", commit)
    for line in body.splitlines():
        if re.match(r"---($|\s)|diff -|Index: |>?From |From:|Date:|Subject:", line):
            raise PatchFormatError(
                f"a message line begins with {line[:12]!r}: a mail reader would cut the message "
                "there or take it for a header",
                where=subject,
                next_step="reword that line of the commit message",
            )
    if git.attempt("diff", "--quiet", f"{commit}^", commit).returncode == 0:
        raise PatchFormatError(
            "the commit changes nothing",
            where=subject,
            next_step="drop the commit: git rebase -i",
        )


def _require_round_trip(
    git: Git, base: str, commits: list[str], patches: tuple[ExportedPatch, ...], cache: Cache
) -> None:
    """Apply the exported files and compare tree, author and message of every commit."""
    shape = "--format=%T%n%an%n%ae%n%at%n%B"
    with atomic.scratch_folder(cache.work) as scratch:
        tree = scratch / "tree"
        git.run("worktree", "add", "--detach", "--quiet", str(tree), base)
        try:
            for commit, patch in zip(commits, patches, strict=True):
                file = scratch / "exported.patch"
                file.write_bytes(patch.data)
                result = Git(tree).attempt(*AM, "--", str(file))
                same = result.returncode == 0 and (
                    Git(tree).run("log", "-1", shape, "HEAD") == git.run("log", "-1", shape, commit)
                )
                if not same:
                    said = result.stderr.decode(errors="replace").strip().splitlines()
                    raise PatchFormatError(
                        "the commit does not survive the way through a patch file",
                        where=patch.line,
                        details=tuple(said[:6]),
                        next_step="look at its message, modes and binary files; nothing was written",
                    )
        finally:
            git.attempt("worktree", "remove", "--force", str(tree))
            git.attempt("worktree", "prune")
