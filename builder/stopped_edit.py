"""An `edit` that stopped: the series conflicts, and its maintainer is to go on with git.

The patches that apply are commits. At the first that does not, ``git am`` waits with that one
patch, as if it had failed in the maintainer's hands; the patches behind it wait as files in
``.git/vllm-glm5``. The next `edit` goes on with them, by the strict rules of a build: ``git am`` of
all at once would put a hunk into the wrong function without a word.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from builder import atomic
from builder.apply import AM, apply_one
from builder.checkout import SourceTree
from builder.edit import fill, is_taken, new_clone, require_clean
from builder.errors import (
    BuilderError,
    DirtyWorktreeError,
    MisplacedHunkError,
    PatchConflictError,
    SeriesError,
)
from builder.locations import Cache
from builder.patchfile import Patch, read_patch
from builder.repository import Git, GitError
from builder.series import Series
from builder.words import counted


@dataclass(frozen=True)
class Progress:
    """How far an edit that stopped has come; each tuple holds file names of patches, in order.

    :param sha256: of every patch of the series as it was when the edit began.
    :param subjects: of every patch: by it a commit that git made of a patch is known.
    :param dropped: patches that the maintainer said are to go.
    """

    tag: str
    sha256: dict[str, str]
    subjects: dict[str, str]
    applied: tuple[str, ...]
    dropped: tuple[str, ...]
    waiting: tuple[str, ...]


def is_stopped(worktree: Path) -> bool:
    if not (worktree / ".git").exists() or Git(worktree).attempt("rev-parse").returncode:
        return False
    return (_folder(Git(worktree)) / "progress.json").exists()


def begin(source: SourceTree, series: Series, patches: tuple[Patch, ...], worktree: Path) -> None:
    """Make the clone at ``worktree`` with the whole series waiting.

    :raises DirtyWorktreeError: the folder is in use.
    :raises SeriesError: two patches have one subject, so that their commits are not told apart.
    """
    if is_taken(worktree):
        require_clean(worktree)
        raise DirtyWorktreeError(
            "the series conflicts, and the folder holds a work tree of another state of it",
            where=str(worktree),
            next_step=f"if it holds the corrected series: {_builder('export', series, worktree)}; "
            "else remove the folder, or choose another with --worktree",
        )
    subjects = {patch.name: patch.subject for patch in patches}
    if len(set(subjects.values())) != len(subjects):
        raise SeriesError(
            "the series conflicts, and two of its patches have the same subject",
            where=str(series.folder),
            next_step="reword one of them in its file: the subject tells patches apart",
        )
    with new_clone(worktree) as clone:
        fill(clone, source.repository, source.tag, source.commit, source.commit)
        folder = _folder(Git(clone))
        folder.mkdir()
        for patch in patches:
            (folder / patch.name).write_bytes(patch.file.read_bytes())
        sha256 = {patch.name: patch.sha256 for patch in patches}
        _write(folder, Progress(series.tag, sha256, subjects, (), (), tuple(subjects)))


def go_on(
    worktree: Path, series: Series, known: Git, cache: Cache, *, drop: tuple[str, ...] = ()
) -> int:
    """Apply the patches that wait; return how many commits there are then.

    :param known: the repository that may hold the files that the patches were made from.
    :param drop: names of waiting patches that are to go.
    :raises PatchConflictError, MisplacedHunkError: the next one that does not apply; git am waits
        with it in the work tree.
    :raises DirtyWorktreeError: work there is unfinished, or the series has changed since.
    """
    require_clean(worktree)
    git = Git(worktree)
    with _locked(git) as folder:
        progress = _present(git, series, worktree)
        for name in drop:
            if name not in progress.waiting:
                raise SeriesError(
                    f"{name} does not wait in this edit",
                    where=str(worktree),
                    details=tuple(f"waiting: {other}" for other in progress.waiting),
                    next_step="name one that waits; a patch that is a commit goes by git rebase -i",
                )
        progress = replace(
            progress,
            dropped=(*progress.dropped, *drop),
            waiting=tuple(name for name in progress.waiting if name not in drop),
        )
        _write(folder, progress)
        while progress.waiting:
            name, *rest = progress.waiting
            patch = read_patch(folder / name, cache.work)
            try:
                apply_one(git, patch, known)
            except (PatchConflictError, MisplacedHunkError) as error:
                _stop(git, folder, patch)
                raise _explained(error, progress, series, worktree) from error
            progress = replace(progress, applied=(*progress.applied, name), waiting=tuple(rest))
            _write(folder, progress)
    return len(git.text("rev-list", f"{series.tag}..HEAD").split())


def require_finished(worktree: Path, series: Series) -> None:
    """Refuse to export while patches wait that are neither commits nor dropped by word.

    :raises DirtyWorktreeError: naming them.
    """
    if not is_stopped(worktree):
        return
    waiting = _present(Git(worktree), series, worktree).waiting
    if waiting:
        raise DirtyWorktreeError(
            f"an edit stopped here, and {counted(len(waiting), 'patch is', 'patches are')} in no commit yet",
            where=str(worktree),
            details=waiting,
            next_step=f"{_builder('edit', series, worktree)} goes on with them; with "
            f"--drop {waiting[0]} it leaves that one out for good (dropped, or a commit under "
            "another subject)",
        )


def forget(worktree: Path) -> None:
    """Take away the record of an edit that is finished and exported."""
    if is_stopped(worktree):
        shutil.rmtree(_folder(Git(worktree)))


def _folder(git: Git) -> Path:
    """Return the record's folder, the same one in linked work trees."""
    return Path(git.text("rev-parse", "--path-format=absolute", "--git-common-dir"), "vllm-glm5")


def _write(folder: Path, progress: Progress) -> None:
    atomic.write_text(folder / "progress.json", json.dumps(asdict(progress), indent=1))


@contextmanager
def _locked(git: Git) -> Iterator[Path]:
    folder = _folder(git)
    with atomic.exclusive(folder / "progress.json", "this work tree"):
        yield folder


def _present(git: Git, series: Series, worktree: Path) -> Progress:
    """Read the record, and take for applied what is a commit by now (``git am --continue``).

    :raises DirtyWorktreeError: the series is another one than when the edit began.
    """
    data = json.loads((_folder(git) / "progress.json").read_text())
    lists = {name: tuple(data[name]) for name in ("applied", "dropped", "waiting")}
    progress = Progress(**data | lists)
    now = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in series.paths}
    if (progress.tag, progress.sha256) != (series.tag, now):
        changed = {name for name, _ in progress.sha256.items() ^ now.items()}
        raise DirtyWorktreeError(
            "the series has changed since this edit began; an export would undo that",
            where=str(worktree),
            details=tuple(sorted(changed)),
            next_step=f"edit the series as it is now in another folder: python -m builder edit "
            f"--tag {series.tag} --worktree OTHER, and cherry-pick your commits there",
        )
    subjects = set(git.text("log", "--format=%s", f"{series.tag}..HEAD").splitlines())
    seen = {name for name in progress.waiting if progress.subjects[name] in subjects}
    return replace(
        progress,
        applied=(*progress.applied, *(name for name in progress.waiting if name in seen)),
        waiting=tuple(name for name in progress.waiting if name not in seen),
    )


def _stop(git: Git, folder: Path, patch: Patch) -> None:
    """Leave ``git am`` waiting with the patch and no file touched, whatever git thinks of it.

    A hook that fails makes it wait: git would take a misplaced hunk. The hook is a link to
    `false`, as a script of ours could not run where the disk is mounted noexec.
    """
    hooks = folder / "hooks"
    hooks.mkdir(exist_ok=True)
    hook = hooks / "applypatch-msg"
    if not hook.is_symlink():
        hook.symlink_to(shutil.which("false") or "/bin/false")
    before = git.text("rev-parse", "HEAD")
    result = git.attempt("-c", f"core.hooksPath={hooks}", *AM, "--", str(folder / patch.name))
    if result.returncode == 0 or git.text("rev-parse", "HEAD") != before:
        git.run("reset", "--quiet", "--hard", before)
        raise GitError(
            "git am did not wait with the patch",
            where=patch.name,
            next_step=f"commit the patch's change by hand: {folder / patch.name}",
        )


def _explained(
    error: BuilderError, progress: Progress, series: Series, worktree: Path
) -> BuilderError:
    """Return the error with where everything stands, and the commands that go on."""
    name, *rest = progress.waiting
    total = len(progress.sha256)
    commands = [
        (f"cd {shlex.quote(str(worktree))}", ""),
        ("git am --show-current-patch=diff", "what the patch wants"),
        ("git apply --reject .git/rebase-apply/patch", "takes what fits; the rest is in *.rej"),
        ("git diff", "look where it went, correct it, remove the *.rej"),
        ("git add FILE...", ""),
        ("git am --continue", ""),
        ("git reset --hard && git clean -fd && git am --skip", "instead: leave the patch out"),
        ("cd -", ""),
        (_builder("edit", series, worktree), "goes on with the patches behind it"),
        (f"{_builder('edit', series, worktree)} --drop {name}", "after --skip: drop it for good"),
        (_builder("export", series, worktree), "when all are commits"),
    ]
    if isinstance(error, MisplacedHunkError):
        # it would put the hunk just where it does not belong
        commands = [c for c in commands if not c[0].startswith("git apply")]
    steps = [f"{command:44}  # {why}" if why else command for command, why in commands]
    stands = (
        f"{worktree}: {len(progress.applied)} of {total} patches are commits, git am waits with "
        f"{name}, {len(rest)} more wait behind it"
    )
    words = "correct the patch there, or remove the folder to give up (the series is untouched):"
    return type(error)(
        error.what,
        where=error.where,
        details=(*error.details, stands),
        next_step="\n    ".join([words, *steps]),
    )


def _builder(command: str, series: Series, worktree: Path) -> str:
    words = ["python", "-m", "builder", command, "--tag", series.tag, "--worktree", str(worktree)]
    return shlex.join(words)
