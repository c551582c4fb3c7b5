"""Results as a person reads them, and as JSON."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict

from builder import revision
from builder.apply import AppliedSeries
from builder.audit import Audit
from builder.classify import Kind, TouchedPath
from builder.errors import RevisionError
from builder.locations import DISTRIBUTION
from builder.patchfile import Patch
from builder.pin import Pin
from builder.pipeline import Built
from builder.series import Series
from builder.words import counted


def _install_lines(built: Built) -> tuple[str, ...]:
    if not built.staged or built.index is None:
        wheels = shlex.join(map(str, filter(None, (built.wheel, built.alias))))
        return (f"pip install {wheels}", f"uv pip install {wheels}")
    from builder.install_lines import install_lines  # noqa: PLC0415 - asks pip

    staging = (built.index / "staging").as_uri()
    return install_lines(staging, built.version, with_alias=built.alias is not None)


def built_as_text(built: Built) -> str:
    """Return the last lines of a build: what was built, what it changes, how to install it."""
    size = built.wheel.stat().st_size / 1e6
    lines = [
        "",
        f"built    {built.wheel} ({size:.1f} MB)",
        f"sha256   {built.sha256}",
        f"mode     {built.choice.mode}: {built.choice.reason}",
    ]
    if built.alias is not None:
        lines.append(f"alias    {built.alias}")
    lines += ["", series_table(built.applied, built.touched), "", audit_summary(built.audit), ""]
    if built.staged:
        lines.append(f"staged   {built.index}/staging/simple/")
    elif built.index is not None:
        lines.append(
            f"staged   no: --mode {built.choice.mode} is a cross-check, only the output of "
            f"{built.choice.faithful} is staged"
        )
    lines += ["install it with either of", *(f"  {line}" for line in _install_lines(built))]
    return "\n".join(lines)


def built_as_json(built: Built) -> str:
    data = {
        "wheel": str(built.wheel),
        "sha256": built.sha256,
        "version": built.version,
        "mode": str(built.choice.mode),
        "reason": built.choice.reason,
        "alias": str(built.alias) if built.alias else None,
        "staged": built.staged,
        "index": str(built.index) if built.index else None,
        "patches": [asdict(patch) for patch in built.applied.patches],
        "touched": [asdict(item) for item in built.touched],
        "audit": asdict(built.audit),
        "install": list(_install_lines(built)),
    }
    return json.dumps(data, indent=1)


def series_table(applied: AppliedSeries, touched: tuple[TouchedPath, ...]) -> str:
    """Say for each patch what it changes, and which of its hunks had to move."""
    lines = [f"series   {counted(len(applied.patches), 'patch', 'patches')} on {applied.tag}"]
    for patch in applied.patches:
        mine = [item for item in touched if patch.name in item.patches]
        ships = [item.path for item in mine if item.kind is not Kind.NEVER]
        rest = len(mine) - len(ships)
        lines.append(f"  {patch.name}")
        lines += [f"    {path}" for path in ships]
        if rest:
            lines.append(f"    and {counted(rest, 'file')} of tests and docs, never shipped")
        lines += [
            f"    moved: {hunk.path} hunk {hunk.number} by {hunk.offset:+d} lines, still in "
            f"{hunk.scope or 'the module level'}"
            for hunk in patch.moved
        ]
    return "\n".join(lines)


def audit_summary(audit: Audit) -> str:
    return (
        f"audit    {audit.members} members, every RECORD hash recomputed; {audit.identical} are "
        f"upstream's ({audit.compiled} compiled), {len(audit.differences)} differ, all explained"
    )


def audit_table(audit: Audit) -> str:
    """Return which patches explain which members: below their names, as both are long."""
    lines = [audit_summary(audit)]
    for causes in sorted({item.explained_by for item in audit.differences}):
        lines += ["", *(f"  {cause}" for cause in causes)]
        mine = (item for item in audit.differences if item.explained_by == causes)
        lines += [f"    {item.change:8} {item.member}" for item in mine]
    return "\n".join(lines)


def audit_as_json(audit: Audit) -> str:
    return json.dumps(asdict(audit), indent=1)


def alias_verified(version: str, sha256: str, *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"alias_for": version, "sha256": sha256}, indent=1)
    return f"alias    stands for {DISTRIBUTION} {version}; every byte is as this tool writes it"


def series_listing(
    pin: Pin,
    series: Series,
    patches: tuple[Patch, ...],
    applied: AppliedSeries,
    *,
    as_json: bool,
) -> str:
    """List the patches: subject, size, files, trailers, and how each applies."""
    try:
        state = f"+glm5.{revision.checked_revision(pin, series)}"
    except RevisionError as error:
        state = error.what
    rows = []
    for entry, patch, commit in zip(series.entries, patches, applied.patches, strict=True):
        rows.append(
            {
                "line": entry.line,
                "subject": patch.subject,
                "bytes": patch.size,
                "sha256": patch.sha256,
                "added": sum(change.added for change in patch.changes),
                "removed": sum(change.removed for change in patch.changes),
                "files": [change.path for change in patch.changes],
                "trailers": dict(patch.trailers),
                "state": "moved" if commit.moved else "clean",
                "commit": commit.commit,
            }
        )
    if as_json:
        return json.dumps({"tag": series.tag, "revision": state, "patches": rows}, indent=1)
    lines = [f"{series.tag} {state}: {counted(len(rows), 'patch', 'patches')}"]
    for row in rows:
        trailers = row["trailers"]
        files = row["files"]
        assert isinstance(trailers, dict)  # noqa: S101 - built above
        assert isinstance(files, list)  # noqa: S101
        lines += [
            f"{row['line']}  [{row['state']}]",
            f"  {row['subject']}",
            f"  {row['bytes']} bytes, +{row['added']} -{row['removed']} in {counted(len(files), 'file')}: "
            + ", ".join(files[:4])
            + (" ..." if len(files) > 4 else ""),
        ]
        lines += [f"  {key}: {value}" for key, value in trailers.items()]
    return "\n".join(lines)
