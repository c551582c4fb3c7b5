"""The work tree in which a person resolves a patch: ``.rebase/TAG/tree``.

An ordinary clone with both releases (tags), the old series (branch ``series/FROM``) and the new one
so far (branch ``glm5/ONTO``). It needs nothing of the cache.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from builder import atomic
from builder.commits import author_and_message
from builder.edit import branch_of
from builder.errors import PatchFormatError, RebaseStateError
from builder.export import FORMAT_PATCH
from builder.patchfile import read_patch
from builder.rebase_state import Stop, number_of
from builder.repository import ATTRIBUTES, IDENTITY, Git
from builder.syntax import compile_fault
from builder.try_series import FileTrial, PatchTrial, State
from builder.words import counted

# One alone is enough: in a text nothing else tells that the rest of them went by mistake.
_MARKER = re.compile(rb"^(?:<{7}|\|{7}|>{7})(?: .*)?$", re.MULTILINE)
_TRAILER = re.compile(rb"^(Upstream-Status|Drop-When|Signed-off-by): ", re.MULTILINE)


def make_tree(folder: Path, repository: Git, refs: dict[str, str], onto: str) -> Git:
    """Make the clone where it is missing, and bring the commits of ``refs`` into it."""
    if not (folder / ".git").exists():
        with atomic.scratch_folder(folder.parent) as scratch:
            clone = scratch / "clone"
            clone.mkdir()
            git = Git(clone)
            git.run("init", "--quiet", "--template=", f"--initial-branch={branch_of(onto)}")
            (clone / ".git" / "info").mkdir(exist_ok=True)
            (clone / ".git" / "info" / "attributes").write_text(ATTRIBUTES)
            git.run("config", "user.name", IDENTITY[0])
            git.run("config", "user.email", IDENTITY[1])
            git.run("config", "core.autocrlf", "false")
            clone.rename(folder)
    git = Git(folder)
    # What a killed git left would make the next one refuse.
    for stale in (*(folder / ".git").glob("*.lock"), *(folder / ".git/refs").rglob("*.lock")):
        stale.unlink(missing_ok=True)
    wanted = [f"+{commit}:{name}" for name, commit in refs.items()]
    git.run("fetch", "--quiet", "--no-tags", str(repository.folder), *wanted)
    return git


def lay(git: Git, trial: PatchTrial, head: str, onto: str) -> None:
    """Put the patch into the work tree on ``head``: what applies is staged, the rest is unmerged.

    A file without an honest merge stays as upstream has it; git knows the three sides of each. Of a
    patch that upstream has nothing is staged: to keep it takes a person's word. What upstream's own
    .gitignore hides stays: nobody was asked about it.
    """
    git.run("checkout", "--quiet", "--force", "-B", branch_of(onto), head)
    git.run("reset", "--quiet", "--hard", head)
    git.run("clean", "--quiet", "-ffd")
    stages: list[bytes] = []
    staged: list[str] = []
    executables = {c.path for c in trial.patch.changes if not c.old_path and c.mode == "100755"}
    for path, data in trial.changes.items():
        file = git.folder / path
        if data is None:
            if not file.exists():
                continue
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            if path in executables:
                file.chmod(0o755)
        staged.append(path)
    if trial.state is not State.UPSTREAMED:
        if staged:
            git.run("add", "--force", "--all", "--", *(f":(literal){path}" for path in staged))
        for file_trial, change in zip(trial.files, trial.patch.changes, strict=True):
            if not file_trial.state.applies and file_trial.state is not State.UPSTREAMED:
                sides = (change.old_blob, _blob(git, head, file_trial.path), change.new_blob)
                stages += _unmerged(git, file_trial, sides, change.mode)
    if stages:
        git.run("update-index", "-z", "--index-info", stdin=b"".join(stages))
    message = author_and_message(git, _old_commit(git, trial))[1]
    (git.folder / ".git" / "MERGE_MSG").write_bytes(message)


def _unmerged(git: Git, file: FileTrial, sides: tuple[str, str, str], mode: str) -> list[bytes]:
    if file.marked is not None:
        target = git.folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.marked)
    path = file.path.encode("utf-8", "surrogateescape")
    lines = [b"0 %s 0\t%s\0" % (b"0" * 40, path)]
    for stage, blob in enumerate(sides, start=1):
        if (
            len(blob) == 40
            and blob.strip("0")
            and not git.attempt("cat-file", "-e", blob).returncode
        ):
            lines.append(b"%s %s %d\t%s\0" % (mode.encode(), blob.encode(), stage, path))
    return lines


def _blob(git: Git, commit: str, path: str) -> str:
    found = git.attempt("rev-parse", "--verify", "--quiet", f"{commit}:{path}")
    return found.stdout.decode().strip()


def _old_commit(git: Git, trial: PatchTrial) -> str:
    return git.text("rev-parse", f"refs/patches/{number_of(trial.line):04d}")


def is_resolved(git: Git, stop: Stop) -> bool:
    """Whether a change is staged or committed there, and nothing is left to add or to resolve."""
    lines = git.changes()
    if _loose(lines):
        return False
    return bool(lines) or git.text("rev-parse", "HEAD") != stop.head


def _loose(lines: list[str]) -> list[str]:
    """Return those of git's changes that are not staged as they are."""
    return [line for line in lines if line[1] != " "]


def take(git: Git, stop: Stop, onto: str) -> str:
    """Make the commit of what the person did; return its id. Author and date are the old patch's.

    Taken are a commit on top of where the rebase stopped, or what is staged there.

    :raises RebaseStateError: there is something that would be lost, or nothing, or it is not done.
    """
    where = str(git.folder)
    again = f"then: python -m builder rebase --continue  (or drop it: --continue --drop {number_of(stop.line):04d})"
    lock = git.folder / ".git" / "index.lock"
    if lock.exists():
        raise RebaseStateError(
            "a git is at work in the work tree, or was killed there", where=where, details=(str(lock),),
            next_step="end it, such as the editor that git commit opened; where there is none, "
            f"rm {shlex.quote(str(lock))}; {again}",
        )  # fmt: skip
    unmerged = git.text("diff", "--name-only", "--diff-filter=U").splitlines()
    if unmerged:
        raise RebaseStateError(
            f"{counted(len(unmerged), 'file is', 'files are')} not resolved", where=where, details=tuple(unmerged),
            next_step=f"edit them there, git add them, {again}",
        )  # fmt: skip
    if loose := _loose(git.changes()):
        raise RebaseStateError(
            f"{counted(len(loose), 'change is', 'changes are')} neither staged nor committed", where=where,
            details=tuple(loose[:20]), next_step=f"git add or remove them there, {again}",
        )  # fmt: skip
    head = git.text("rev-parse", "HEAD")
    number = f"{number_of(stop.line):04d}"
    author, message = author_and_message(git, f"refs/patches/{number}")
    tree = staged_tree(git)
    if head != stop.head:
        _require_place(git, stop, head, onto, again)
        parents = git.text("log", "-1", "--format=%P", "HEAD").split()
        if parents != [stop.head] or tree != git.text("rev-parse", "HEAD^{tree}"):
            raise RebaseStateError(
                "the work tree holds other commits than one on top of where the rebase stopped",
                where=where,
                details=(f"stopped on {stop.head}", f"HEAD is    {head}"),
                next_step=f"make it one commit: git reset --soft {stop.head[:12]} && "
                f"git commit -C refs/patches/{number}; {again}",
            )
        own = author_and_message(git, "HEAD")[1]
        message = _require_trailers(git, git.run("stripspace", stdin=own), message, number, again)
    _check(git, stop, tree, again)
    committer = f"{IDENTITY[0]} <{IDENTITY[1]}> ".encode() + b" ".join(author.rsplit(b" ", 2)[1:])
    raw = b"tree %s\nparent %s\nauthor %s\ncommitter %s\n\n%s" % (
        tree.encode(), stop.head.encode(), author, committer, message,
    )  # fmt: skip
    commit = git.run("hash-object", "-t", "commit", "-w", "--stdin", stdin=raw).decode().strip()
    _require_exportable(git, commit, message, again)
    # a lock there is of a --continue that was killed: nobody else writes these, and two wait
    (git.folder / ".git/refs/resolved" / f"{number}.lock").unlink(missing_ok=True)
    git.run("update-ref", f"refs/resolved/{number}", commit)
    return commit


def staged_tree(git: Git) -> str:
    """Write the tree of what is staged; return its id.

    From a copy of the index: git locks the one that it reads, and the lock of a git that is killed
    stays, in a work tree that is the person's.
    """
    with atomic.scratch_folder(git.folder.parent) as scratch:
        index = scratch / "index"
        shutil.copyfile(git.folder / ".git" / "index", index)
        return git.run("write-tree", environment={"GIT_INDEX_FILE": str(index)}).decode().strip()


def _require_place(git: Git, stop: Stop, head: str, onto: str, again: str) -> None:
    """Refuse a HEAD on another line of commits: a tree of it would take back all of the release."""
    branch = git.attempt("symbolic-ref", "--quiet", "--short", "HEAD").stdout.decode().strip()
    grown = git.attempt("merge-base", "--is-ancestor", stop.head, head).returncode == 0
    if branch == branch_of(onto) or grown:
        return
    raise RebaseStateError(
        f"HEAD is on {branch or 'no branch'}, which does not hold the commit where the rebase stopped",
        where=str(git.folder),
        details=(f"stopped on {stop.head}", f"HEAD is    {head}"),
        next_step=f"go back in it, git checkout {branch_of(onto)}, {again}",
    )


def _require_trailers(git: Git, own: bytes, old: bytes, number: str, again: str) -> bytes:
    """Return the message of a commit that a person made, which may reword the patch's.

    :raises RebaseStateError: `git commit -m` has thrown the patch's away, removal plan and all.
    """
    lost = [key.decode() for key in _TRAILER.findall(old) if key not in _TRAILER.findall(own)]
    if lost:
        raise RebaseStateError(
            "the commit's message has lost what the patch's ended in",
            where=str(git.folder),
            details=tuple(f"no {key}:" for key in lost),
            next_step=f"give it the patch's message, git commit --amend -C refs/patches/{number}, "
            f"or one with these lines; {again}",
        )
    return own


def _require_exportable(git: Git, commit: str, message: bytes, again: str) -> None:
    """Refuse now what no patch file can carry: at the end nobody could amend it any more."""
    with atomic.scratch_folder(git.folder.parent) as scratch:
        file = scratch / "resolved.patch"
        file.write_bytes(git.run(*FORMAT_PATCH, "-1", commit))
        try:
            patch = read_patch(file, scratch)
        except PatchFormatError as error:
            raise RebaseStateError(
                f"no patch file can hold the change: {error.what}",
                where=str(git.folder),
                next_step=f"{error.next_step}; {again}",
            ) from error
    carried = f"{patch.subject}\n\n{patch.body}".encode()
    if carried.split() != message.split():
        raise RebaseStateError(
            "a mail reader would cut the message, or take a line of it for a header",
            where=str(git.folder),
            details=tuple(message.decode("utf-8", "replace").splitlines()[:12]),
            next_step=f"reword it there without a line such as '---' or 'From: ', {again}",
        )


def _check(git: Git, stop: Stop, tree: str, again: str) -> None:
    """Refuse what is not finished: markers, an empty change, Python that does not compile."""
    changed = git.run(
        "diff-tree", "-r", "-z", "--no-renames", "--diff-filter=AM", "--name-only", stop.head, tree
    ).decode("utf-8", "surrogateescape").split("\0")[:-1]  # fmt: skip
    if tree == git.text("rev-parse", f"{stop.head}^{{tree}}"):
        raise RebaseStateError(
            f"nothing would be left of {stop.line}: no change is staged or committed",
            where=str(git.folder),
            next_step=f"make the change there and git add it, {again}",
        )
    faults = []
    for path in changed:
        data = git.run("cat-file", "blob", f"{tree}:{path}")
        before = git.blob(f"{stop.head}:{path}") or b""
        if set(_MARKER.findall(data)) - set(_MARKER.findall(before)):
            faults.append(f"{path}: a conflict marker is left")
        elif (
            path.endswith(".py")
            and (fault := compile_fault(data, path))
            and not compile_fault(before, path)  # upstream's may be of a newer Python
        ):
            faults.append(f"{path}: it does not compile: {fault}")
    if faults:
        raise RebaseStateError(
            "the resolution is not finished", where=str(git.folder), details=tuple(faults),
            next_step=f"correct the files there, git add them, {again}",
        )  # fmt: skip


def remove(folder: Path) -> None:
    """Remove the folder of a rebase: first its name, so that nothing half-removed is found."""
    gone = folder.with_name(f"{atomic.PREFIX}{folder.name}-removed")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.exists():
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
