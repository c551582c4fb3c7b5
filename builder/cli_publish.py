"""The commands that release a wheel: publish, promote, yank."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from builder.publish import Outcome

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Reports = Annotated[
    list[Path] | None,
    typer.Option("--report", help="GPU report of the wheel; its signature lies beside as .sig."),
]
Index = Annotated[
    str, typer.Option("--index", help="Folder of a directory index, or the URL of a server.")
]


def publish(
    wheel: Annotated[Path, typer.Argument(help="A wheel that this tool built.")],
    index: Index,
    report: Reports = None,
    channel: Annotated[
        str | None,
        typer.Option(help="Default: stable; of a devpi index, the one that its name says."),
    ] = None,
    require_metadata: Annotated[
        bool,
        typer.Option("--require-metadata", help="Refuse a server without PEP 658 metadata."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Put a tested wheel into an index that users install from.

    Credentials come from TWINE_USERNAME and TWINE_PASSWORD, ~/.netrc, or the keyring.
    """
    from builder import publish as stage  # noqa: PLC0415 - keeps --help quick
    from builder.cli import State  # noqa: PLC0415

    State.as_json = as_json

    request = stage.Request(
        wheel=wheel,
        index=index,
        reports=tuple(report or ()),
        channel=channel,
        require_metadata=require_metadata,
    )
    _print(stage.publish(request, State.project, datetime.now(UTC)), as_json=as_json)


def promote(
    what: Annotated[str, typer.Argument(help="A version, or the file name of a wheel.")],
    index: Index,
    report: Reports = None,
    source: Annotated[str, typer.Option("--from", help="The channel that has it.")] = "staging",
    target: Annotated[
        str, typer.Option("--to", help="The channel that takes it; on devpi NAME or USER/NAME.")
    ] = "stable",
    as_json: Json = False,
) -> None:
    """Put what one channel has into another one, after the same checks as publish."""
    from builder import channels  # noqa: PLC0415 - keeps --help quick
    from builder.cli import State  # noqa: PLC0415

    State.as_json = as_json
    promotion = channels.Promotion(what, index, tuple(report or ()), source, target)
    outcome = channels.promote(promotion, State.project, State.used_cache(), datetime.now(UTC))
    _print(outcome, as_json=as_json)


def yank(
    what: Annotated[str, typer.Argument(help="A version, or the file name of a wheel.")],
    index: Index,
    reason: Annotated[str | None, typer.Option(help="Shown to those who install it.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Offer it again.")] = False,
    channel: Annotated[str, typer.Option(help="The channel that lists it.")] = "stable",
    as_json: Json = False,
) -> None:
    """Keep installers from a version unless it is pinned exactly (PEP 592)."""
    from builder import channels  # noqa: PLC0415 - keeps --help quick
    from builder.cli import State  # noqa: PLC0415

    State.as_json = as_json
    if undo == bool(reason and reason.strip()):
        raise typer.BadParameter("give --reason TEXT, or --undo")
    text = None if reason is None else " ".join(reason.split())
    wheels = channels.yank(index, channel, what, text)
    if as_json:
        files = [{"name": w.path.name, "sha256": w.sha256, "yanked": w.yanked} for w in wheels]
        typer.echo(json.dumps({"channel": channel, "files": files}, indent=1))
        return
    for wheel in wheels:
        state = "offered again" if wheel.yanked is None else f"yanked: {wheel.yanked}"
        typer.echo(f"{channel}  {wheel.path.name}  {state}")


def _print(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(outcome), indent=1))
        return
    lines = [f"{outcome.channel}: {outcome.index} ({outcome.kind})"]
    for file in outcome.files:
        done = "was there" if file.already_there else "published"
        lines.append(f"{done}  {file.sha256}  {file.name}")
    lines += [f"note: {note}" for note in outcome.notes]
    lines += ["install it with either of", *(f"  {line}" for line in outcome.install)]
    typer.echo("\n".join(lines))


def register(app: typer.Typer) -> None:
    app.command("publish")(publish)
    app.command("promote")(promote)
    app.command("yank")(yank)
