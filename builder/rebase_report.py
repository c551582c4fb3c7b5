"""What a rebase tells: at a stop, the conflict and what upstream did; at the end, a Markdown report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from builder import atomic, placement
from builder.contracts import Breach
from builder.diff import FileChange
from builder.imports import MissingImport
from builder.patchfile import Patch
from builder.rebase_state import DROPPED, RESOLVED, Done, RebaseState, Review
from builder.try_series import FileTrial, PatchTrial, Release, State
from builder.words import counted

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? .*?(?=^@@ |\Z)", re.MULTILINE | re.DOTALL)
_NEAR = 12  # lines between a hunk of ours and one of upstream's that are shown together
_SHOWN = 60  # lines of one text at a stop; the whole stands in a file beside the work tree
_SURROUNDINGS = 4


def purpose(patch: Patch) -> str:
    """Return the first paragraph of the message: what the patch is for."""
    return " ".join(patch.body.partition("\n\n")[0].split())


def review_of(trial: PatchTrial) -> tuple[Review, ...]:
    """Return the hunks that a person should look at: placed by 3-way, or in a changed function."""
    found = []
    for file in trial.files:
        lines = placement.split_lines(file.result or b"")
        for hunk in file.hunks:
            if file.state is not State.MERGED and not hunk.around:
                continue
            first = max(hunk.line - 1 - _SURROUNDINGS, 0)
            text = "".join(lines[first : hunk.line + 2 * _SURROUNDINGS])
            found.append(
                Review(file.path, hunk.line, hunk.offset, hunk.scope, hunk.around,
                       text.encode("utf-8", "replace").decode())
            )  # fmt: skip
    return tuple(found)


def stop_details(release: Release, trial: PatchTrial, folder: Path) -> tuple[str, ...]:
    """Return what a person needs: the purpose, each conflicting hunk, upstream's own changes.

    The whole of upstream's change to each file is written to ``folder/upstream/``.
    """
    verdict = trial.verdict
    lines = [
        f"purpose: {purpose(trial.patch)}",
        f"upstream has it: {verdict.extent} ({verdict.reason})",
    ]
    for file, change in zip(trial.files, trial.patch.changes, strict=True):
        if file.state.applies or trial.state is State.UPSTREAMED:
            continue
        lines += ["", f"{file.path}: {file.state}: {file.reason}"]
        shown = "".join(file.conflicts) or _hunks(change)
        lines += _cut(shown.splitlines())
        lines += _upstreams(release, change, file, folder)
    for file, change in zip(trial.files, trial.patch.changes, strict=True):
        if file not in trial.staged:
            continue
        around = list(dict.fromkeys(hunk.around for hunk in file.hunks if hunk.around))
        if around:  # it has no conflict, and may be wrong all the same: nobody else points at it
            lines += ["", f"{file.path}: {file.state}, staged: look whether it is right still"]
            lines += [f"  {text}" for text in around]
            lines += _upstreams(release, change, file, folder)
    return tuple(_printable(line) for line in lines)


def _printable(line: str) -> str:
    return line.encode("utf-8", "replace").decode()


def _hunks(change: FileChange) -> str:
    return "".join(
        f"@@ -{hunk.old_start} @@ {hunk.heading}\n" + "".join(hunk.lines)
        for hunk in change.hunks
        if change.old_path is not None
    )


def _cut(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"... {more} more lines"] if more > 0 else [])]


def _upstreams(release: Release, change: FileChange, file: FileTrial, folder: Path) -> list[str]:
    """Return what upstream did near our hunks, and where the whole of it stands."""
    if change.old_path is None:
        return []
    raw = release.objects.repository.run(
        "diff", "--no-color", "--no-ext-diff", "--find-renames", release.old, release.new, "--",
        *{change.old_path, file.path},
    )  # fmt: skip
    if not raw:
        return ["upstream did not touch this file: an earlier patch of the series did"]
    target = folder / "upstream" / f"{file.path.replace('/', '__')}.diff"
    atomic.write_bytes(target, raw)
    text = raw.decode("utf-8", "surrogateescape")
    ours = [(h.old_start - _NEAR, h.old_start + h.old_length + _NEAR) for h in change.hunks]
    near = []
    for match in _HUNK.finditer(text):
        first, size = int(match[1]), int(match[2] or 1)
        if any(first <= last and begin <= first + size for begin, last in ours):
            near += match[0].splitlines()
    said = f"upstream's changes to it, {release.labels[0]} to {release.labels[1]} (all: {target}):"
    return [said, *_cut(near or ["none of them near our hunks"])]


def final_report(
    state: RebaseState,
    lines: dict[str, str],
    range_diff: str,
    breaches: Sequence[Breach],
    missing: Sequence[MissingImport],
    left: Sequence[str],
) -> str:
    """Return the report for a pull request.

    :param lines: each line of the old series that stays, and its line in the new one.
    """
    count = {word: sum(d.outcome == word for d in state.done) for word in _outcomes(state.done)}
    out = [
        f"# {state.from_tag} to {state.onto}",
        "",
        f"{counted(len(state.done), 'patch', 'patches')}: "
        + ", ".join(f"{n} {word}" for word, n in count.items()),
        "",
        "| patch | outcome | why |",
        "| --- | --- | --- |",
    ]
    for done in state.done:
        new = lines.get(done.line)
        name = done.line if new in (None, done.line) else f"{done.line}, now {new}"
        out.append(f"| {name} | {done.outcome} | {_cell(done.reason)} |")
    out += ["", *_reviews(state.done)]
    if missing:
        out += ["## Imports that fail", "", *(f"- {item}" for item in missing), ""]
    if breaches:
        out += ["## What the series leans on has changed", "", "```diff"]
        out += [line for breach in breaches for line in breach.lines()] + ["```", ""]
    out += ["## Old series against new", "", "```", range_diff.rstrip("\n"), "```", ""]
    out += ["## Left to run", "", *(f"- `{command}`" for command in left), ""]
    return "\n".join(out)


def _outcomes(done: Sequence[Done]) -> list[str]:
    known = [*map(str, State), RESOLVED, DROPPED]
    return sorted({d.outcome for d in done}, key=known.index)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _reviews(done: Sequence[Done]) -> list[str]:
    reviews = [(d, review) for d in done for review in d.review]
    by_hand = [d for d in done if d.outcome == RESOLVED]
    if not reviews and not by_hand:
        return []
    out = [
        "## To review",
        "",
        "Placed by 3-way and verified, or in a function that upstream changed.",
    ]
    for d in by_hand:
        out += ["", f"- {d.line}: resolved by hand ({_cell(d.reason)})"]
    for d, review in reviews:
        where = f"`{review.path}` line {review.line} ({review.offset:+d})"
        scope = f", in `{review.scope}`" if review.scope else ""
        around = f": {review.around}" if review.around else ""
        out += ["", f"{d.line}: {where}{scope}{around}", ""]
        out += ["    " + line for line in review.text.splitlines()]
    return [*out, ""]
