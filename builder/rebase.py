"""`rebase`: the series of one release, moved to another, patch by patch; it stops only for a person.

Between two stops everything is worked out in memory and committed at once, so a kill costs seconds
of work and no answer of a person. ``patches/`` is not touched before the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from builder import atomic, pin, pipeline, rebase_state, rebase_tree
from builder.apply import AppliedSeries, read_patches
from builder.checkout import SourceTree, using_repository
from builder.commits import NewCommit, make_commits
from builder.errors import RebaseStateError, RebaseStoppedError
from builder.locations import Cache, Project
from builder.objects import Objects, Tree, open_objects
from builder.patchfile import Patch
from builder.rebase_finish import Finished, finish
from builder.rebase_report import review_of, stop_details
from builder.rebase_state import (
    DROPPED,
    RESOLVED,
    Done,
    RebaseState,
    Review,
    Stop,
    folder_of,
    number_of,
)
from builder.repository import Git
from builder.series import Series, read_series
from builder.syntax import without_collector
from builder.try_series import PatchTrial, Release, State, try_patch


@dataclass(frozen=True)
class _Ground:
    """What a rebase stands on; the same each time it is worked out."""

    project: Project
    cache: Cache
    series: Series
    applied: AppliedSeries
    patches: tuple[Patch, ...]
    source: SourceTree


def begin(
    project: Project,
    cache: Cache,
    from_tag: str,
    onto: str,
    *,
    drop: Sequence[int] = (),
    auto_drop: bool = False,
) -> Finished:
    """Move the series of ``from_tag`` to ``onto``.

    :raises RebaseStoppedError: a patch waits for a person; the state and the work tree are there.
    :raises RebaseStateError: one is under way, or ``onto`` has a series already.
    """
    pin.load(project.pins, onto)  # what is no tag shall not become the name of a folder
    with _alone(project, onto):
        if rebase_state.load(project, onto) is not None:
            raise RebaseStateError(
                f"a rebase onto {onto} is under way; it was left as it is",
                where=str(folder_of(project, onto)),
                next_step="python -m builder rebase --status, then --continue or --abort",
            )
        series = _startable(project, from_tag, onto)
        _require_known(drop, [entry.line for entry in series.entries], from_tag)
        state = RebaseState(
            from_tag=from_tag,
            onto=onto,
            patches=tuple((e.line, _sha256(e.path)) for e in series.entries),
            drop=tuple(drop),
            auto_drop=auto_drop,
        )
        ground = _ground(project, cache, state)
        state = replace(state, base=ground.source.commit)
        rebase_tree.remove(folder_of(project, onto))  # of one that was killed before it began
        rebase_state.save(project, state)
        return _advance(state, ground)


def go_on(
    project: Project,
    cache: Cache,
    onto: str | None = None,
    *,
    drop: Sequence[int] = (),
    auto_drop: bool = False,
) -> Finished:
    """Take what the person did in the work tree, or the word to drop the patch, and go on.

    :raises RebaseStateError: none is under way, or the work tree is not ready.
    """
    onto = the_one(project, onto)
    with _alone(project, onto):
        state = _loaded(project, onto)
        lines = [line for line, _ in state.patches]
        _require_known(drop, lines[len(state.done) :], state.from_tag)
        state = replace(
            state,
            drop=tuple(dict.fromkeys((*state.drop, *drop))),
            auto_drop=state.auto_drop or auto_drop,
        )
        ground = _ground(project, cache, state)
        stop = state.stop
        if stop is not None and stop.is_laid and (folder_of(project, onto) / "tree").exists():
            git = Git(folder_of(project, onto) / "tree")
            dropped = number_of(stop.line) in state.drop or (
                state.auto_drop
                and stop.is_surely_upstream
                and not rebase_tree.is_resolved(git, stop)  # somebody's word to keep it
            )
            if not dropped:
                commit = rebase_tree.take(git, stop, onto)
                state = replace(state, done=(*state.done, _resolved(git, stop, commit)))
        # a stop that was not laid, or whose work tree is gone, is worked out and laid again
        state = replace(state, stop=None)
        rebase_state.save(project, state)
        return _advance(state, ground)


def _resolved(git: Git, stop: Stop, commit: str) -> Done:
    """Return what the report tells of it: the files that are lost, the hunks that nobody touched."""
    names = git.run("diff-tree", "-r", "-z", "--no-renames", "--name-only", stop.head, commit)
    changed = set(names.decode("utf-8", "surrogateescape").split("\0"))
    reason = stop.reason
    if lost := [path for path in stop.paths if path not in changed]:
        reason += f"; it no longer changes {', '.join(lost)}"

    def stands(review: Review) -> bool:
        data = git.blob(f"{commit}:{review.path}") or b""
        return review.text in data.decode("utf-8", "replace")

    review = tuple(one for one in stop.review if stands(one))
    return Done(stop.line, stop.subject, RESOLVED, reason, commit, review)


def abort(project: Project, onto: str | None = None) -> str:
    """End the rebase; ``patches/`` is as it was before. Return what to tell.

    One that was killed behind its last step, when the new series was in its place, is at its end.
    """
    onto = the_one(project, onto)
    with _alone(project, onto):
        folder = folder_of(project, onto)
        if onto not in rebase_state.under_way(project):
            raise _ended_meanwhile(onto)
        replaced = folder / "replaced"
        target = project.patches / onto
        if replaced.exists() and not target.exists():  # killed between two renames of the end
            replaced.rename(target)
        state = _readable(project, onto)
        is_through = (
            state is not None and state.is_finishing and not (folder / "series.new").exists()
        )
        rebase_tree.remove(folder)
    if is_through:
        return f"the rebase onto {onto} was at its end: the new series is {target}"
    return f"the rebase onto {onto} is aborted; patches/ is as it was"


def _readable(project: Project, onto: str) -> RebaseState | None:
    try:
        return rebase_state.load(project, onto)
    except RebaseStateError:  # a damaged one can be aborted too
        return None


def the_one(project: Project, onto: str | None) -> str:
    """Return the tag of the rebase under way.

    :raises RebaseStateError: there is none, or there are several and none was named.
    """
    found = rebase_state.under_way(project)
    if onto in found or (onto is None and len(found) == 1):
        return onto or found[0]
    what = f"rebases are under way onto {', '.join(found)}" if found else "no rebase is under way"
    raise RebaseStateError(
        what if onto is None else f"no rebase onto {onto} is under way",
        where=str(project.root / ".rebase"),
        next_step="name one with --onto TAG"
        if found
        else "python -m builder rebase --from TAG --onto TAG",
    )


@contextmanager
def _alone(project: Project, onto: str) -> Iterator[None]:
    with atomic.exclusive(folder_of(project, onto), f"the rebase onto {onto}"):
        yield


def _loaded(project: Project, onto: str) -> RebaseState:
    state = rebase_state.load(project, onto)
    if state is None:
        raise _ended_meanwhile(onto)
    return state


def _ended_meanwhile(onto: str) -> RebaseStateError:
    return RebaseStateError(
        f"no rebase onto {onto} is under way any more: another process ended it",
        next_step=f"python -m builder rebase --status; python -m builder series --tag {onto}",
    )


def _startable(project: Project, from_tag: str, onto: str) -> Series:
    series = read_series(project, from_tag)
    pin.load(project.pins, onto)
    target = project.patches / onto
    if from_tag == onto or ((target / "series").exists() and read_series(project, onto).entries):
        raise RebaseStateError(
            f"{onto} has a series already; a rebase makes a new one",
            where=str(target),
            next_step=f"change it with python -m builder edit --tag {onto}, or remove the folder "
            "if it is not wanted",
        )
    return series


def _require_known(drop: Sequence[int], lines: Sequence[str], tag: str) -> None:
    unknown = [number for number in drop if number not in {number_of(line) for line in lines}]
    if unknown:
        raise RebaseStateError(
            f"no patch {', '.join(f'{n:04d}' for n in unknown)} is left to drop",
            where=tag,
            details=tuple(lines),
            next_step="give the number that the file's name begins with",
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _ground(project: Project, cache: Cache, state: RebaseState) -> _Ground:
    _, series, applied = pipeline.applied_series(state.from_tag, project, cache)
    found = tuple((entry.line, _sha256(entry.path)) for entry in series.entries)
    if found != state.patches:
        odd = sorted({line for line, _ in set(found) ^ set(state.patches)})
        raise RebaseStateError(
            f"the series {state.from_tag} has changed since the rebase began",
            where=str(series.folder),
            details=tuple(odd),
            next_step="restore the files, or python -m builder rebase --abort and begin anew",
        )
    source = pipeline.source_tree(pin.load(project.pins, state.onto), project, cache, None)
    if state.base not in ("", source.commit):
        raise RebaseStateError(
            f"{state.onto} has been pinned anew since the rebase began: it is another release now",
            where=str(project.pins / f"{state.onto}.toml"),
            details=(f"begun on {state.base}", f"now      {source.commit}"),
            next_step="restore the pin, or keep what you resolved in the work tree elsewhere, "
            "python -m builder rebase --abort and begin anew",
        )
    patches = read_patches(series.paths, cache)
    return _Ground(project, cache, series, applied, patches, source)


def _advance(state: RebaseState, ground: _Ground) -> Finished:
    """Try the patches that are left; stop at the first that wants a person, or finish."""
    repository = ground.applied.repository
    base = ground.source.commit
    tree = folder_of(ground.project, state.onto) / "tree"
    with (
        using_repository(ground.cache),
        open_objects(repository, ground.cache) as objects,
        without_collector(),
    ):
        head = state.head(base)
        kept = f"refs/rebase/{state.onto}"
        if repository.resolve(head) is None:  # the cache is new; the work tree has them
            if not (tree / ".git").exists():
                raise RebaseStateError(
                    "what was resolved is lost: the cache and the work tree that had it are gone",
                    where=str(tree),
                    details=tuple(d.line for d in state.done if d.outcome == RESOLVED),
                    next_step="restore one of them, or python -m builder rebase --abort "
                    f"--onto {state.onto} and begin anew",
                )
            repository.run("fetch", "--quiet", "--no-tags", str(tree), f"+{head}:{kept}")
        repository.run("update-ref", kept, head)
        release = Release(
            objects, ground.cache, ground.applied.base, base, (state.from_tag, state.onto)
        )
        walk = _Walk(objects, head, list(state.done))
        stopped = walk.go(state, ground, release)
        commits = make_commits(repository, head, walk.pending, kept, ground.cache)
        state = replace(state, done=walk.with_commits(commits))
        if stopped is not None:
            _stop(state, ground, release, stopped)
    return finish(state, ground.series, ground.applied, ground.source, ground.project, ground.cache)


class _Walk:
    """Goes through the patches that are left, up to the first that wants a person."""

    def __init__(self, objects: Objects, head: str, done: list[Done]) -> None:
        self.tree = Tree(objects, head)
        self.done = done
        self.pending: list[NewCommit] = []
        self._first = len(done)

    def go(self, state: RebaseState, ground: _Ground, release: Release) -> PatchTrial | None:
        left = slice(self._first, None)
        for entry, patch, old in zip(
            ground.series.entries[left], ground.patches[left], ground.applied.patches[left],
            strict=True,
        ):  # fmt: skip
            trial = try_patch(release, entry.line, patch, self.tree)
            told = entry.number in state.drop
            if told or (trial.is_surely_upstream and state.auto_drop):
                word = "the maintainer's word" if told else "--auto-drop"
                known = f"{word}; upstream has it: {trial.verdict.extent}, {trial.verdict.reason}"
                self.done.append(Done(entry.line, patch.subject, DROPPED, known, None))
                continue
            if not trial.state.applies:
                return trial
            modes = {c.path: c.mode for c in patch.changes}
            self.pending.append(NewCommit(old.commit, trial.changes, modes))
            self.tree = self.tree.with_changes(trial.changes)
            self.done.append(
                Done(
                    entry.line, patch.subject, str(trial.state), trial.reason, "", review_of(trial)
                )
            )
        return None

    def with_commits(self, commits: list[str]) -> tuple[Done, ...]:
        """Return what is done, with the ids of the commits that were made of it."""
        ids = iter(commits)
        return tuple(
            replace(item, commit=next(ids)) if item.commit == "" else item for item in self.done
        )


def _stop(state: RebaseState, ground: _Ground, release: Release, trial: PatchTrial) -> None:
    """Save where it stops, lay the patch into the work tree, and tell the person.

    :raises RebaseStoppedError: always.
    """
    folder = folder_of(ground.project, state.onto)
    head = state.head(ground.source.commit)
    staged = {file.path for file in trial.staged}
    stop = Stop(trial.line, trial.patch.subject, str(trial.state), trial.reason, head, is_laid=False,
                details=stop_details(release, trial, folder),
                is_surely_upstream=trial.is_surely_upstream,
                paths=tuple(file.path for file in trial.files),
                review=tuple(one for one in review_of(trial) if one.path in staged))  # fmt: skip
    refs = {
        f"refs/tags/{state.from_tag}": ground.applied.base,
        f"refs/tags/{state.onto}": ground.source.commit,
        f"refs/heads/series/{state.from_tag}": ground.applied.head,
        "refs/rebase/head": head,
    }
    refs |= {
        f"refs/patches/{entry.number:04d}": patch.commit
        for entry, patch in zip(ground.series.entries, ground.applied.patches, strict=True)
    }
    git = rebase_tree.make_tree(folder / "tree", ground.applied.repository, refs, state.onto)
    state = replace(state, stop=stop)
    rebase_state.save(ground.project, state)
    rebase_tree.lay(git, trial, head, state.onto)
    rebase_state.save(ground.project, replace(state, stop=replace(stop, is_laid=True)))
    raise stopped_error(ground.project, state)


def stopped_error(project: Project, state: RebaseState) -> RebaseStoppedError:
    """Return what a stopped rebase tells: the patch, why, what to look at, what to run."""
    stop = state.stop
    assert stop is not None  # noqa: S101 - the callers know
    number = number_of(stop.line)
    drop = f"python -m builder rebase --continue --drop {number:04d}"
    keep = "resolve it there, git add, then: python -m builder rebase --continue"
    return RebaseStoppedError(
        f"{stop.line} ({len(state.done) + 1} of {len(state.patches)}): {stop.state}: {stop.reason}",
        where=str(folder_of(project, state.onto) / "tree"),
        details=stop.details,
        next_step=f"{drop}; or to keep it, {keep}"
        if stop.state == State.UPSTREAMED
        else f"{keep} (or {drop}; or --abort)",
    )
