"""The end of a rebase: the commits as patch files, proved, and put in their place as one folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from builder import atomic, contracts, pin, rebase_state, rebase_tree
from builder.apply import AppliedSeries, apply_series
from builder.checkout import SourceTree, using_repository
from builder.contracts import Breach, breaches, read_contracts
from builder.errors import PatchFormatError
from builder.export import FORMAT_PATCH, slug
from builder.imports import MissingImport, missing_imports
from builder.locations import Cache, Project
from builder.rebase_report import final_report
from builder.rebase_state import Done, RebaseState, folder_of, number_of
from builder.repository import Git
from builder.revision import raise_revision
from builder.series import COMMON, Entry, Series, read_series


@dataclass(frozen=True)
class Finished:
    """A rebase that is through."""

    onto: str
    folder: Path
    report: Path
    done: tuple[Done, ...]
    left: tuple[str, ...]
    breaches: tuple[Breach, ...] = ()
    missing: tuple[MissingImport, ...] = ()


def finish(
    state: RebaseState,
    series: Series,
    applied: AppliedSeries,
    source: SourceTree,
    project: Project,
    cache: Cache,
) -> Finished:
    """Write the new series, prove it, and move it to ``patches/ONTO``.

    Killed before the move, nothing of ``patches/`` has changed; killed after it, only the folder of
    the rebase is left to remove.
    """
    folder = folder_of(project, state.onto)
    target = project.patches / state.onto
    report = project.root / ".rebase" / f"{state.onto}.md"
    left = _left_to_run(state.onto)
    dropped = {number_of(done.line) for done in state.done if done.commit is None}
    broken = breaches(
        [contract for contract in read_contracts(series) if contract.patch not in dropped],
        lambda path: source.repository.blob(f"{source.commit}:{path}"),
    )
    missing = imports_of(source.repository, source.commit, state.head(source.commit))
    if broken or missing:
        left = (f"python -m builder contracts --tag {state.onto}", *left)
    if not state.is_finishing:
        head = state.head(source.commit)
        lines = _write(state, series, source, project, folder / "series.new")
        with using_repository(cache):
            _prove(source, project, folder / "series.new", lines, head, cache)
            difference = _range_diff(applied, source, head)
        written = _series_of(state, series, project, folder / "series.new", lines)
        raise_revision(pin.load(project.pins, state.onto), written)
        atomic.write_text(report, final_report(state, lines, difference, broken, missing, left))
        state = replace(state, is_finishing=True)
        rebase_state.save(project, state)
    _move(folder / "series.new", target, folder / "replaced")
    rebase_tree.remove(folder)
    return Finished(state.onto, target, report, state.done, left, broken, missing)


def imports_of(git: Git, base: str, head: str) -> tuple[MissingImport, ...]:
    """Return the imports that the commits ``base..head`` added and that their tree cannot satisfy."""
    names = git.run("diff-tree", "-r", "-z", "--no-renames", "--name-only", base, head)
    return missing_imports(
        filter(None, names.decode("utf-8", "surrogateescape").split("\0")),
        lambda path: git.blob(f"{head}:{path}"),
        lambda path: git.blob(f"{base}:{path}"),
    )


def _left_to_run(onto: str) -> tuple[str, ...]:
    return (
        f"python -m builder series --tag {onto}",
        "pytest",
        f"python -m builder --tag {onto}",
        "python -m builder test WHEEL  # the GPU gate, before anything reaches the stable channel",
    )


def _write(
    state: RebaseState, series: Series, source: SourceTree, project: Project, new: Path
) -> dict[str, str]:
    """Write the folder; return the new line of each old one that stays."""
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    target = project.patches / state.onto
    for kept in (*series.folder.glob("*.toml"), *(target.iterdir() if target.exists() else ())):
        if kept.is_dir():
            shutil.copytree(kept, new / kept.name, symlinks=True)
        elif kept.suffix != ".patch":
            shutil.copyfile(kept, new / kept.name)
    git = source.repository
    numbers = (number_of(path.name) for path in project.patches.glob("*/[0-9]*.patch"))
    number = max(numbers, default=0)
    lines: dict[str, str] = {}
    old = {entry.line: entry for entry in series.entries}
    for done in state.done:
        if done.commit is None:
            continue
        data = git.run(*FORMAT_PATCH, "-1", done.commit)
        line = done.line
        if line.startswith(COMMON):
            if data == old[line].path.read_bytes():
                lines[line] = line
                continue
            number += 1  # other releases name the shared one as it is
            line = f"{number:04d}-{line.rpartition('/')[2][5:]}"
        subject = git.text("log", "-1", "--format=%s", done.commit)
        if subject != done.subject:
            line = f"{number_of(line):04d}-{slug(subject)}.patch"
        atomic.write_bytes(new / line, data)
        lines[done.line] = line
    renumbered = {
        number_of(done.line): number_of(lines[done.line]) if done.line in lines else None
        for done in state.done
    }
    if (new / contracts.NAME).exists() and any(before != now for before, now in renumbered.items()):
        contracts.renumber_contracts(new / contracts.NAME, renumbered)
    comments = []
    for text in (series.folder / "series").read_text(encoding="utf-8").splitlines():
        if text.strip() and not text.startswith("#"):
            break
        comments.append(text)
    atomic.write_text(new / "series", "".join(f"{t}\n" for t in (*comments, *lines.values())))
    return lines


def _series_of(
    state: RebaseState, old: Series, project: Project, new: Path, lines: dict[str, str]
) -> Series:
    """Return the series as it will be read from its place."""
    own = project.patches / state.onto / "settings.toml"
    alias = read_series(project, state.onto).requires_alias if own.exists() else old.requires_alias
    paths = _paths(project, new, lines)
    entries = (
        Entry(line, number_of(line), path) for line, path in zip(lines.values(), paths, strict=True)
    )
    return Series(state.onto, new, tuple(entries), alias)


def _paths(project: Project, new: Path, lines: dict[str, str]) -> tuple[Path, ...]:
    return tuple(
        project.patches / line.removeprefix("../") if line.startswith(COMMON) else new / line
        for line in lines.values()
    )


def _prove(
    source: SourceTree, project: Project, new: Path, lines: dict[str, str], head: str, cache: Cache
) -> None:
    """Apply what was written, strictly, as every build will: it has to give the same commits.

    :raises PatchFormatError: a message or a change does not survive the way through a patch file.
    """
    applied = apply_series(source, _paths(project, new, lines), cache)
    if applied.head != head:
        raise PatchFormatError(
            "a commit does not survive the way through a patch file",
            where=str(new),
            details=(f"rebased {head}", f"applied {applied.head}"),
            next_step="look at the messages of the commits that you made: a line like '---' or a "
            "header ends a message; amend it in the work tree, then: python -m builder rebase "
            "--continue",
        )


def _range_diff(applied: AppliedSeries, source: SourceTree, head: str) -> str:
    git: Git = source.repository
    if applied.base == applied.head or source.commit == head:
        return "one of the two is empty: there is nothing to compare"  # git takes no empty range
    result = git.run(
        "range-diff", "--no-color", f"{applied.base}..{applied.head}", f"{source.commit}..{head}"
    )
    return result.decode("utf-8", "replace")


def _move(new: Path, target: Path, replaced: Path) -> None:
    """Put the folder in its place; an empty series that was there goes aside first."""
    if not new.exists():
        return  # done before a kill
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    new.rename(target)
    atomic.sync_folder(target.parent)
