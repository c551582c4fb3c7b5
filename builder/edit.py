"""`edit`: a work tree of its own with the series as commits, to amend, reorder and extend.

It is an ordinary clone that needs nothing of the cache: deleting the cache loses no work.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builder import atomic
from builder.apply import AppliedSeries
from builder.checkout import imported
from builder.errors import DirtyWorktreeError, SourceMismatchError
from builder.locations import Cache
from builder.pin import Pin
from builder.repository import ATTRIBUTES, IDENTITY, Git
from builder.words import counted


def branch_of(tag: str) -> str:
    return f"glm5/{tag}"


def default_worktree(tag: str) -> Path:
    return Path(f"vllm-{tag}")


def edit(applied: AppliedSeries, worktree: Path) -> Path:
    """Make the clone at ``worktree``: branch ``glm5/TAG`` with one commit per patch on the tag.

    A clone that is there and holds just the series is left as it is.

    :raises DirtyWorktreeError: the folder holds changes or commits that are not in the series.
    """
    if is_taken(worktree):
        require_clean(worktree)
        if Git(worktree).resolve("HEAD") == applied.head:
            return worktree
        raise DirtyWorktreeError(
            "the folder holds other commits than the series",
            where=str(worktree),
            next_step=f"python -m builder export --tag {applied.tag} --worktree "
            f"{shlex.quote(str(worktree))}, or remove the folder if they are not wanted",
        )
    with new_clone(worktree) as clone:
        fill(clone, applied.repository, applied.tag, applied.base, applied.head)
    return worktree


def is_taken(worktree: Path) -> bool:
    return worktree.exists() and (not worktree.is_dir() or any(worktree.iterdir()))


@contextmanager
def new_clone(worktree: Path) -> Iterator[Path]:
    """Give a folder to fill; at the end it is ``worktree``, which appears whole."""
    worktree.parent.mkdir(parents=True, exist_ok=True)
    with atomic.scratch_folder(worktree.absolute().parent) as scratch:
        clone = scratch / "clone"
        clone.mkdir()
        yield clone
        if worktree.exists():
            worktree.rmdir()
        shutil.move(clone, worktree)


def fill(clone: Path, repository: Git, tag: str, base: str, head: str) -> None:
    """Make the empty folder a repository with the tag on ``base`` and the branch on ``head``."""
    git = Git(clone)
    git.run("init", "--quiet", "--template=", f"--initial-branch={branch_of(tag)}")
    (clone / ".git" / "info").mkdir(exist_ok=True)
    (clone / ".git" / "info" / "attributes").write_text(ATTRIBUTES)
    # A fetch copies the objects: the clone outlives the cache.
    git.run(
        "fetch", "--quiet", "--no-tags", str(repository.folder), f"{base}:refs/tags/{tag}", head
    )
    git.run("config", "user.name", IDENTITY[0])
    git.run("config", "user.email", IDENTITY[1])
    git.run("config", "core.autocrlf", "false")
    git.run("reset", "--quiet", "--hard", head)


def exportable(worktree: Path, pin: Pin, cache: Cache) -> tuple[Git, str, str]:
    """Return the work tree's repository, the release's commit in it, and the head to export.

    Neither network nor cache is needed; where the cache holds the release, the commits are compared.

    :raises DirtyWorktreeError: there is no work tree, or it holds unfinished work.
    :raises SourceMismatchError: it is a work tree of another release, or of another import of it.
    """
    again = f"python -m builder edit --tag {pin.tag} --worktree"
    if not (worktree / ".git").exists():
        raise DirtyWorktreeError(
            "no work tree to export from",
            where=str(worktree),
            next_step=shlex.join([*again.split(), str(worktree)]),
        )
    require_clean(worktree)
    git = Git(worktree.absolute())
    if git.resolve(f"refs/tags/{pin.tag}") is None:
        tags = git.text("tag").split()
        raise SourceMismatchError(
            f"the work tree has no tag {pin.tag} (it has: {', '.join(tags[:6]) or 'none'})",
            where=str(worktree),
            next_step=f"export it to the release that it was made for, or: {again} OTHER",
        )
    base = imported(git, pin)
    ours = imported(Git(cache.repository), pin) if cache.repository.exists() else None
    if base is None or ours not in (None, base):
        raise SourceMismatchError(
            f"tag {pin.tag} of the work tree is not the release as it is pinned and imported now",
            where=str(worktree),
            details=(
                f"work tree: {git.text('log', '-1', '--format=%h %s', f'refs/tags/{pin.tag}')}",
                f"pinned:    {pin.sdist.name}, sha256 {pin.sdist.sha256}",
                *([f"imported:  {ours}"] if ours else []),
            ),
            next_step=f"{again} OTHER, and cherry-pick your commits there",
        )
    return git, base, git.text("rev-parse", "HEAD")


# What git leaves in its folder while one of its commands waits for the user.
_UNDER_WAY = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD",
              "BISECT_LOG")  # fmt: skip


def require_clean(worktree: Path) -> None:
    """Refuse a work tree with changes, or with a rebase, merge or am under way.

    :raises DirtyWorktreeError: with the files concerned.
    """
    git = Git(worktree)
    # without its own .git, git would answer for a repository further up
    is_worktree = (worktree / ".git").exists()
    if not is_worktree or git.attempt("rev-parse", "--is-inside-work-tree").returncode:
        raise DirtyWorktreeError(
            "it is there and is no work tree of this tool",
            where=str(worktree),
            next_step="choose another folder with --worktree",
        )
    folder = Path(git.text("rev-parse", "--absolute-git-dir"))
    under_way = [name for name in _UNDER_WAY if (folder / name).exists()]
    changed = git.changes()
    if under_way or changed:
        what = (
            f"{under_way[0]} under way"
            if under_way
            else counted(len(changed), "uncommitted change")
        )
        next_step = "commit, amend or stash them there, then run the command again"
        if under_way:
            is_am = (folder / "rebase-apply" / "applying").exists()
            words = "git am --continue, --skip" if is_am else "git rebase --continue"
            next_step = f"finish it there ({words}, or --abort), then run the command again"
        raise DirtyWorktreeError(
            f"{what}; nothing was touched",
            where=str(worktree),
            details=tuple(changed[:20]),
            next_step=next_step,
        )
