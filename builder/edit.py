"""`edit`: a work tree of its own with the series as commits, to amend, reorder and extend.

It is an ordinary clone that needs nothing of the cache: deleting the cache loses no work.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from builder import atomic
from builder.apply import AppliedSeries
from builder.errors import DirtyWorktreeError
from builder.repository import ATTRIBUTES, IDENTITY, Git


def branch_of(tag: str) -> str:
    return f"glm5/{tag}"


def default_worktree(tag: str) -> Path:
    return Path(f"vllm-{tag}")


def edit(applied: AppliedSeries, worktree: Path) -> Path:
    """Make the clone at ``worktree``: branch ``glm5/TAG`` with one commit per patch on the tag.

    A clone that is there and holds just the series is left as it is.

    :raises DirtyWorktreeError: the folder holds changes or commits that are not in the series.
    """
    if worktree.exists() and (not worktree.is_dir() or any(worktree.iterdir())):
        require_clean(worktree)
        if Git(worktree).resolve("HEAD") == applied.head:
            return worktree
        raise DirtyWorktreeError(
            "the folder holds other commits than the series",
            where=str(worktree),
            next_step=f"python -m builder export --tag {applied.tag} --worktree {worktree}, or "
            "remove the folder if they are not wanted",
        )
    worktree.parent.mkdir(parents=True, exist_ok=True)
    with atomic.scratch_folder(worktree.absolute().parent) as scratch:
        clone = scratch / "clone"
        clone.mkdir()
        git = Git(clone)
        git.run("init", "--quiet", "--template=", f"--initial-branch={branch_of(applied.tag)}")
        (clone / ".git" / "info").mkdir(exist_ok=True)
        (clone / ".git" / "info" / "attributes").write_text(ATTRIBUTES)
        # A fetch copies the objects: the clone outlives the cache.
        git.run(
            "fetch", "--quiet", "--no-tags", str(applied.repository.folder),
            f"{applied.base}:refs/tags/{applied.tag}", applied.head,
        )  # fmt: skip
        git.run("config", "user.name", IDENTITY[0])
        git.run("config", "user.email", IDENTITY[1])
        git.run("config", "core.autocrlf", "false")
        git.run("reset", "--quiet", "--hard", applied.head)
        if worktree.exists():
            worktree.rmdir()
        shutil.move(clone, worktree)
    return worktree


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
    changed = git.run("status", "--porcelain", "--untracked-files=all").decode().splitlines()
    if under_way or changed:
        what = f"{under_way[0]} under way" if under_way else f"{len(changed)} uncommitted changes"
        next_step = (
            "finish it there (git rebase --continue, or --abort), then run the command again"
            if under_way
            else "commit, amend or stash them there, then run the command again"
        )
        raise DirtyWorktreeError(
            f"{what}; nothing was touched",
            where=str(worktree),
            details=tuple(changed[:20]),
            next_step=next_step,
        )
