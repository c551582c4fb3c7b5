"""The command line: options in, stages called, results printed, errors turned into exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from builder import cli_gate, cli_publish, cli_rebase
from builder.classify import Mode
from builder.console import ending_signals
from builder.errors import BuilderError, DiskFullError
from builder.locations import Cache, Project, default_cache, default_project
from builder.words import counted

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # importing rich for --help costs more than all the rest
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Turn a pinned vLLM release and a numbered patch series into an installable wheel.",
)

Tag = Annotated[str, typer.Option("--tag", help="Upstream's release tag, such as v0.20.2.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


# typer carries click under a name that is private and has changed: its base class is found here.
_USAGE_ERRORS: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


_COMMAND = "python -m builder"
_INTERRUPTED = 130
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?)")  # ECMA-48
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines

_held = ExitStack()  # what is given back when the command ends


class State:
    """What the options before the command say; set once by the callback."""

    project: Project = default_project()
    cache: Cache = default_cache()
    as_json: bool = False

    @classmethod
    def used_cache(cls) -> Cache:
        """Return the cache; until this command ends nobody cleans it."""
        _held.enter_context(cls.cache.in_use())
        return cls.cache

    @classmethod
    def advice(cls, text: str) -> str:
        """Name the project in the commands of ``text``: without it they act on another one."""
        if cls.project == default_project():
            return text
        project = f"--project {shlex.quote(str(cls.project.root))}"
        return text.replace(f"{_COMMAND} ", f"{_COMMAND} {project} ")


@app.callback(invoke_without_command=True)
def build_command(
    context: typer.Context,
    tag: Annotated[
        str | None, typer.Option("--tag", help="Build this release: fetch, patch, audit, stage.")
    ] = None,
    arch: Annotated[str, typer.Option(help="x86_64 or aarch64.")] = "x86_64",
    mode: Annotated[Mode, typer.Option(help="auto picks the first faithful one.")] = Mode.AUTO,
    source: Annotated[str, typer.Option(help="sdist, or git with --upstream-url.")] = "sdist",
    upstream_url: Annotated[str | None, typer.Option(help="Clone this with --source git.")] = None,
    out: Annotated[Path, typer.Option(help="Where the wheel goes.")] = Path("dist"),
    index: Annotated[
        Path | None, typer.Option(help="Directory index to stage in (default: OUT/index).")
    ] = None,
    no_stage: Annotated[bool, typer.Option("--no-stage", help="Leave the index alone.")] = False,
    with_alias: Annotated[
        bool, typer.Option("--with-alias", help="Also build the alias distribution vllm.")
    ] = False,
    project: Annotated[
        Path | None, typer.Option(help="Folder with upstream/ and patches/ (default: this one).")
    ] = None,
    as_json: Json = False,
) -> None:
    if project is not None:
        if context.invoked_subcommand != "pin" and not project.is_dir():  # pin makes it
            raise typer.BadParameter(f"--project: there is no folder {project}")
        State.project = Project(project.absolute())
    if context.invoked_subcommand is not None:
        return
    if tag is None:
        raise typer.BadParameter("give --tag, or a command (see --help)")
    if source not in ("sdist", "git") or (source == "git") != (upstream_url is not None):
        raise typer.BadParameter("--source git and --upstream-url URL go together")
    State.as_json = as_json
    for option, folder in (("--out", out), ("--index", index)):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise typer.BadParameter(f"{option} takes a folder, {folder} is none")
    if index is not None and index.parts[:1] in {("http:",), ("https:",)}:
        raise typer.BadParameter("--index takes a folder; publish takes a server's URL")
    from builder import pipeline, report  # noqa: PLC0415 - keeps --help quick

    request = pipeline.Request(
        tag=tag,
        arch=arch,
        mode=mode,
        upstream_url=upstream_url,
        out=out.absolute(),
        index=None if no_stage else (index or out / "index").absolute(),
        with_alias=with_alias,
    )
    built = pipeline.build(request, State.project, State.used_cache())
    typer.echo(report.built_as_json(built) if as_json else report.built_as_text(built))


@app.command("pin")
def pin_command(
    tag: Annotated[str, typer.Argument(help="Upstream's release tag, such as v0.20.2.")],
    force: Annotated[bool, typer.Option("--force", help="Accept changed hashes.")] = False,
) -> None:
    """Write upstream/TAG.toml from the package index that pip is configured for."""
    from builder import pin, pinning, series  # noqa: PLC0415

    made = pinning.make_pin(tag, State.used_cache())
    changed = pin.save(State.project.pins, made, force=force)
    path = State.project.pins / f"{tag}.toml"
    typer.echo(f"{path}: {'written' if changed else 'unchanged'}")
    tags = series.series_tags(State.project)
    if tags and tag not in tags:
        source = series.nearest_series(tags, tag)
        typer.echo(State.advice(f"next: {_COMMAND} rebase --from {source} --onto {tag}"))


@app.command("series")
def series_command(tag: Tag, as_json: Json = False) -> None:
    """List the patches of a release and lint them."""
    State.as_json = as_json
    from builder import lint, pipeline, report, series  # noqa: PLC0415
    from builder.apply import read_patches  # noqa: PLC0415

    cache = State.used_cache()
    pin, found, applied = pipeline.applied_series(tag, State.project, cache)
    patches = read_patches(found.paths, cache)
    typer.echo(report.series_listing(pin, found, patches, applied, as_json=as_json))
    faults = [f"{patch.name}: {fault}" for patch in patches for fault in lint.lint_patch(patch)]
    for entry, patch in zip(found.entries, patches, strict=True):
        if entry.is_common:
            faults += [f"{patch.name}: {fault}" for fault in lint.lint_common(patch)]
    faults += lint.lint_trees(applied, patches)
    faults += [f"common/{name} is in no series" for name in series.unlisted_common(State.project)]
    lint.check(faults, str(found.folder))


@app.command("edit")
def edit_command(
    tag: Tag,
    worktree: Annotated[Path | None, typer.Option(help="Default: ./vllm-TAG.")] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="Leave out this patch, at which an edit stopped; may be repeated."),
    ] = None,
) -> None:
    """Make a work tree with the series as commits, to amend; go on with one that stopped."""
    from builder import edit, pipeline  # noqa: PLC0415

    folder = worktree or edit.default_worktree(tag)
    number = pipeline.edit_series(
        tag, folder, State.project, State.used_cache(), drop=tuple(drop or ())
    )
    back = shlex.join([*_COMMAND.split(), "export", "--tag", tag, "--worktree", str(folder)])
    typer.echo(
        f"{folder}: branch {edit.branch_of(tag)}, {counted(number, 'commit')} on {tag}\n"
        f"amend them (git rebase -i {tag}), then: {State.advice(back)}"
    )


@app.command("export")
def export_command(
    tag: Tag,
    worktree: Annotated[
        Path | None,
        typer.Option(help="Default: ./vllm-TAG; with --check the files' own commits."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where the files would change.")
    ] = False,
    raise_revision: Annotated[
        bool, typer.Option("--raise-revision", help="Raise N of +glm5.N where what ships changed.")
    ] = False,
) -> None:
    """Write the commits of a work tree back as the series."""
    from builder import atomic, edit, export, pipeline, stopped_edit  # noqa: PLC0415

    folder = None if check and worktree is None else worktree or edit.default_worktree(tag)
    cache = State.used_cache()
    with atomic.exclusive(cache.root / "export", "an export"):
        if folder is None:
            plan = pipeline.plan_from_series(tag, State.project, cache)
        else:
            plan = pipeline.plan_from_worktree(tag, folder, State.project, cache)
        if not check:
            if folder is not None:
                stopped_edit.forget(folder)  # first: its record is of the series as it was
            if not plan.is_noop:
                export.write_export(plan)
    if check:
        export.check_export(plan, folder)
        typer.echo(
            f"{tag}: {counted(len(plan.patches), 'patch is', 'patches are')} what an export writes"
        )
    elif plan.is_noop:
        typer.echo(f"{tag}: nothing changed")
    else:
        for line in plan.written:
            typer.echo(f"written {line}")
        for line in plan.removed:
            typer.echo(f"removed {line}")
    _check_revisions(tag, do_raise=raise_revision and not check)


def _check_revisions(tag: str, *, do_raise: bool) -> None:
    """Check (or raise) N of this series and of every one that names a shared patch of it."""
    from builder import pin, revision, series  # noqa: PLC0415
    from builder.errors import RevisionError  # noqa: PLC0415

    shared = {e.path for e in series.read_series(State.project, tag).entries if e.is_common}
    stale = []
    for other in series.series_tags(State.project):
        found = series.read_series(State.project, other)
        if other != tag and not shared & set(found.paths):
            continue
        pinned = pin.load(State.project.pins, other)
        if do_raise:
            now = revision.raise_revision(pinned, found)
            typer.echo(f"{other}: +glm5.{now.number}")
            continue
        try:
            revision.checked_revision(pinned, found)
        except RevisionError:
            stale.append(other)
    if stale:
        raise RevisionError(
            f"what ships has changed and N of +glm5.N has not, in: {', '.join(stale)}",
            where=str(State.project.patches),
            next_step="; ".join(f"python -m builder revision --tag {t} --raise" for t in stale),
        )


@app.command("revision")
def revision_command(
    tag: Tag,
    do_raise: Annotated[bool, typer.Option("--raise", help="Write the next N.")] = False,
) -> None:
    """Show N of +glm5.N, or raise it after what ships has changed."""
    from builder import pin, revision, series  # noqa: PLC0415

    pinned = pin.load(State.project.pins, tag)
    found = series.read_series(State.project, tag)
    if do_raise:
        typer.echo(f"+glm5.{revision.raise_revision(pinned, found).number}")
    else:
        typer.echo(f"+glm5.{revision.checked_revision(pinned, found)}")


@app.command("verify")
def verify_command(
    wheel: Annotated[Path, typer.Argument(help="A wheel that this tool built, or its alias.")],
    as_json: Json = False,
) -> None:
    """Audit a wheel: RECORD, and each difference from the official one."""
    State.as_json = as_json
    from builder import alias, pipeline, report, unit  # noqa: PLC0415

    if version := alias.version_in(wheel.name):
        sha256 = unit.require_alias(wheel, version)
        typer.echo(report.alias_verified(version, sha256, as_json=as_json))
        return
    result, _ = pipeline.verify(wheel, State.project, State.used_cache())
    typer.echo(report.audit_as_json(result) if as_json else report.audit_table(result))


@app.command("serve")
def serve_command(
    index: Annotated[Path, typer.Option(help="The directory index.")] = Path("dist/index"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8080,
    prefix: Annotated[str, typer.Option(help="Sub-path, such as /glm5.")] = "",
) -> None:
    """Serve the directory index over HTTP (PEP 503 and PEP 691)."""
    from builder.serve import serve  # noqa: PLC0415

    serve(index, host=host, port=port, prefix=prefix)


@app.command("doctor")
def doctor_command(
    python: Annotated[
        Path, typer.Option(help="The interpreter of the environment to examine.")
    ] = Path(sys.executable),
    index: Annotated[
        str | None, typer.Option(help="The private index, for the commands that it prints.")
    ] = None,
) -> None:
    """Report whose vllm files an environment holds, and what to run."""
    from builder.doctor import examine, render  # noqa: PLC0415

    diagnosis = examine(python, index=index)
    typer.echo(render(diagnosis))


@app.command("clean")
def clean_command() -> None:
    """Delete the cache: downloads, source repository, built wheels."""
    kept = State.cache.clear()
    typer.echo(f"{State.cache.root}: deleted" + (f", but for {', '.join(kept)}" if kept else ""))


cli_gate.register(app)
cli_publish.register(app)
cli_rebase.register(app)


def main() -> int:
    """Run the command line; return the exit code."""
    for number in ending_signals():
        signal.signal(number, _terminated)
    try:
        # Versions of typer differ in what they make of Ctrl-C: Abort, or the code 130.
        with _held:
            code = app(standalone_mode=False) or 0
    except BuilderError as error:
        return _failed(error.exit_code, f"error: {error}", error.as_dict())
    except typer.Exit as exit_request:
        code = exit_request.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except OSError as error:
        return _system_error(error)
    except _USAGE_ERRORS as error:
        error.show()
        return int(error.exit_code)
    if code == _INTERRUPTED:
        what = "interrupted; run the command again, it goes on where it stopped"
        return _failed(code, what, {"error": "Interrupted", "exit_code": code, "what": what})
    return int(code)


def _failed(code: int, text: str, facts: dict[str, object]) -> int:
    if State.as_json:
        told = {
            name: list(map(State.advice, value)) if isinstance(value, list) else value
            for name, value in facts.items()
        }
        if isinstance(step := told.get("next"), str):
            told["next"] = State.advice(step)
        typer.echo(json.dumps(told, indent=1))
    # It may quote a report or a server, which have no business with the terminal.
    typer.echo(_CONTROLS.sub("?", _ESCAPES.sub("", State.advice(text))), err=True)
    return code


def _system_error(error: OSError) -> int:
    """Report what the system refuses: a path, its permissions, its disk."""
    from builder import atomic  # noqa: PLC0415 - keeps --help quick

    where = error.filename or ""
    if error.errno in atomic.FULL and not _can_print():
        text = "no space left on the device for the output; what the command did stays done"
        return _failed(DiskFullError.exit_code, f"error: {text}\n  next: send the output elsewhere "
                       "and run the command again", {})  # fmt: skip
    try:
        with atomic.disk_full_is_an_error(Path(str(where)).absolute()):
            raise error
    except BuilderError as full:
        return _failed(full.exit_code, f"error: {full}", full.as_dict())
    except OSError:
        text, next_step = str(error), "check the path and its permissions"
        if not where and not _has_folder():
            text, next_step = "the current folder is gone", "change to another one"
        elif Path(str(where)).is_relative_to(State.cache.root):
            next_step += ", or name another cache: VLLM_GLM5_CACHE"
        facts = {"error": type(error).__name__, "exit_code": 1, "what": error.strerror or text,
                 "where": str(where), "details": [], "next": next_step}  # fmt: skip
        return _failed(1, f"error: {text}\n  next: {next_step}", facts)


def _can_print() -> bool:
    """Tell whether stdout takes what is left to print; if not, nothing more is sent there."""
    try:
        sys.stdout.flush()
    except OSError:
        State.as_json = False
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _has_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _terminated(*_: object) -> NoReturn:
    raise KeyboardInterrupt
