"""Each patch of a series tried on another release, in order, without a work tree and without git am.

``clean``: every hunk stands at its line, and upstream left the functions around them alone.
``moved``: strict application takes it, but a hunk stands at another line or in a function that
upstream changed. ``merged``: 3-way placed hunks, and each was verified (merging). ``upstreamed``:
upstream has all of it (upstreamed). ``misplaced``: git would place a hunk where the patch does not
mean it. ``conflict``: everything else that wants a person, a half-upstreamed patch among it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from builder import atomic, merging, placement
from builder.branches import Compared
from builder.clashes import clash
from builder.diff import FileChange
from builder.errors import MisplacedHunkError, PatchConflictError
from builder.locations import Cache
from builder.objects import Objects, Tree
from builder.patchfile import Patch
from builder.releases import newer_than
from builder.syntax import compile_fault
from builder.upstreamed import Extent, Verdict, judge


class State(StrEnum):
    """How a patch, or its change of one file, fares on a release; the worst comes last."""

    CLEAN = "clean"
    MOVED = "moved"
    MERGED = "merged"
    UPSTREAMED = "upstreamed"
    MISPLACED = "misplaced"
    CONFLICT = "conflict"

    @property
    def applies(self) -> bool:
        return self in (State.CLEAN, State.MOVED, State.MERGED)


_ORDER = list(State)


@dataclass(frozen=True)
class HunkTrial:
    """One change of a file in its place on the new release.

    :param line: where it stands there, from 1; ``offset`` is the way from the patch's own line.
    :param around: what upstream did to the function around it; "" for nothing.
    """

    line: int
    offset: int
    scope: str
    around: str


@dataclass(frozen=True)
class FileTrial:
    """A patch's change of one file, tried.

    :param path: the file on the new release; ``old_path`` is its name in the patch.
    :param result: its bytes afterwards; None where it goes, or where the change does not apply.
    :param conflicts: the conflicting regions with both sides and the base, as git merge-file
        writes them.
    :param marked: the whole file with those regions in it; None where there is no honest merge.
    """

    path: str
    old_path: str
    state: State
    reason: str = ""
    hunks: tuple[HunkTrial, ...] = ()
    result: bytes | None = None
    conflicts: tuple[str, ...] = ()
    marked: bytes | None = None


@dataclass(frozen=True)
class PatchTrial:
    """A patch, tried: its state is the worst of its files', or what upstream's having it says.

    :param after: earlier patches that did not apply and touch the same files: their fault, perhaps.
    """

    line: str
    patch: Patch
    state: State
    reason: str
    verdict: Verdict
    files: tuple[FileTrial, ...]
    after: tuple[str, ...] = ()

    @property
    def is_surely_upstream(self) -> bool:
        """Tell whether nobody has to look: its probe says so, or upstream has it in the same place.

        A line of the patch that upstream has elsewhere in the function may be another matter.
        """
        by_probe = not self.verdict.there
        still_applies = all(file.state.applies for file in self.files)
        return self.state is State.UPSTREAMED and (by_probe or not still_applies)

    @property
    def staged(self) -> tuple[FileTrial, ...]:
        """Return the files that are staged at a stop: of a patch that upstream has, none."""
        if self.state is State.UPSTREAMED:
            return ()
        return tuple(file for file in self.files if file.state.applies)

    @property
    def changes(self) -> dict[str, bytes | None]:
        """Return what the files that apply become."""
        made: dict[str, bytes | None] = {}
        for file in self.files:
            if file.state.applies:
                if file.path != file.old_path and self._goes(file.old_path):
                    made[file.old_path] = None
                made[file.path] = file.result
        return made

    def _goes(self, old_path: str) -> bool:
        """Tell whether the patch itself renames the file away (upstream's renames are done)."""
        return any(c.old_path == old_path != c.new_path for c in self.patch.changes)


@dataclass
class Release:
    """The two releases between which patches move: commits in the repository of ``objects``."""

    objects: Objects
    cache: Cache
    old: str
    new: str
    labels: tuple[str, str]
    _renames: dict[str, str] | None = field(default=None, repr=False)

    def read_new(self, path: str) -> bytes | None:
        """Return a file of the new release as upstream made it."""
        return self.objects.read(f"{self.new}:{path}")

    def read_old(self, path: str) -> bytes | None:
        """Return a file of the old release as upstream made it."""
        return self.objects.read(f"{self.old}:{path}")

    def why_it_lacks_a_file(self) -> str:
        """Return the reason in a user's words: a backport goes to an older release."""
        old, new = self.labels
        return "upstream deleted the file" if newer_than(old, [new]) else f"{new} has no such file"

    def renamed(self, path: str) -> str | None:
        """Return the path that upstream gave a file of the old release; None where it is gone.

        All files are compared with all: a new one may look like this one and more like another. That
        takes a second or more, so what was found out is kept.
        """
        if self._renames is None:
            file = self.cache.root / "renames" / f"{self.old[:20]}-{self.new[:20]}.json"
            try:
                self._renames = dict(json.loads(file.read_bytes()))
            except (OSError, ValueError, TypeError):
                self._renames = self._find_renames()
                atomic.write_text(file, json.dumps(self._renames, indent=0))
        return self._renames.get(path)

    def _find_renames(self) -> dict[str, str]:
        raw = self.objects.repository.run(
            "diff-tree", "-r", "-z", "--find-renames=60%", "-l4000", "--diff-filter=R",
            "--name-status", self.old, self.new, "--", "vllm", "tests", "docs", "requirements",
        )  # fmt: skip
        fields = raw.decode("utf-8", "surrogateescape").split("\0")
        return dict(zip(fields[1::3], fields[2::3], strict=False))


def try_series(
    release: Release, entries: Sequence[tuple[str, Patch]], tree: Tree | None = None
) -> Iterator[PatchTrial]:
    """Try patch after patch, each on the new release with what applied of those before it.

    :param entries: each patch with its line in the series file.
    """
    tree = tree or Tree(release.objects, release.new)
    left_out: dict[str, str] = {}
    for line, patch in entries:
        trial = try_patch(release, line, patch, tree)
        paths = {path for c in patch.changes for path in (c.old_path, c.new_path) if path}
        after = sorted({left_out[path] for path in paths if path in left_out})
        if not trial.state.applies and trial.state is not State.UPSTREAMED:
            trial = replace(trial, after=tuple(after))
            left_out |= {f.old_path: line for f in trial.files if not f.state.applies}
        if trial.state is not State.UPSTREAMED:
            tree = tree.with_changes(trial.changes)
        yield trial


def try_patch(release: Release, line: str, patch: Patch, tree: Tree) -> PatchTrial:
    """Try one patch on ``tree``; nothing is written."""
    files = tuple(_try_change(release, change, tree) for change in patch.changes)
    placed = {file.old_path for file in files if file.state in (State.CLEAN, State.MOVED)}
    verdict = judge(patch, release.old, release.new, tree, placed)
    worst = max((file.state for file in files), key=_ORDER.index, default=State.CLEAN)
    reasons = [f"{f.path}: {f.reason}" for f in files if f.state is worst and f.reason]
    if verdict.extent is Extent.FULL:
        reason = verdict.reason
        if worst.applies:
            reason += f"; yet it applies ({worst}): look whether upstream's does the same"
        return PatchTrial(line, patch, State.UPSTREAMED, reason, verdict, files)
    if verdict.extent is Extent.PARTIAL:
        halves = {unit.rpartition(", ")[0] for unit in verdict.there}
        files = tuple(_halved(file) if file.path in halves else file for file in files)
        return PatchTrial(line, patch, State.CONFLICT, verdict.reason, verdict, files)
    return PatchTrial(line, patch, worst, "; ".join(reasons), verdict, files)


def _halved(file: FileTrial) -> FileTrial:
    """Leave to a person a file that takes the change, of which upstream has a part elsewhere in it."""
    if not file.state.applies:
        return file
    reason = f"it applies ({file.state}), and upstream has a part of it: that would be there twice"
    return replace(file, state=State.CONFLICT, reason=reason, result=None, marked=file.result)


def _try_change(release: Release, change: FileChange, tree: Tree) -> FileTrial:
    path = change.path
    current = tree.read(change.old_path or path)
    if change.old_path is None:
        return _try_added(release, change, current, tree)
    target = change.old_path
    moved_to = None
    if current is None and (moved_to := release.renamed(change.old_path)):
        current, target = tree.read(moved_to), moved_to
    if current is None:
        if change.new_path is None:
            return FileTrial(path, path, State.UPSTREAMED, "upstream deleted the file too")
        return FileTrial(path, path, State.CONFLICT, release.why_it_lacks_a_file())
    if change.new_path not in (None, change.old_path) and (
        refused := _try_renamed(release, change, moved_to, tree)
    ):
        return refused
    base = release.objects.read_id(change.old_blob)
    if change.new_path is None:
        if current == base:
            return FileTrial(target, path, State.CLEAN)
        return FileTrial(path, path, State.CONFLICT, "it deletes a file that upstream changed")
    result_path = moved_to or change.new_path
    trial = _strictly(release, change, current, base, result_path)
    if base is not None and (fault := _is_another_file(trial, base, current)):
        return replace(trial, state=State.MISPLACED, reason=fault, result=None, hunks=())
    if moved_to and trial.state.applies:
        trial = replace(trial, state=State.MERGED)
    if moved_to:
        note = f"upstream renamed {change.old_path} to {moved_to}"
        trial = replace(trial, reason="; ".join(filter(None, (note, trial.reason))))
    if fault := _does_not_compile(trial, current):
        return replace(trial, state=State.CONFLICT, reason=fault, result=None, marked=trial.result)
    return trial


def _is_another_file(trial: FileTrial, base: bytes, current: bytes) -> str:
    """Say why a file that kept its name is another one, where no function tells the place.

    Upstream moves the code to another file and leaves one that imports it under the old name: the
    licence and the first imports are the same lines in both.
    """
    if not trial.state.applies or any(hunk.scope for hunk in trial.hunks) or not trial.hunks:
        return ""
    left = merging.is_written_anew(placement.split_lines(base), placement.split_lines(current))
    return f"upstream wrote the file anew ({left}), and no function tells the place" if left else ""


def _try_renamed(
    release: Release, change: FileChange, moved_to: str | None, tree: Tree
) -> FileTrial | None:
    """Try a file that the patch itself renames; None where its hunks decide."""
    path, old_path = change.path, change.old_path or change.path
    if moved_to == path:
        there = f"upstream renamed {old_path} to {path} too"
        return None if change.hunks else FileTrial(path, old_path, State.UPSTREAMED, there)
    if moved_to is not None:
        reason = f"upstream renamed {old_path} to {moved_to}, the patch to {path}"
    elif tree.read(path) is not None:
        reason = "upstream has another file of that name"
    else:
        reason = clash(path, tree, release.read_old)
    return FileTrial(path, old_path, State.CONFLICT, reason) if reason else None


def _try_added(
    release: Release, change: FileChange, current: bytes | None, tree: Tree
) -> FileTrial:
    path = change.path
    text = "".join(line for hunk in change.hunks for line in hunk.postimage)
    data = text.encode("utf-8", "surrogateescape")
    if current is None:
        if reason := clash(path, tree, release.read_old):
            return FileTrial(path, path, State.CONFLICT, reason)
        return FileTrial(path, path, State.CLEAN, result=data)
    if current == data:
        return FileTrial(path, path, State.UPSTREAMED, "upstream has the same file")
    return FileTrial(path, path, State.CONFLICT, "upstream has another file of that name")


def _strictly(
    release: Release, change: FileChange, current: bytes, base: bytes | None, path: str
) -> FileTrial:
    """Place the hunks as ``apply`` does; where that refuses, merge."""
    old_path = change.old_path or path
    try:
        placed, result = placement.place(
            "", replace(change, new_path=path), current, base, same_blob=current == base
        )
    except (PatchConflictError, MisplacedHunkError) as error:
        return _merged(release, change, current, base, path, error)
    lines = placement.split_lines(current)
    files = None if base is None else Compared(path, placement.split_lines(base), lines)
    hunks = []
    for item in placed:
        touched = (item.hunk.touched or (0,))[0]
        old_line = item.line - item.offset + touched
        changed = ""
        if files is not None:
            meant, now = (
                merging.scope_of(path, text, at)
                for text, at in ((files.before, old_line), (lines, item.line + touched))
            )
            if meant != now:
                refused = MisplacedHunkError(
                    f"the hunk belongs to {meant or 'the top level'}, but its lines now stand in "
                    f"{now or 'the top level'} (line {item.line + 1})",
                    where=f"hunk {item.hunk.number}",
                    next_step=placement.LOOK,
                )
                return _merged(release, change, current, base, path, refused)
            changed = merging.around(files, old_line, item.line + touched)
        hunks.append(HunkTrial(item.line + 1, item.offset, item.scope, changed))
    still = all(not hunk.offset and not hunk.around for hunk in hunks)
    return FileTrial(
        path, old_path, State.CLEAN if still else State.MOVED, hunks=tuple(hunks), result=result
    )


def _merged(
    release: Release,
    change: FileChange,
    current: bytes,
    base: bytes | None,
    path: str,
    refused: PatchConflictError | MisplacedHunkError,
) -> FileTrial:
    old_path = change.old_path or path
    number = refused.where.rpartition("hunk ")[2]
    said = f"hunk {number}: {refused.what}"
    state = State.MISPLACED if isinstance(refused, MisplacedHunkError) else State.CONFLICT
    theirs = release.objects.read_id(change.new_blob)
    failed = FileTrial(path, old_path, state, said)
    if base is None or theirs is None:
        return replace(failed, reason=f"{said} (no blobs to merge: short ids in the index line)")
    note = ""
    ends, wanted = merging.line_ends(base), merging.line_ends(current)
    if ends and wanted and ends != wanted:
        base, theirs = (merging.with_line_ends(data, wanted) for data in (base, theirs))
        note = f"upstream changed the line ends to {wanted.upper()}"
    labels = (f"upstream {release.labels[1]}", f"upstream {release.labels[0]}", "the patch")
    merge = merging.merge(release.objects, base, current, theirs, labels)
    if merge is None:
        return replace(failed, reason=f"{said} (git takes the file for binary)")
    if merge.conflicts:
        if _only_white_space(base, current):
            said += "; upstream changed only white space in this file"
        return replace(failed, reason=said, conflicts=merge.conflicts, marked=merge.text)
    faults, landings = merging.verify(release.objects, path, base, theirs, current, merge.text)
    if faults:
        return replace(failed, state=State.MISPLACED, reason="; ".join(faults))
    hunks = tuple(HunkTrial(at.line, at.offset, at.scope, at.around) for at in landings)
    return FileTrial(path, old_path, State.MERGED, note, hunks=hunks, result=merge.text)


def _only_white_space(base: bytes, current: bytes) -> bool:
    return b"".join(base.split()) == b"".join(current.split())


def _does_not_compile(trial: FileTrial, before: bytes) -> str:
    """Say why the result is no Python, where the file was so before the patch."""
    if trial.result is None or not trial.path.endswith(".py"):
        return ""
    fault = compile_fault(trial.result, trial.path) if trial.state.applies else ""
    if not fault or compile_fault(before, trial.path):
        return ""
    return f"with the patch it does not compile: {fault}"
