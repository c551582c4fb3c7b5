"""`backport`: one patch of a series, carried to the series of other releases.

A shared patch (``patches/common``) is the same file everywhere: what is tried is whether each series
that names it still applies, and whether a series that does not name it can. A patch of one release is
placed on the other by the rules of a rebase, in its own place of the order: it replaces the patch of
its number, and the patches behind it are tried on top of it. Nothing is written for a release on
which anything wants a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from builder import pin, pipeline, revision
from builder.apply import AppliedSeries, apply_series, read_patches
from builder.checkout import using_repository
from builder.commits import NewCommit, make_commits
from builder.errors import (
    MisplacedHunkError,
    PatchConflictError,
    RevisionError,
    SeriesError,
    UnknownTagError,
)
from builder.export import FORMAT_PATCH, Export, ExportedPatch, write_export
from builder.locations import Cache, Project
from builder.objects import Tree, open_objects
from builder.series import Entry, Series, read_series, series_tags
from builder.try_series import Release, State, try_patch
from builder.words import counted


@dataclass(frozen=True)
class Backported:
    """How the patch fared on one release.

    :param state: clean, moved, merged; unchanged where the series has it already, upstreamed where
        the release needs none; or why not.
    :param source: the release whose series it was taken from.
    :param written: the lines of the series whose files were written (or would be).
    :param needs_revision: what ships has changed, and N of +glm5.N has not.
    """

    tag: str
    state: str
    reason: str
    written: tuple[str, ...] = ()
    needs_revision: bool = False
    source: str = ""

    @property
    def is_good(self) -> bool:
        good = ("unchanged", State.CLEAN, State.MOVED, State.MERGED, State.UPSTREAMED)
        return self.state in good


def backport(
    number: int,
    to: Sequence[str],
    project: Project,
    cache: Cache,
    *,
    from_tag: str | None = None,
    check: bool = False,
) -> tuple[Backported, ...]:
    """Carry patch ``number`` to each release of ``to`` (default: every other series).

    :param from_tag: the series that has the patch as it should be (default: the newest that has it).
    :param check: try only, write nothing.
    :raises UnknownTagError: no series has that patch.
    """
    source = _source(number, project, from_tag)
    tags = list(to) or [tag for tag in series_tags(project) if tag != source.tag]
    entry = next(entry for entry in source.entries if entry.number == number)
    _, _, applied = pipeline.applied_series(source.tag, project, cache)
    found = []
    for tag in tags:
        target = read_series(project, tag)
        if entry.path in target.paths or tag == source.tag:
            found.append(_in_place(tag, project, cache))
        else:
            found.append(_carry(entry, source, applied, target, project, cache, check=check))
    return tuple(
        replace(one, needs_revision=_is_stale(one.tag, project), source=source.tag) for one in found
    )


def _source(number: int, project: Project, from_tag: str | None) -> Series:
    tags = [from_tag] if from_tag else list(reversed(series_tags(project)))
    for tag in tags:
        series = read_series(project, tag)
        if any(entry.number == number for entry in series.entries):
            return series
    raise UnknownTagError(
        f"no patch {number:04d} in {', '.join(tags) or 'any series'}",
        where=str(project.patches),
        next_step="python -m builder series --tag TAG lists the numbers",
    )


def _is_stale(tag: str, project: Project) -> bool:
    try:
        revision.checked_revision(pin.load(project.pins, tag), read_series(project, tag))
    except RevisionError:
        return True
    return False


def _in_place(tag: str, project: Project, cache: Cache) -> Backported:
    """Try a series that names the very file: it has the change already."""
    try:
        _, _, applied = pipeline.applied_series(tag, project, cache)
    except (PatchConflictError, MisplacedHunkError) as error:
        return Backported(tag, State.CONFLICT, f"{error.where}: {error.what}")
    moved = sum(len(patch.moved) for patch in applied.patches)
    return Backported(
        tag, "unchanged", f"it names the file; {counted(moved, 'hunk')} moved" if moved else ""
    )


def _carry(
    entry: Entry,
    source: Series,
    from_applied: AppliedSeries,
    target: Series,
    project: Project,
    cache: Cache,
    *,
    check: bool,
) -> Backported:
    tree = pipeline.source_tree(pin.load(project.pins, target.tag), project, cache, None)
    before = _before(entry, source, target)
    with using_repository(cache):
        own = apply_series(tree, target.paths, cache)
    behind = [e for e in target.entries[len(before) :] if e.number != entry.number]
    commits = {e.line: p.commit for e, p in zip(target.entries, own.patches, strict=True)}
    commits_from = dict(zip(source.paths, (p.commit for p in from_applied.patches), strict=True))
    moved = _moved_line(entry, target)
    work = [(moved, entry, source.tag, from_applied.base, commits_from[entry.path])]
    work += [(e.line, e, target.tag, own.base, commits[e.line]) for e in behind]
    patches = read_patches(tuple(item[1].path for item in work), cache)
    head = commits[before[-1].line] if before else own.base
    pending: list[NewCommit] = []
    state, reason = State.CLEAN, ""
    with using_repository(cache), open_objects(tree.repository, cache) as objects:
        now = Tree(objects, head)
        for (line, _, tag, base, commit), patch in zip(work, patches, strict=True):
            release = Release(objects, cache, base, own.base, (tag, target.tag))
            trial = try_patch(release, line, patch, now)
            if not trial.state.applies:
                if line == moved and trial.is_surely_upstream:
                    return Backported(target.tag, State.UPSTREAMED, trial.reason)
                what = trial.reason if line == moved else f"behind it, {line}: {trial.reason}"
                state = State.CONFLICT if trial.state is State.UPSTREAMED else trial.state
                return Backported(target.tag, state, what)
            if line == moved:
                state, reason = trial.state, trial.reason
            now = now.with_changes(trial.changes)
            modes = {c.path: c.mode for c in patch.changes}
            pending.append(NewCommit(commit, trial.changes, modes))
        made = make_commits(tree.repository, head, pending, "refs/backport", cache)
        data = {
            line: tree.repository.run(*FORMAT_PATCH, "-1", commit)
            for (line, *_), commit in zip(work, made, strict=True)
        }
    export = _export(target, [e.line for e in before], data)
    if not export.is_noop and not check:
        write_export(export)
    state_word = "unchanged" if export.is_noop else str(state)
    return Backported(target.tag, state_word, reason, export.written)


def _before(entry: Entry, source: Series, target: Series) -> tuple[Entry, ...]:
    """Return the patches of ``target`` that stay in front of the new one."""
    for n, other in enumerate(target.entries):
        if other.number == entry.number:
            return target.entries[:n]
    earlier = {other.number for other in source.entries[: source.entries.index(entry)]}
    last = max((n for n, e in enumerate(target.entries) if e.number in earlier), default=-1)
    return target.entries[: last + 1]


def _moved_line(entry: Entry, target: Series) -> str:
    """Return the line in the target's series: its own file, or the shared one by its shared name."""
    same = next((e for e in target.entries if e.number == entry.number), None)
    if same is not None and (same.is_common or entry.is_common):
        raise SeriesError(
            f"{entry.line} and {same.line} have one number, and one of them is shared",
            where=target.tag,
            next_step="give one of them another number in edit and export, then run this again",
        )
    return entry.line


def _export(target: Series, before: list[str], data: dict[str, bytes]) -> Export:
    kept = {entry.line: entry.path for entry in target.entries}
    patches = [ExportedPatch(line, kept[line].read_bytes()) for line in before]
    patches += [ExportedPatch(line, raw) for line, raw in data.items()]
    written = tuple(
        patch.line
        for patch in patches
        if not _is_shared(patch.line)
        and (patch.line not in kept or kept[patch.line].read_bytes() != patch.data)
    )
    lines = {patch.line for patch in patches}
    return Export(
        target, tuple(patches), written, tuple(line for line in kept if line not in lines)
    )


def _is_shared(line: str) -> bool:
    return Path(line).parent != Path()
