"""The GPU gate: install a wheel, prove that it is what is imported, run the suite, report.

wheel + suite + policy -> gpu-report.json. Nothing that goes wrong with the wheel, the suite or the
card leaves the run without a report; only what makes a report meaningless (no such wheel, another
wheel in the environment, a card that was not asked for) is an error instead of one.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path

from packaging.specifiers import SpecifierSet

from builder import atomic, environment, gpu_report, gpu_suite, policy, signing, sigstore_signing
from builder.console import say
from builder.environment import Content, Environment
from builder.errors import AuditError, ReportRefused
from builder.gpu_process import Suite
from builder.gpu_report import GpuReport, Machine, Outcome
from builder.locations import Cache, Project
from builder.wheelhouse import Wheelhouse
from builder.words import counted

DEFAULT_LIMIT = 600.0
_PAUSES = 1.0, 2.0  # seconds: memory of what was killed is not free at once


@dataclass(frozen=True)
class Request:
    """What to test, and in what.

    :param python: an environment to take as it is; None for a clean one.
    :param wheelhouse: where a clean one comes from without the network; None for the index.
    :param capability: refuse a machine with another card before anything runs.
    :param only: patterns of test names, such as ``test_sparse_kernels.py::*``; empty for all.
    :param time_limit: seconds for a test that has no timeout mark of its own.
    :param jobs: how many processes run tests side by side; the card must hold as many engines.
    """

    wheel: Path
    report: Path
    python: str | None = None
    wheelhouse: Wheelhouse | None = None
    capability: SpecifierSet | None = None
    only: tuple[str, ...] = ()
    time_limit: float = DEFAULT_LIMIT
    jobs: int = 1

    @property
    def log(self) -> Path:
        beside = self.report.with_suffix(".log")
        return beside if beside != self.report else self.report.with_name(f"{self.report.name}.log")


def run_gate(request: Request, project: Project, cache: Cache) -> GpuReport:
    """Run the gate and write its report; whether it passed stands in there.

    :raises AuditError: there is no such wheel, or it is none.
    :raises EnvironmentMismatchError: the environment imports something else.
    :raises ReportRefused: the machine has another card than was asked for.
    :raises KeyboardInterrupt: after the report of what had ended until then.
    """
    rules = policy.load_default(project)
    with ExitStack() as stack:
        file = stack.enter_context(_open(request.wheel))
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        scratch = stack.enter_context(atomic.scratch_folder(cache.work))
        suite = _copy_suite(project.suite, scratch)
        started = _now()
        env = environment.inside(_environment(request, suite, scratch), scratch)
        content = environment.verify(env, request.wheel.name, file)
        say(f"content: {', '.join(content.packages)} is what {request.wheel.name} holds")
        # Two suites on one card take each other's memory.
        stack.enter_context(atomic.exclusive(cache.root / "gpu", "this machine's GPU"))
        asked = environment.probe(env, "gpu")
        blank = GpuReport(
            wheel_name=request.wheel.name,
            wheel_sha256=sha256,
            policy_sha256=rules.sha256,
            suite_hash=gpu_report.dir_hash(suite),
            started=started,
            finished=started,
            machine=environment.machine(asked),
            tests=(),
            faults=(),
        )
        _say_machine(blank.machine)
        if request.capability is not None:
            require_capability(blank, request.capability, str(request.report))
        interrupted = False
        # A gate that is killed from here on leaves no report: what lay there is of another run.
        for stale in (Path, signing.signature_path, sigstore_signing.bundle_path):
            stale(request.report).unlink(missing_ok=True)
        if blank.machine.gpus:
            done, interrupted = _run(request, env, content, suite, scratch, blank)
        else:
            why = asked.get("error", "torch finds none")
            done = replace(blank, faults=(f"no GPU that can be used: {why}",))
        file.seek(0)
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            changed = "the wheel's file was changed while it was tested"
            done = replace(done, faults=(*done.faults, changed))
        finished = replace(done, finished=_now())
    atomic.write_bytes(request.report, gpu_report.render(finished))
    if interrupted:
        say("\n".join([*summary(finished), f"report  {request.report}"]))
        raise KeyboardInterrupt
    return finished


def require_capability(report: GpuReport, capability: SpecifierSet, where: str) -> None:
    """Insist on the card.

    :raises ReportRefused: which card it is.
    """
    if faults := policy.capability_faults(capability, report):
        raise ReportRefused(
            f"not a report from the asked-for card: {faults[0]}",
            where=where,
            details=tuple(faults[1:]),
            next_step="run the gate on a machine with that card",
        )


def summary(report: GpuReport) -> list[str]:
    """Return what a person reads at the end: counts, then what was not a pass."""
    counts = [f"{len(report.named(o))} {o}" for o in Outcome if report.named(o)]
    seconds = (report.finished - report.started).total_seconds()
    verdict = "passed" if report.passed else "FAILED"
    lines = [f"{verdict}: {', '.join(counts) or 'no test'}, {seconds:.0f} s"]
    lines += report.faults
    lines += [f"{t.outcome}: {t.name}: {t.reason}" for t in report.named(*gpu_report.BAD)]
    return lines


def _open(wheel: Path) -> BufferedReader:
    try:
        return wheel.open("rb")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise AuditError(
            "no such file", where=str(wheel), next_step="give the path of a wheel"
        ) from error


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _copy_suite(folder: Path, scratch: Path) -> Path:
    """Copy the suite: what the report's hash says is what runs, whoever edits the original."""
    target = scratch / "suite"
    for name, source in gpu_report.suite_files(folder).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)
    return target


def _environment(request: Request, suite: Path, scratch: Path) -> Environment:
    if request.python is not None:
        return environment.existing(request.python)
    if not _sees_a_driver():  # nothing is refused: torch has the last word
        say("warning: no NVIDIA driver is seen on this machine; without one the gate fails after "
            "all has been installed (Ctrl-C, and run it where `nvidia-smi` lists a GPU)")  # fmt: skip
    folder = scratch / "environment"
    if request.wheelhouse is not None:
        house = request.wheelhouse
        say(f"environment: Python {house.python} from {house.folder}, and from nowhere else")
        env = environment.create(folder, house.interpreter())
        environment.install(env, house.install_arguments(), {})
        return env
    from builder.unit import alias_of  # noqa: PLC0415 - slow to import
    from builder.wheelhouse import index_variables  # noqa: PLC0415 - asks pip

    say("environment: the wheel and its dependencies from the package index")
    env = environment.create(folder)
    needs = suite / environment.REQUIREMENTS
    more = ["-r", str(needs)] if needs.exists() else []
    # No index needs to have the alias yet: nothing is published before this has passed.
    alias = alias_of(request.wheel.absolute(), scratch)
    wheels = [str(path) for path in (request.wheel.absolute(), alias) if path]
    environment.install(env, [*wheels, *more], index_variables())
    return env


def _sees_a_driver() -> bool:
    signs = Path("/proc/driver/nvidia"), Path("/dev/dxg")  # Linux's own kernel module, and WSL's
    return any(sign.exists() for sign in signs) or shutil.which("nvidia-smi") is not None


def _say_machine(machine: Machine) -> None:
    for gpu in machine.gpus:
        say(f"GPU: {gpu.name}, capability {gpu.capability}, {gpu.memory / 2**30:.0f} GiB")
    say(f"driver {machine.driver or '?'}, CUDA {machine.cuda or '?'}, torch {machine.torch or '?'}, "
        f"triton {machine.triton or '?'}, Python {machine.python or '?'}")  # fmt: skip


def _lost(env: Environment, before: Machine) -> str:
    """Return why the cards are not all there any more, or nothing."""
    answer = environment.probe(env, "gpu")
    if "error" in answer:
        return str(answer["error"])
    now = environment.machine(answer).gpus
    return "" if now == before.gpus else f"{len(now)} of {len(before.gpus)} answer"


def _run(
    request: Request,
    env: Environment,
    content: Content,
    suite: Path,
    scratch: Path,
    blank: GpuReport,
) -> tuple[GpuReport, bool]:
    work, shared = scratch / "run", scratch / "shared"
    work.mkdir()
    shared.mkdir()
    request.log.parent.mkdir(parents=True, exist_ok=True)
    request.log.write_bytes(b"")

    def gpu_lost() -> str:
        why = ""
        for pause in (0.0, *_PAUSES):
            time.sleep(pause)
            if not (why := _lost(env, blank.machine)):
                break
        return why

    run = gpu_suite.run_suite(
        Suite(
            python=env.python,
            folder=suite,
            scratch=work,
            variables={**env.variables, "VLLM_GLM5_SHARED": str(shared)},
            packages=content.packages,
            only=request.only,
            limit=request.time_limit,
            jobs=request.jobs,
            log=request.log,
            gpu_lost=gpu_lost,
        )
    )
    faults = [*run.faults, *environment.imported_elsewhere(content, run.imported)]
    ran = [t for t in run.tests if t.outcome not in {Outcome.SKIPPED, Outcome.NOT_RUN}]
    if not ran:
        skipped = sum(t.outcome is Outcome.SKIPPED for t in run.tests)
        faults.append(
            f"nothing ran: {counted(len(run.tests), 'test')} collected, {skipped} of them skipped"
        )
    return replace(blank, tests=run.tests, faults=tuple(faults)), run.interrupted
