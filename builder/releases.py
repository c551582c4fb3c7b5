"""Upstream's releases: which are newer than what is pinned, and a pin of each without adopting it."""

from __future__ import annotations

from builder import package_index, pin, pinning
from builder.errors import UnknownTagError
from builder.locations import UPSTREAM_DISTRIBUTION, Cache, Project
from builder.pin import Pin


def released_tags() -> list[str]:
    """Return the tags of upstream's final releases on the package index, oldest first.

    :raises PackageIndexError: the index cannot be reached.
    """
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415 - keeps --help quick

    versions = set()
    settings = package_index.pip_settings()
    for text in package_index.project_versions(UPSTREAM_DISTRIBUTION, settings):
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        if not version.is_prerelease and version.local is None:
            versions.add(version)
    return [f"v{version}" for version in sorted(versions)]


def newer_than(tag: str, tags: list[str]) -> list[str]:
    """Return those of ``tags`` that are newer releases than ``tag``, oldest first.

    :raises UnknownTagError: ``tag`` is none.
    """
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415

    try:
        Version(tag)
    except InvalidVersion as error:
        raise UnknownTagError(
            f"{tag!r} is no release", next_step="upstream's release tags look like v0.20.2"
        ) from error
    return sorted((other for other in tags if Version(other) > Version(tag)), key=Version)


def newest_pin(project: Project) -> str:
    """Return the newest pinned tag.

    :raises UnknownTagError: nothing is pinned.
    """
    tags = pin.pinned_tags(project.pins)
    if not tags:
        raise UnknownTagError(
            "nothing is pinned", where=str(project.pins),
            next_step="python -m builder pin TAG, or name releases with --onto TAG",
        )  # fmt: skip
    return tags[-1]


def pin_of(tag: str, project: Project, cache: Cache) -> Pin:
    """Return the project's pin; else one kept in the cache, made from the index (sdist only)."""
    if (project.pins / f"{tag}.toml").is_file():
        return pin.load(project.pins, tag)
    kept = cache.root / "releases"
    if not (kept / f"{tag}.toml").is_file():
        pin.save(kept, pinning.make_pin(tag, cache), force=True)
    return pin.load(kept, tag)
