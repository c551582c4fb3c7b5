"""How the patches of a series fare on releases: for a terminal, a program, a page, the docs."""

from __future__ import annotations

import html
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from builder.contracts import Breach
from builder.errors import BuilderError
from builder.imports import MissingImport
from builder.rebase_state import number_of
from builder.try_series import FileTrial, PatchTrial, State

MEANING = {
    State.CLEAN: "every hunk stands at its line, the functions around them unchanged",
    State.MOVED: "applies strictly, at another line or in a function that upstream changed",
    State.MERGED: "placed by 3-way; each change verified to stand in the function it means",
    State.UPSTREAMED: "upstream has it: drop it",
    State.MISPLACED: "a merge would put a hunk where the patch does not mean it: a person has to look",
    State.CONFLICT: "a person has to resolve it",
}
_CELL = len("upstreamed!")  # the longest word of a cell, and a space
FAILS = "it applies, and imports what this release does not have"
_COLOUR = {
    State.CLEAN: "#c8ecd0",
    State.MOVED: "#e2f3d3",
    State.MERGED: "#fdf3c4",
    State.UPSTREAMED: "#cfe3fa",
    State.MISPLACED: "#f6cfe8",
    State.CONFLICT: "#f8d0c8",
}


@dataclass(frozen=True)
class ReleaseTrials:
    """One release and the patches tried on it, in order; ``seconds`` without the import.

    :param breaches: what the series leans on and is another thing there.
    :param missing: imports of the patches that apply, which the release cannot satisfy.
    """

    tag: str
    trials: tuple[PatchTrial, ...]
    breaches: tuple[Breach, ...]
    missing: tuple[MissingImport, ...]
    seconds: float

    def word(self, trial: PatchTrial) -> str:
        """Return the patch's state, with a "!" where it applies and imports what is not there."""
        paths = {item.path for item in self.missing} if trial.state.applies else set()
        return f"{trial.state}{'!' if paths & trial.changes.keys() else ''}"


@dataclass(frozen=True)
class Untried:
    """A release that cannot be had: half published, withdrawn, made in a new way, out of reach."""

    tag: str
    error: BuilderError

    def __str__(self) -> str:
        where = f"{self.error.where}: " if self.error.where else ""
        return f"{self.tag} was not tried: {where}{self.error.what}"


def as_json(series: str, releases: Sequence[ReleaseTrials], untried: Sequence[Untried] = ()) -> str:
    """Return everything that was found out."""
    data = {
        "series": series,
        "releases": [
            {
                "tag": release.tag,
                "seconds": round(release.seconds, 2),
                "patches": [_facts(trial) for trial in release.trials],
                "imports": [vars(item) for item in release.missing],
                "contracts": [
                    {
                        "path": b.contract.path,
                        "name": b.contract.name,
                        "patch": b.contract.patch,
                        "gone": b.gone,
                        "came": list(b.came),
                        "went": list(b.went),
                    }
                    for b in release.breaches
                ],
            }
            for release in releases
        ],
        "untried": [{"tag": one.tag, **one.error.as_dict()} for one in untried],
    }
    return json.dumps(data, indent=1)


def _facts(trial: PatchTrial) -> dict[str, object]:
    return {
        "patch": trial.line,
        "subject": trial.patch.subject,
        "state": trial.state,
        "reason": trial.reason,
        "after": list(trial.after),
        "upstream": {
            "extent": trial.verdict.extent,
            "reason": trial.verdict.reason,
            "there": list(trial.verdict.there),
            "missing": list(trial.verdict.missing) if trial.verdict.there else [],
        },
        "files": [
            {
                "path": file.path,
                "state": file.state,
                "reason": file.reason,
                "hunks": [vars(hunk) for hunk in file.hunks],
                "conflicts": [text.encode("utf-8", "replace").decode() for text in file.conflicts],
            }
            for file in trial.files
        ],
    }


def as_text(
    series: str,
    releases: Sequence[ReleaseTrials],
    columns: int | None = None,
    untried: Sequence[Untried] = (),
    followed: Collection[str] = (),
    since: str | None = None,
) -> str:
    """Return a table, a release a line, and below it why what wants a person does.

    :param columns: of the terminal; a table that is wider comes in parts.
    :param followed: releases that have a series by now, and want none.
    :param since: the release after which they were looked for; None where they were named.
    """
    if not releases:
        said = f"upstream has no release newer than {since or series}"
        if since in (None, series):
            return said
        again = f"python -m builder upstream --tag {series} --since {series}"
        return f"{said}; {series} on all after its own: {again}"
    lines = _table(releases, columns)
    if any(r.word(trial).endswith("!") for r in releases for trial in r.trials):
        lines += ["", f"!: {FAILS}"]
    lines += ["", *(f"{t.line}: {t.patch.subject}" for t in releases[0].trials)]
    for release in releases:
        lines += ["", release.tag]
        for trial in release.trials:
            why = _why(trial)
            if why:
                lines.append(f"  {number_of(trial.line):04d} {trial.state}")
                lines += [f"    {line}" for line in why]
        if release.breaches:
            lines.append(f"  contracts: {_named(release)}")
        lines += [f"  import: {item}" for item in release.missing]
    lines += [line for one in untried for line in ("", str(one))]
    if rest := [release.tag for release in releases if release.tag not in followed]:
        follow = f"python -m builder rebase --from {series} --onto {rest[-1]}"
        lines += ["", f"next: python -m builder pin {rest[-1]} && {follow}"]
    return "\n".join(lines)


def _table(releases: Sequence[ReleaseTrials], columns: int | None) -> list[str]:
    patches = len(releases[0].trials)
    width = max(len(release.tag) for release in releases)
    rows = [["", *(f"{number_of(t.line):04d}" for t in releases[0].trials), ""]]
    rows += [[r.tag, *(r.word(t) for t in r.trials), f"{r.seconds:.1f} s"] for r in releases]
    at_once = patches + 1 if columns is None else max(1, (columns - width - 2) // _CELL)
    lines = []
    for first in range(1, patches + 2, at_once):
        cells = slice(first, first + at_once)
        part = ["".join(f"{cell:{_CELL}}" for cell in row[cells]) for row in rows]
        if any(text.strip() for text in part):
            tags = (f"{row[0]:{width}}  " for row in rows)
            lines += ["", *(f"{tag}{text}".rstrip() for tag, text in zip(tags, part, strict=True))]
    return lines[1:]


def _named(release: ReleaseTrials) -> str:
    """Name the definitions of upstream's that are not what the series was written for."""
    words = [b.contract.name + (" is gone" if b.gone else " changed") for b in release.breaches]
    return ", ".join(words)


def _why(trial: PatchTrial) -> list[str]:
    if trial.state is State.CLEAN:
        return []
    lines = [trial.reason] if trial.verdict.there or trial.state is State.UPSTREAMED else []
    if trial.state is not State.UPSTREAMED:
        lines += [_file_line(file) for file in trial.files if _file_line(file)]
    if trial.after:
        lines.append(f"without {', '.join(trial.after)}, which has to be resolved first")
    return lines


def _file_line(file: FileTrial) -> str:
    notes = [note for note in (file.reason, *sorted({h.around for h in file.hunks})) if note]
    if file.state is State.CLEAN or (file.state is State.MOVED and not notes):
        return ""
    return f"{file.state}: {file.path}" + (f": {'; '.join(notes)}" if notes else "")


def as_markdown(
    series: str,
    releases: Sequence[ReleaseTrials],
    command: str,
    untried: Sequence[Untried] = (),
) -> str:
    """Return the page for ``docs/``: the same bytes each time from the same inputs."""
    trials = releases[0].trials if releases else ()
    out = [
        f"# The series {series} on upstream's later releases",
        "",
        f"Made by `{command}`; do not edit. Each patch is tried on each release, in order, with what",
        "applied of those before it.",
        "",
        "| release | " + " | ".join(f"{number_of(t.line):04d}" for t in trials) + " |",
        "| --- |" + " --- |" * len(trials),
    ]
    out += [
        f"| {release.tag} | " + " | ".join(release.word(t) for t in release.trials) + " |"
        for release in releases
    ]
    out += ["", *(f"- {state}: {meaning}" for state, meaning in MEANING.items())]
    out += [f"- !: {FAILS}", ""]
    out += [f"- `{t.line}`: {t.patch.subject}" for t in trials]
    for release in releases:
        out += ["", f"## {release.tag}"]
        for trial in release.trials:
            if why := _why(trial):
                out += ["", f"**{number_of(trial.line):04d} {trial.state}**", ""]
                out += [f"- {line}" for line in why]
        if release.breaches:
            out += ["", f"Contracts: {_named(release)}."]
        if release.missing:
            out += ["", "Imports that fail:", "", *(f"- {item}" for item in release.missing)]
    out += [line for one in untried for line in ("", f"{one}.")]
    return "\n".join(out) + "\n"


def as_html(series: str, releases: Sequence[ReleaseTrials], untried: Sequence[Untried] = ()) -> str:
    """Return a page of its own, no script, no other file: a coloured table and what is behind it."""

    def text(value: object) -> str:
        return html.escape(str(value))

    trials = releases[0].trials if releases else ()
    head = "".join(
        f'<th title="{text(t.patch.subject)}">{number_of(t.line):04d}</th>' for t in trials
    )
    rows = []
    for release in releases:
        cells = "".join(
            f'<td style="background:{_COLOUR[t.state]}"><a href="#{text(release.tag)}-'
            f'{number_of(t.line):04d}">{text(release.word(t))}</a></td>'
            for t in release.trials
        )
        rows.append(f"<tr><th>{text(release.tag)}</th>{cells}</tr>")
    legend = "".join(
        f'<li><span style="background:{_COLOUR[state]}">{text(state)}</span> {text(meaning)}</li>'
        for state, meaning in MEANING.items()
    )
    legend += f"<li><span>!</span> {text(FAILS)}</li>"
    behind = [f"<p>{text(one)}</p>" for one in untried]
    for release in releases:
        behind.append(f"<h2>{text(release.tag)}</h2>")
        if release.breaches:
            lines = "\n".join(line for breach in release.breaches for line in breach.lines())
            behind.append(f"<details><summary>contracts: {text(_named(release))}</summary>"
                          f"<pre>{text(lines)}</pre></details>")  # fmt: skip
        behind += [f"<p>import: {text(item)}</p>" for item in release.missing]
        for trial in release.trials:
            anchor = f"{release.tag}-{number_of(trial.line):04d}"
            why = "".join(f"<li>{text(line)}</li>" for line in _why(trial))
            conflicts = "".join(
                f"<pre>{text(c)}</pre>" for file in trial.files for c in file.conflicts
            )
            behind.append(
                f'<h3 id="{text(anchor)}"><span style="background:{_COLOUR[trial.state]}">'
                f"{text(trial.state)}</span> {text(trial.line)}</h3><p>{text(trial.patch.subject)}"
                f"</p><ul>{why}</ul>"
                + (
                    f"<details><summary>conflicts</summary>{conflicts}</details>"
                    if conflicts
                    else ""
                )
            )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{text(series)} on later releases</title><style>body{{font:15px sans-serif;"
        "margin:2em;max-width:75em}table{border-collapse:collapse}td,th{border:1px solid #bbb;"
        "padding:.3em .6em}td a{color:inherit;text-decoration:none}span{padding:.1em .4em}"
        "pre{background:#f4f4f4;padding:.6em;overflow:auto}</style>"
        f"<h1>{text(series)} on later releases</h1><table><tr><th></th>{head}</tr>{''.join(rows)}"
        f"</table><ul>{legend}</ul>{''.join(behind)}</html>\n"
    )
