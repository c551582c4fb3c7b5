"""`upstream`: a series tried on releases that are not adopted yet; nothing of the project changes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from builder import pipeline, releases
from builder.apply import read_patches
from builder.checkout import from_sdist, using_repository
from builder.contracts import breaches, read_contracts
from builder.errors import (
    HashMismatchError,
    PackageIndexError,
    PinError,
    SourceMismatchError,
    UnsafeArchiveError,
)
from builder.fetch import fetch
from builder.imports import missing_imports
from builder.locations import Cache, Project
from builder.objects import Tree, open_objects
from builder.syntax import without_collector
from builder.trial_report import ReleaseTrials, Untried
from builder.try_series import Release, State, try_series

_NOT_TO_BE_HAD = (
    HashMismatchError,
    PackageIndexError,
    PinError,
    SourceMismatchError,
    UnsafeArchiveError,
)


def try_on(
    tag: str, tags: Sequence[str], project: Project, cache: Cache
) -> Iterator[ReleaseTrials | Untried]:
    """Try the series of ``tag`` on each release of ``tags``; one that cannot be had keeps none back.

    :raises BuilderError: the series does not apply to its own release.
    """
    if not tags:
        return
    _, series, applied = pipeline.applied_series(tag, project, cache)
    patches = read_patches(series.paths, cache)
    entries = [(entry.line, patch) for entry, patch in zip(series.entries, patches, strict=True)]
    contracts = read_contracts(series)
    for onto in tags:
        try:
            pinned = releases.pin_of(onto, project, cache)
            sdist = fetch(pinned, pinned.sdist, cache)
            with using_repository(cache):
                source = from_sdist(pinned, sdist, cache)
        except _NOT_TO_BE_HAD as error:
            yield Untried(onto, error)
            continue
        began = time.perf_counter()
        with without_collector(), open_objects(source.repository, cache) as objects:
            release = Release(objects, cache, applied.base, source.commit, (tag, onto))
            trials = tuple(try_series(release, entries))
            broken = breaches(contracts, release.read_new)
            tree = Tree(objects, source.commit)
            for trial in trials:
                if trial.state is not State.UPSTREAMED:
                    tree = tree.with_changes(trial.changes)
            missing = missing_imports(tree.changed, tree.read, release.read_new)
        yield ReleaseTrials(onto, trials, broken, missing, time.perf_counter() - began)
