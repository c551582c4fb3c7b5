"""The way of a build: pin -> source tree -> commits -> wheel -> audit -> staging index.

Each stage is a function of its inputs' hashes; what is there already is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder import atomic, provenance
from builder.apply import AppliedSeries, apply_series, read_patches
from builder.audit import Audit, audit
from builder.checkout import SourceTree, from_git, from_sdist, using_repository
from builder.classify import Mode, ModeChoice, TouchedPath, choose_mode, touched_paths
from builder.console import say
from builder.digests import sha256_of
from builder.errors import AuditError, MisplacedHunkError, PatchConflictError
from builder.fetch import fetch
from builder.locations import Cache, Project
from builder.pin import Pin, load, save
from builder.repack import WheelInputs, repack
from builder.repository import Git
from builder.revision import checked_revision, read_revision
from builder.series import Series, read_series
from builder.wheel_name import local_version, tag_of, wheel_name

if TYPE_CHECKING:
    from builder.export import Export


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    :param upstream_url: clone upstream from here instead of importing the sdist; None for sdist.
    :param index: the directory index whose staging channel takes the wheel; None to leave it out.
    """

    tag: str
    arch: str = "x86_64"
    mode: Mode = Mode.AUTO
    upstream_url: str | None = None
    out: Path = Path("dist")
    index: Path | None = None
    with_alias: bool = False


@dataclass(frozen=True)
class Built:
    """What a build made."""

    wheel: Path
    sha256: str
    version: str
    choice: ModeChoice
    applied: AppliedSeries
    touched: tuple[TouchedPath, ...]
    audit: Audit
    alias: Path | None
    index: Path | None
    staged: bool


def source_tree(pin: Pin, project: Project, cache: Cache, upstream_url: str | None) -> SourceTree:
    """Return the release as a commit; a clone makes the pin know upstream's full commit id."""
    sdist = fetch(pin, pin.sdist, cache)
    with using_repository(cache):
        if upstream_url is None:
            return from_sdist(pin, sdist, cache)
        tree = from_git(pin, sdist, upstream_url, cache)
    if tree.upstream_commit != pin.commit:
        save(project.pins, replace(pin, commit=tree.upstream_commit), force=True)
    return tree


def applied_series(
    tag: str, project: Project, cache: Cache, upstream_url: str | None = None
) -> tuple[Pin, Series, AppliedSeries]:
    """Run the stages up to the patched commits.

    :raises PatchConflictError, MisplacedHunkError: with the command that stops at the patch.
    """
    pin = load(project.pins, tag)
    series = read_series(project, tag)
    tree = source_tree(pin, project, cache, upstream_url)
    try:
        with using_repository(cache):
            return pin, series, apply_series(tree, series.paths, cache)
    except (PatchConflictError, MisplacedHunkError) as error:
        error.next_step += f"; python -m builder edit --tag {tag} stops at it, and says how"
        raise


def edit_series(
    tag: str, worktree: Path, project: Project, cache: Cache, *, drop: tuple[str, ...] = ()
) -> int:
    """Make the work tree of the series, or go on with one that stopped; return its commits' number.

    :raises PatchConflictError, MisplacedHunkError: it stops at that patch; the error says how to
        go on.
    """
    from builder import edit, stopped_edit  # noqa: PLC0415 - not needed for a build
    from builder.errors import SeriesError  # noqa: PLC0415

    pin = load(project.pins, tag)
    series = read_series(project, tag)
    atomic.clear_up(worktree.absolute().parent)
    if not stopped_edit.is_stopped(worktree):
        if drop:
            raise SeriesError(
                "no edit stopped here: there is nothing to drop",
                where=str(worktree),
                next_step="git rebase -i in the work tree drops a patch that is a commit",
            )
        source = source_tree(pin, project, cache, None)
        try:
            with using_repository(cache):
                applied = apply_series(source, series.paths, cache)
        except (PatchConflictError, MisplacedHunkError):
            stopped_edit.begin(source, series, read_patches(series.paths, cache), worktree)
        else:
            edit.edit(applied, worktree)
            return len(applied.patches)
    return stopped_edit.go_on(worktree, series, Git(cache.repository), cache, drop=drop)


def plan_from_series(tag: str, project: Project, cache: Cache) -> Export:
    """Work out what an export writes where nobody has edited anything."""
    from builder import export  # noqa: PLC0415 - not needed for a build

    _, series, applied = applied_series(tag, project, cache)
    with using_repository(cache):
        return export.plan_export(
            applied.repository, applied.base, applied.head, series, project, cache
        )


def plan_from_worktree(tag: str, worktree: Path, project: Project, cache: Cache) -> Export:
    """Work out what an export of the work tree writes.

    :raises DirtyWorktreeError, SourceMismatchError: what is there is not to be exported.
    """
    from builder import edit, export, stopped_edit  # noqa: PLC0415 - not needed for a build

    git, base, head = edit.exportable(worktree, load(project.pins, tag), cache)
    series = read_series(project, tag)
    stopped_edit.require_finished(worktree, series)
    return export.plan_export(git, base, head, series, project, cache)


def build(request: Request, project: Project, cache: Cache) -> Built:
    """Build, audit and stage the wheel of one release and architecture.

    :raises BuilderError: any stage's own error; nothing half-made is left under a final name.
    """
    pin = load(project.pins, request.tag)
    official_file = pin.wheel(request.arch)
    version = local_version(pin.version, checked_revision(pin, read_series(project, request.tag)))
    if request.mode is Mode.SOURCE:
        _require_compiler(pin)
    pin, series, applied = applied_series(request.tag, project, cache, request.upstream_url)
    touched = touched_paths(applied)
    choice = choose_mode(touched, request.mode)
    if choice.mode is Mode.SOURCE:
        _require_compiler(pin)
    official = fetch(pin, official_file, cache)
    boms = {provenance.SBOM_NAME: provenance.sbom(pin, official_file, applied, version)}
    inputs = WheelInputs(pin, official, applied, touched, version, boms, series.requires_alias)
    cached, tags = _wheel(inputs, choice, cache)
    name = f"{wheel_name(official.name, version).rsplit('-', 3)[0]}-{tags}.whl"
    result = audit(cached, inputs, cache, compiled=choice.mode is Mode.SOURCE)
    # First: nobody finds a wheel that requires an alias without it.
    alias = _alias(version, request) if request.with_alias or series.requires_alias else None
    wheel = _deliver(cached, request.out / name, result.wheel_sha256)
    statement = provenance.statement(
        pin, official_file, applied,
        wheel_name=name, wheel_sha256=result.wheel_sha256, version=version, mode=choice.mode,
    )  # fmt: skip
    atomic.write_bytes(wheel.with_name(f"{name}.provenance.json"), statement)
    stage = request.index is not None and choice.mode is choice.faithful
    if stage and request.index is not None:
        from builder.index import STAGING, Entry, publish_together  # noqa: PLC0415

        unit = [*([Entry(alias)] if alias else []),
                Entry(wheel, {f"{name}.provenance.json": statement})]  # fmt: skip
        publish_together(request.index, unit, channel=STAGING)
    return Built(
        wheel=wheel,
        sha256=result.wheel_sha256,
        version=version,
        choice=choice,
        applied=applied,
        touched=touched,
        audit=result,
        alias=alias,
        index=request.index,
        staged=stage,
    )


def _require_compiler(pin: Pin) -> None:
    from builder.setup_py import require_nvcc  # noqa: PLC0415 - slow to import

    require_nvcc(pin.cuda)


def _wheel(inputs: WheelInputs, choice: ModeChoice, cache: Cache) -> tuple[Path, str]:
    """Return the wheel in the cache and its tags; build it where the cache lacks it."""
    parts = [
        inputs.official.name, inputs.version, str(choice.mode), inputs.applied.head,
        *(f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in inputs.sboms.items()),
        *inputs.own_requirements,
    ]  # fmt: skip
    if choice.mode is Mode.SOURCE:
        from builder.setup_py import COMPILER_VARIABLES  # noqa: PLC0415 - slow to import

        parts += [f"{name}={os.environ.get(name)}" for name in COMPILER_VARIABLES]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    path = cache.wheels / key / wheel_name(inputs.official.name, inputs.version)
    note = path.with_name("built.json")
    with atomic.exclusive(path, path.name):
        if path.exists() and (built := _note(note)):
            if sha256_of(path) == built["sha256"]:
                return path, built["tags"]
            say(f"{path.name}: the cached wheel is damaged; it is built again")
        tags = "-".join(path.name.removesuffix(".whl").split("-")[-3:])
        say(f"build: {choice.mode} ({choice.reason})")
        with atomic.replacing(path) as out:
            if choice.mode is Mode.REPACK:
                repack(inputs, out)
            else:
                from builder import setup_py  # noqa: PLC0415 - slow to import

                if choice.mode is Mode.SETUP_PY:
                    setup_py.setup_py(inputs, out, cache)
                else:
                    tags = setup_py.source(inputs, out, cache)
        atomic.write_text(note, json.dumps({"sha256": sha256_of(path), "tags": tags}))
    return path, tags


def _note(path: Path) -> dict[str, str] | None:
    """Return what was written beside a wheel in the cache when it was complete."""
    try:
        data = json.loads(path.read_text())
        return {"sha256": data["sha256"], "tags": data["tags"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _deliver(cached: Path, target: Path, sha256: str) -> Path:
    """Put the wheel where the user asked for it: a link to the cache, or a copy across disks."""
    if target.exists() and sha256_of(target) == sha256:
        return target
    with atomic.disk_full_is_an_error(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            os.link(cached, target)
            return target
        atomic.copy(cached, target)
    return target


def _alias(version: str, request: Request) -> Path:
    from builder.alias import write_alias  # noqa: PLC0415 - seldom used

    return write_alias(version, request.out)


def verify(wheel: Path, project: Project, cache: Cache) -> tuple[Audit, WheelInputs]:
    """Audit a wheel file against the pin and the series of this checkout, and build it again.

    What counts is that it has the bytes of a build. The audit comes first, since it names the member
    that was changed. Only a wheel that was compiled cannot be made again here: its members have to
    pass the audit, and all around them has to be what the writer makes of these members.

    :raises AuditError: it was built from another state of the series, or it was changed since.
    """
    from zipfile import ZipFile  # noqa: PLC0415

    from builder.wheel_archive import UNREADABLE  # noqa: PLC0415
    from builder.wheel_name import dist_info_name  # noqa: PLC0415

    if not wheel.is_file():
        what = "no file" if wheel.exists() else "no such file"
        raise AuditError(what, where=str(wheel), next_step="give the path of a wheel")
    tag, revision = tag_of(wheel.name)
    pin, series, applied = applied_series(tag, project, cache)
    arch = next((a for a in pin.wheels if wheel.name.endswith(f"{a}.whl")), "x86_64")
    official_file = pin.wheel(arch)
    version = local_version(pin.version, revision)
    expected = [(patch.name, patch.sha256) for patch in applied.patches]
    try:
        with ZipFile(wheel) as archive:
            member = f"{dist_info_name(version)}/sboms/{provenance.SBOM_NAME}"
            facts = provenance.read_sbom(archive.read(member))
    except (*UNREADABLE, TypeError, StopIteration) as error:
        raise AuditError(
            f"no SBOM of this tool in the wheel: {error}",
            where=wheel.name,
            next_step=f"build it again: python -m builder --tag {tag}",
        ) from error
    if list(facts.patches) != expected:
        odd = sorted(set(facts.patches) ^ set(expected))
        raise AuditError(
            "the wheel was built from another state of the series",
            where=wheel.name,
            details=tuple(f"{name} {sha256[:12]}" for name, sha256 in odd),
            next_step="check out the commit that it was built from, or build it again",
        )
    _require_revision(wheel, revision, series)
    boms = {provenance.SBOM_NAME: provenance.sbom(pin, official_file, applied, version)}
    official = fetch(pin, official_file, cache)
    inputs = WheelInputs(
        pin, official, applied, touched_paths(applied), version, boms, series.requires_alias
    )
    choice = choose_mode(inputs.touched, Mode.AUTO)
    if choice.mode is not Mode.SOURCE:  # a build from source gives the tags of its own machine
        _require_name(wheel, wheel_name(official.name, version))
    result = audit(wheel, inputs, cache, compiled=choice.mode is Mode.SOURCE)
    if choice.mode is Mode.SOURCE:
        _require_own_tags(wheel, version)
    _require_bytes(wheel, inputs, choice, cache)
    return result, inputs


def _require_name(wheel: Path, name: str) -> None:
    """Refuse another file name: installers and indexes take version and platform from it."""
    if wheel.name != name:
        raise AuditError(
            f"not the name that the build gives this wheel: {name}",
            where=wheel.name,
            next_step="give it its name back; do not install or publish it under another one",
        )


def _require_own_tags(wheel: Path, version: str) -> None:
    """Refuse a compiled wheel's file name that says more than WHEEL does."""
    from zipfile import ZipFile  # noqa: PLC0415

    from packaging.utils import InvalidWheelFilename, parse_wheel_filename  # noqa: PLC0415

    from builder.wheel_name import dist_info_name  # noqa: PLC0415

    with ZipFile(wheel) as archive:
        lines = archive.read(f"{dist_info_name(version)}/WHEEL").decode().splitlines()
    inside = {line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")}
    try:
        _, _, build, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename:
        build, tags = (), frozenset()
    if build or {str(tag) for tag in tags} != inside:
        raise AuditError(
            f"the file name and WHEEL differ in their tags: {', '.join(sorted(inside))}",
            where=wheel.name,
            next_step="give it its name back; do not install or publish it under another one",
        )


def _require_revision(wheel: Path, revision: int, series: Series) -> None:
    known = read_revision(series)
    if known is None or known.number != revision:
        number = f"revision {known.number}" if known else "without a revision"
        raise AuditError(
            f"the wheel says revision {revision} and the series is {number}",
            where=wheel.name,
            next_step="check out the commit that it was built from, or build it again",
        )


def _require_bytes(wheel: Path, inputs: WheelInputs, choice: ModeChoice, cache: Cache) -> None:
    """Compare with the wheel that a build of this checkout gives."""
    if choice.mode is not Mode.SOURCE:
        _require_same(wheel, _wheel(inputs, choice, cache)[0], inputs.pin.tag)
        return
    from builder.setup_py import rewrite  # noqa: PLC0415 - slow to import

    with atomic.scratch_folder(cache.work) as scratch:
        again = scratch / "again.whl"
        with again.open("wb") as out:
            rewrite(wheel, inputs, out, scratch)
        _require_same(wheel, again, inputs.pin.tag)


def _require_same(wheel: Path, again: Path, tag: str) -> None:
    from builder.wheel_bytes import first_difference  # noqa: PLC0415

    if sha256_of(wheel) != sha256_of(again):
        raise AuditError(
            f"its bytes are not those of a build: {first_difference(wheel, again)}",
            where=wheel.name,
            next_step=f"python -m builder --tag {tag}, from a clean checkout; do not publish this file",
        )
