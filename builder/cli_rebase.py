"""The commands that follow upstream: upstream, rebase, backport."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from builder.words import counted

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Onto = Annotated[str | None, typer.Option("--onto", help="The release to move to.")]


def upstream(
    tag: Annotated[
        str | None, typer.Option("--tag", help="The series to try (default: the newest).")
    ] = None,
    onto: Annotated[
        list[str] | None,
        typer.Option("--onto", help="Try this release; may be repeated (default: newer ones)."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Every release newer than this (default: the newest pin)."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Also write a page to read at a glance.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Also write the table for the docs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List upstream's newer releases, and how each patch fares on each."""
    from builder import atomic, releases, series, trial_report  # noqa: PLC0415 - keeps --help quick
    from builder.cli import State  # noqa: PLC0415
    from builder.errors import UnknownTagError  # noqa: PLC0415
    from builder.upstream import try_on  # noqa: PLC0415

    State.as_json = as_json
    known = series.series_tags(State.project)
    if tag is None and not known:
        raise UnknownTagError(
            "there is no series", where=str(State.project.patches),
            next_step="begin one in patches/TAG/series",
        )  # fmt: skip
    tag = tag or known[-1]
    tags = list(onto or ())
    if not tags:
        since = since or releases.newest_pin(State.project)
        tags = releases.newer_than(since, releases.released_tags())
    found = list(try_on(tag, tags, State.project, State.used_cache()))
    tried = [one for one in found if isinstance(one, trial_report.ReleaseTrials)]
    untried = [one for one in found if isinstance(one, trial_report.Untried)]
    if untried and (onto or not tried):
        raise untried[0].error
    if page is not None:
        atomic.write_text(page.absolute(), trial_report.as_html(tag, tried, untried))
    if markdown is not None:
        words = ["python", "-m", "builder", "upstream", "--tag", tag]
        words += ["--since", since] if since else [w for o in tags for w in ("--onto", o)]
        words += ["--markdown", str(markdown)]
        atomic.write_text(
            markdown.absolute(), trial_report.as_markdown(tag, tried, shlex.join(words), untried)
        )
    if as_json:
        typer.echo(trial_report.as_json(tag, tried, untried))
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        table = trial_report.as_text(tag, tried, columns, untried, known, since)
        typer.echo(State.advice(table))


def rebase(
    from_tag: Annotated[
        str | None, typer.Option("--from", help="The release whose series moves.")
    ] = None,
    onto: Onto = None,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Take what was resolved, and go on.")
    ] = False,
    abort: Annotated[bool, typer.Option("--abort", help="End it; patches/ is untouched.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show where it stands.")] = False,
    drop: Annotated[
        list[int] | None,
        typer.Option("--drop", help="Leave out the patch of this number; may be repeated."),
    ] = None,
    auto_drop: Annotated[
        bool, typer.Option("--auto-drop", help="Leave out every patch that upstream has.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Move a series to another release; stop only where a person has to look."""
    from builder import rebase as rebasing  # noqa: PLC0415
    from builder.cli import State  # noqa: PLC0415

    State.as_json = as_json
    if (from_tag is not None) + go_on + abort + status != 1:
        raise typer.BadParameter("give one of --from TAG --onto TAG, --continue, --abort, --status")
    if status:
        said = _status(as_json=as_json)
        typer.echo(said if as_json else State.advice(said))
        return
    if abort:
        typer.echo(rebasing.abort(State.project, onto))
        return
    if go_on:
        done = rebasing.go_on(
            State.project, State.used_cache(), onto, drop=tuple(drop or ()), auto_drop=auto_drop
        )
    else:
        if onto is None or from_tag is None:
            raise typer.BadParameter("--from TAG wants --onto TAG")
        done = rebasing.begin(
            State.project,
            State.used_cache(),
            from_tag,
            onto,
            drop=tuple(drop or ()),
            auto_drop=auto_drop,
        )
    done = replace(done, left=tuple(State.advice(command) for command in done.left))
    if as_json:
        typer.echo(json.dumps(asdict(done), indent=1, default=str))
        return
    for item in done.done:
        typer.echo(f"{item.outcome:16} {item.line}" + (f": {item.reason}" if item.reason else ""))
    reviews = sum(len(item.review) for item in done.done)
    typer.echo(
        f"\nseries   {done.folder}\nreport   {done.report} ({counted(reviews, 'hunk')} to review)"
    )
    for missing in done.missing:
        typer.echo(f"import that fails: {missing}")
    for breach in done.breaches:
        typer.echo("\n".join(breach.lines()))
    typer.echo("left to run\n" + "\n".join(f"  {command}" for command in done.left))


def _status(*, as_json: bool) -> str:
    from builder import rebase as rebasing  # noqa: PLC0415
    from builder import rebase_state, rebase_tree  # noqa: PLC0415
    from builder.cli import State  # noqa: PLC0415
    from builder.repository import Git  # noqa: PLC0415

    found = [
        state
        for tag in rebase_state.under_way(State.project)
        if (state := rebase_state.load(State.project, tag)) is not None
    ]
    if as_json:
        return json.dumps([asdict(state) for state in found], indent=1)
    lines = [] if found else ["no rebase is under way"]
    for state in found:
        lines.append(f"{state.from_tag} to {state.onto}: {len(state.done)} of "
                     f"{len(state.patches)} patches are through")  # fmt: skip
        lines += [f"  {done.outcome:16} {done.line}" for done in state.done]
        if state.stop is None or not state.stop.is_laid:
            lines.append("  it was interrupted; next: python -m builder rebase --continue "
                         f"--onto {state.onto}")  # fmt: skip
            continue
        folder = rebase_state.folder_of(State.project, state.onto) / "tree"
        if not folder.exists():
            lines.append(f"  {folder} is gone; it is made again, without what was resolved in it, "
                         f"by: python -m builder rebase --continue --onto {state.onto}")  # fmt: skip
        elif rebase_tree.is_resolved(Git(folder), state.stop):
            lines.append(f"  {state.stop.line} is resolved; next: python -m builder rebase "
                         f"--continue --onto {state.onto}")  # fmt: skip
        else:
            lines.append(str(rebasing.stopped_error(State.project, state)))
    return "\n".join(lines)


def backport(
    number: Annotated[int, typer.Argument(help="The number that the patch's name begins with.")],
    to: Annotated[
        list[str] | None,
        typer.Option("--to", help="A release; may be repeated (default: every other series)."),
    ] = None,
    from_tag: Annotated[
        str | None, typer.Option("--from", help="The series to take it from (default: the newest).")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only try; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Carry a patch to the series of other releases; each is tried."""
    from builder import backport as backporting  # noqa: PLC0415
    from builder.cli import State  # noqa: PLC0415
    from builder.errors import RebaseStoppedError  # noqa: PLC0415

    State.as_json = as_json
    found = backporting.backport(
        number, to or (), State.project, State.used_cache(), from_tag=from_tag, check=check
    )
    bad = [one for one in found if not one.is_good]
    if as_json and not bad:
        typer.echo(json.dumps([asdict(one) for one in found], indent=1))
        return
    lines = []
    for one in found:
        lines.append(f"{one.tag:10} {one.state}" + (f": {one.reason}" if one.reason else ""))
        lines += [f"  {'would write' if check else 'written'} {line}" for line in one.written]
        if one.needs_revision:
            lines.append(f"  next: python -m builder revision --tag {one.tag} --raise")
    if bad:
        raise RebaseStoppedError(
            f"patch {number:04d} of {bad[0].source} wants a person on "
            f"{', '.join(one.tag for one in bad)}; nothing "
            "was written for " + ("it" if len(bad) == 1 else "them"),
            details=tuple(lines),
            next_step=f"python -m builder edit --tag {bad[0].tag}, make the change there, export; or "
            "take it from a nearer release: --from TAG",
        )
    typer.echo(State.advice("\n".join(lines)) or "there is no other series")


def contracts(
    tag: Annotated[str, typer.Option("--tag", help="The series.")],
    on: Annotated[
        str | None, typer.Option("--on", help="Compare with this release (default: its own).")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Accept what the definitions are now.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare what a series leans on in upstream's code with a release."""
    from builder import contracts as checking  # noqa: PLC0415
    from builder import pin, pipeline, releases, series  # noqa: PLC0415
    from builder.cli import State  # noqa: PLC0415
    from builder.rebase_finish import imports_of  # noqa: PLC0415

    State.as_json = as_json
    on = None if on == tag else on
    has_series = (
        on is not None
        and on in series.series_tags(State.project)
        and bool(series.read_series(State.project, on).entries)
    )
    if write and on is not None:
        raise typer.BadParameter(
            "--write takes the definitions of the series' own release; those of another one "
            + (
                f"are written into its own series: contracts --tag {on} --write"
                if has_series
                else "move by rebase --from TAG --onto RELEASE"
            )
        )
    found = series.read_series(State.project, tag)
    missing: tuple[object, ...] = ()
    if on is None and not write:
        _, _, applied = pipeline.applied_series(tag, State.project, State.used_cache())
        missing = imports_of(applied.repository, applied.base, applied.head)
    pinned = releases.pin_of(on or tag, State.project, State.used_cache())
    source = pipeline.source_tree(pinned, State.project, State.used_cache(), None)
    known = checking.read_contracts(found)

    def read(path: str) -> bytes | None:
        return source.repository.blob(f"{source.commit}:{path}")

    if write:
        typer.echo(f"written {checking.write_contracts(found, known, read)}")
        return
    broken = checking.breaches(known, read)
    checking.require_kept(
        broken, [str(item) for item in missing], found, on, has_series=has_series,
        is_pinned=pinned.tag in pin.pinned_tags(State.project.pins),
    )  # fmt: skip
    typer.echo(
        f"{tag}: {counted(len(known), 'definition')} of upstream's as they were on {pinned.tag}"
    )


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    for command in (upstream, rebase, backport, contracts):
        app.command(command.__name__)(command)
