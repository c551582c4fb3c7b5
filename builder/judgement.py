"""The verdict on an environment: whose files of the package vllm are there, by their RECORDs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from builder import alias
from builder.installed import Installed
from builder.locations import DISTRIBUTION, UPSTREAM_DISTRIBUTION
from builder.words import counted

_SHOWN = 5  # file names in a message


class State(StrEnum):
    """What an environment holds; those from BOTH on are faults."""

    NOTHING = "neither is installed"
    SOURCE_TREE = "an editable install or a source tree"
    UPSTREAM = "upstream only"
    HEALTHY = "healthy"
    BOTH = "both are installed over each other"
    SHADOWED = "another vllm is imported than the installed vllm-glm5"
    DELETED = "files are missing, as after an uninstall of the other distribution"
    EDITED = "files differ from what was installed"
    ALIAS_ONLY = "the alias vllm without the vllm-glm5 that it stands for"
    ORPHANED = "files that no installed distribution owns"

    @property
    def broken(self) -> bool:
        return list(State).index(self) >= list(State).index(State.BOTH)


def judge(found: tuple[Installed, ...], package: Path | None) -> tuple[State, str, tuple[str, ...]]:
    """Return the state, one sentence about it, and further facts."""
    owners = [dist for dist in found if dist.files]
    if not owners:
        return _judge_without_files(found, package)
    folder = str(package.parent) if package else owners[0].folder
    used = [dist for dist in owners if dist.folder == folder]
    ours = [dist for dist in owners if dist.name == DISTRIBUTION]
    if not used or (ours and not any(dist.name == DISTRIBUTION for dist in used)):
        details = (f"import vllm takes {package}",)
        return State.SHADOWED, f"{owners[0]} is installed, and another vllm is imported", details
    if len(used) > 1:
        return State.BOTH, *_whose(used)
    (only,) = used
    if only.missing:
        summary = f"{len(only.missing)} of the {only.files} files of {only} are missing"
        return State.DELETED, f"{summary}: another distribution was uninstalled", _some(only)
    if only.edited:
        summary = f"{counted(len(only.edited), 'file')} of {only} not as installed"
        return State.EDITED, f"{summary}: something edited or overwrote them", _some(only)
    if only.name == UPSTREAM_DISTRIBUTION:
        return State.UPSTREAM, f"upstream's {only}, without {DISTRIBUTION}", ()
    return State.HEALTHY, f"healthy: {only}", _other_alias(found, only)


def _judge_without_files(
    found: tuple[Installed, ...], package: Path | None
) -> tuple[State, str, tuple[str, ...]]:
    if any(dist.editable for dist in found):
        return State.SOURCE_TREE, f"an editable install, in {package}", ()
    if any(dist.alias for dist in found) and not any(dist.name == DISTRIBUTION for dist in found):
        return State.ALIAS_ONLY, f"the alias is installed, and no {DISTRIBUTION}", ()
    if found:  # without RECORD, or one that lists nothing
        return State.DELETED, f"{found[0]} has lost its RECORD: an uninstall was cut short", ()
    if package is None or not _own_files(package):
        return State.NOTHING, f"neither {DISTRIBUTION} nor {UPSTREAM_DISTRIBUTION} is installed", ()
    if package.parent.name in {"site-packages", "dist-packages"}:
        return State.ORPHANED, f"{package} belongs to no installed distribution", ()
    return State.SOURCE_TREE, f"a source tree, {package}", ()


def _own_files(package: Path) -> bool:
    return any(p.is_file() and p.suffix != ".pyc" for p in package.rglob("*"))


def _whose(used: list[Installed]) -> tuple[str, tuple[str, ...]]:
    """Say whose files are there: those that their RECORDs tell apart decide."""
    intact = {dist: _telling(dist, used) for dist in used}
    names = " and ".join(str(dist) for dist in used)
    right = [dist for dist, (same, all_) in intact.items() if same == all_]
    if len(right) == len(used):
        whose = "and do not differ in any file"
    elif right:
        whose = f"and the files are those of {right[0]}"
    else:
        whose = "and the files are a mixture of both"
    details = tuple(
        f"{dist}: {same} of the {all_} files that tell them apart are its own"
        for dist, (same, all_) in intact.items()
    )
    return f"{names} are installed over each other, {whose}", details


def _telling(dist: Installed, used: list[Installed]) -> tuple[int, int]:
    """Count the paths that another RECORD lists with other bytes: those that match, and all."""
    records = {other: other.record for other in used}
    mine = records.pop(dist)
    telling = {
        path
        for path, digest in mine.items()
        for record in records.values()
        if path in record and record[path] != digest
    }
    wrong = telling & {*dist.missing, *dist.edited}
    return len(telling) - len(wrong), len(telling)


def _some(dist: Installed) -> tuple[str, ...]:
    lines = [f"missing  {path}" for path in dist.missing[:_SHOWN]]
    lines += [f"differs  {path}" for path in dist.edited[:_SHOWN]]
    rest = len(dist.missing) + len(dist.edited) - len(lines)
    return (*lines, f"and {rest} more") if rest else tuple(lines)


def _other_alias(found: tuple[Installed, ...], ours: Installed) -> tuple[str, ...]:
    """Say where the alias is missing or stale: the next plugin would bring upstream's vllm in."""
    wanted = f"install {alias.requirement(ours.version)} from the same index"
    aliases = [dist for dist in found if dist.alias]
    if ours.requires_alias and not aliases:
        return (f"its alias, which it requires, is missing; {wanted}",)
    return tuple(
        f"the alias is of {dist.version}; {wanted}"
        for dist in aliases
        if dist.version != ours.version
    )
