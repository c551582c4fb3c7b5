"""The commands of the GPU gate: test, wheelhouse, sign, check-report."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from builder.words import counted

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from builder.gpu_report import GpuReport
    from builder.locations import Project

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Capability = Annotated[
    str | None,
    typer.Option("--require-capability", help="Refuse another card: 12.0, 12.*, or >=9.0."),
]
Report = Annotated[Path, typer.Option("--report", help="The GPU report.")]
REPORT = Path("gpu-report.json")


def run_gate(
    wheel: Annotated[
        Path | None, typer.Argument(help="The wheel; with --wheelhouse its own by default.")
    ] = None,
    report: Report = REPORT,
    python: Annotated[
        str | None, typer.Option(help="Test in this environment instead of a clean one.")
    ] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="Install from this folder and from nowhere else.")
    ] = None,
    require_capability: Capability = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Tests by pattern: test_mission.py::*")
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds for a test without a timeout mark.")
    ] = 600,
    jobs: Annotated[
        int, typer.Option(min=1, help="Run so many processes side by side on the card.")
    ] = 1,
    key: Annotated[
        Path | None, typer.Option(help="Sign the report with this SSH key, if it is a pass.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Test a wheel on this machine's GPU; write the report that publishing asks for."""
    from builder import gate, gpu_report, signing  # noqa: PLC0415 - keeps --help quick
    from builder import wheelhouse as houses  # noqa: PLC0415
    from builder.cli import State  # noqa: PLC0415
    from builder.errors import GateFailedError, HashMismatchError  # noqa: PLC0415

    State.as_json = as_json
    if python is not None and wheelhouse is not None:
        raise typer.BadParameter("--python takes an environment, --wheelhouse makes one")
    if report.is_dir():
        raise typer.BadParameter(f"--report takes a file, {report} is a folder")
    house = houses.read(wheelhouse) if wheelhouse is not None else None
    if house is not None and wheel is not None and not _same_file(wheel, house.wheel_sha256):
        raise HashMismatchError(
            "not the wheel that the wheelhouse was made for",
            where=str(wheel),
            next_step=f"leave it out to test {house.wheel.name}, or make another wheelhouse",
        )
    tested = house.wheel if house is not None else wheel
    if tested is None:
        raise typer.BadParameter("give a wheel, or --wheelhouse")
    if report.exists() and tested.exists() and report.samefile(tested):
        raise typer.BadParameter(
            "--report names the wheel itself, in whose place it would be written"
        )
    request = gate.Request(
        wheel=tested,
        report=report.absolute(),
        python=python,
        wheelhouse=house,
        capability=_range(require_capability),
        only=tuple(only or ()),
        time_limit=time_limit,
        jobs=jobs,
    )
    if key is not None:
        signing.require_key(key)
    project = house.project if house is not None else State.project
    done = gate.run_gate(request, project, State.used_cache())
    lines = gate.summary(done)
    if not done.passed:
        files = [f"report  {request.report}", *([f"log     {request.log}"] if done.tests else [])]
        raise GateFailedError(
            lines[0], where=tested.name, details=(*lines[1:], *files),
            next_step="mend what the report names, then run the gate again"
            if done.machine.gpus
            else "run it where `nvidia-smi` lists a GPU, with a driver that this torch's CUDA takes",
        )  # fmt: skip
    signature = None
    if key is not None:
        data = gpu_report.render(done)
        signature = signing.sign(request.report, key, signing.REPORT, data)
    if as_json:
        facts = {"passed": True, "report": str(request.report), "log": str(request.log),
                 "signature": str(signature) if signature else None}  # fmt: skip
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo("\n".join([*lines, f"report   {request.report}", *_channels(done, project)]))
    if signature is None:
        typer.echo(f"sign it: python -m builder sign {request.report} --key KEY")
    else:
        typer.echo(f"signed   {signature}")


def _channels(done: GpuReport, project: Project) -> list[str]:
    """Say which channels a pass is enough for: what they ask for may not have run at all."""
    from builder import policy  # noqa: PLC0415 - keeps --help quick

    lines = []
    for channel in policy.load_default(project).channels.values():
        faults = policy.check(channel, done, datetime.now(UTC))
        rest = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        verdict = f"refuses it: {faults[0]}{rest}" if faults else "takes it"
        lines.append(f"channel  {channel.name} {verdict}")
    return lines


def fill_wheelhouse(
    wheel: Annotated[Path, typer.Argument(help="The wheel to test.")],
    python: Annotated[str, typer.Option(help="The GPU machine's Python, such as 3.12.")],
    out: Annotated[Path, typer.Option(help="The folder to fill.")],
) -> None:
    """Collect all that `test --wheelhouse` needs on a machine without a network."""
    from builder import wheelhouse as houses  # noqa: PLC0415 - keeps --help quick
    from builder.cli import State  # noqa: PLC0415

    house = houses.collect(wheel, python, out, State.project)
    files = list((out / "wheels").iterdir())
    size = sum(path.stat().st_size for path in files)
    typer.echo(
        f"{out}: {counted(len(files), 'wheel')}, {size / 1e6:.0f} MB, for Python {house.python}"
    )
    typer.echo(f"on the GPU machine: python -m builder test --wheelhouse {out}")


def sign(
    file: Annotated[Path, typer.Argument(help="A GPU report, or a wheel's provenance.")] = REPORT,
    key: Annotated[Path | None, typer.Option(help="The private SSH key.")] = None,
    kind: Annotated[str, typer.Option(help="What it is: report or provenance.")] = "report",
    sigstore: Annotated[
        bool, typer.Option("--sigstore", help="Sign with this machine's identity instead.")
    ] = False,
    show_line: Annotated[
        bool, typer.Option("--show-line", help="Print the key's line for ci/allowed_signers.")
    ] = False,
    principal: Annotated[str, typer.Option(help="The name in that line.")] = "gpu-gate",
) -> None:
    """Sign a report or provenance; the signature lies beside it as FILE.sig."""
    from builder import gpu_report, signing, sigstore_signing  # noqa: PLC0415 - keeps --help quick
    from builder.errors import ReportRefused  # noqa: PLC0415

    if kind not in signing.NAMESPACES:
        raise typer.BadParameter(f"--kind is one of {', '.join(signing.NAMESPACES)}")
    if (key is None) != sigstore:
        raise typer.BadParameter("give --key, the path of an SSH key, or --sigstore")
    if not re.fullmatch(r"[^\s\",!*?#]+", principal):  # ssh-keygen's patterns and lists
        raise typer.BadParameter(f"--principal is one name, {principal!r} is none")
    namespace = signing.NAMESPACES[kind]
    if show_line and key is not None:
        typer.echo(signing.allowed_signers_line(key, principal, namespace))
        return
    if not file.is_file():
        raise ReportRefused(
            "no such file", where=str(file), next_step="python -m builder test WHEEL"
        )
    if kind == "report":
        gpu_report.parse(file.read_bytes(), str(file))
    done = sigstore_signing.sign(file) if key is None else signing.sign(file, key, namespace)
    typer.echo(f"signed   {done}")


def check_report(
    wheel: Annotated[Path, typer.Argument(help="The wheel that is to be published.")],
    report: Report = REPORT,
    channel: Annotated[str, typer.Option(help="A channel of ci/policy.toml.")] = "stable",
    policy: Annotated[Path | None, typer.Option(help="Default: ci/policy.toml.")] = None,
    require_capability: Capability = None,
    as_json: Json = False,
) -> None:
    """Say whether a report lets a wheel into a channel, and if not, why not."""
    from builder import gate  # noqa: PLC0415 - keeps --help quick
    from builder import policy as policies  # noqa: PLC0415
    from builder.cli import State  # noqa: PLC0415

    State.as_json = as_json
    rules = policies.load(policy or State.project.policy, State.project.suite)
    wanted = _range(require_capability)
    verdict = policies.require_report(rules.channel(channel), wheel, report, datetime.now(UTC))
    if wanted is not None:
        gate.require_capability(verdict.report, wanted, str(report))
    signer = verdict.signer.principal if verdict.signer else None
    if as_json:
        facts = {"channel": channel, "wheel": verdict.wheel_sha256, "signer": signer}
        typer.echo(json.dumps(facts, indent=1))
    else:
        by = f", signed by {signer}" if signer else ""
        typer.echo(f"{report}: lets {wheel.name} into {channel}{by}")


def _range(text: str | None) -> SpecifierSet | None:
    from builder import policy  # noqa: PLC0415 - keeps --help quick

    try:
        return policy.capability_range(text) if text is not None else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _same_file(path: Path, sha256: str) -> bool:
    from builder.digests import sha256_of  # noqa: PLC0415 - keeps --help quick

    return path.is_file() and sha256_of(path) == sha256


def register(app: typer.Typer) -> None:
    app.command("test")(run_gate)
    app.command("wheelhouse")(fill_wheelhouse)
    app.command("sign")(sign)
    app.command("check-report")(check_report)
