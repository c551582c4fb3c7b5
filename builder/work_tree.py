"""git's work trees in scratch space: made, and the repository's records of them dropped again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from builder import atomic
from builder.locations import Cache
from builder.repository import Git

_WHAT = "git's records of work trees"
_BEING_MADE = b"initializing"  # why git itself locks a record; its environment is in English


def add(repository: Git, tree: Path, commit: str, cache: Cache) -> Git:
    """Make a work tree of ``commit`` without files at ``tree``, inside a scratch folder.

    :raises GitError, DiskFullError: git could not.
    """
    # Between making a record and locking it, git would let another run's prune take it away.
    with atomic.exclusive(cache.root / "work-trees", _WHAT):
        repository.run("worktree", "add", "--detach", "--no-checkout", str(tree), commit)
    return Git(tree)


def forget_dead(repository: Git, cache: Cache) -> None:
    """Drop the records of work trees that are gone: of this run, and of killed ones.

    A git that outlives its killed parent writes one after the next run has applied the series.
    """
    records = repository.folder / "worktrees"
    if not records.exists():
        return
    with atomic.exclusive(cache.root / "work-trees", _WHAT):
        for locked in records.glob("*/locked"):
            if _is_dead(locked.parent):
                # git locks a record while it makes it, and a killed git's stays locked: prune
                # would leave it for ever. In a cache that is another user's it stays.
                with suppress(OSError):
                    locked.unlink()
        repository.attempt("worktree", "prune", "--expire=now")


def _is_dead(record: Path) -> bool:
    """Tell whether git came to no tree, or the scratch folder that held it is gone.

    A scratch folder lives longer than the work on any tree in it. A record that a person locked
    stays: that is what locking is for, where the tree is on a disk that is not there now.
    """
    try:
        tree = (record / "gitdir").read_bytes().strip(b"\n")
        if tree and (record / "locked").read_bytes().strip() != _BEING_MADE:
            return False
        return not tree or not (record / os.fsdecode(tree)).parent.parent.exists()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # another user's, or no path at all: nothing is known of it
        return False
