"""The environment that a wheel is tested in, and the proof that it holds that wheel's content."""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from builder import alias, atomic
from builder.credentials import redacted, variables_of_children
from builder.errors import AuditError, EnvironmentMismatchError, ToolchainError
from builder.gpu_report import Gpu, Machine
from builder.locations import UPSTREAM_DISTRIBUTION
from builder.wheel_archive import UNREADABLE, dist_info_of, read_record, record_hash

INSIDE = Path(__file__).parent / "under_test"
REQUIREMENTS = "requirements.txt"  # of a suite: what it needs beside the wheel

_PROBE_LIMIT = 300.0
_DEATH_LIMIT = 5.0
_SHOWN = 5
# Variables of the caller's that would decide what is tested.
_OURS = ("VLLM_GLM5_REFERENCE", "VLLM_GLM5_SHARED_RANKS", "VLLM_GLM5_SOAK_SECONDS",
         "VLLM_NO_USAGE_STATS")  # fmt: skip
_FOREIGN = ("VLLM_", "PYTEST_", "PYTHONSTARTUP", "PYTHONHOME", "VIRTUAL_ENV", "COVERAGE_",
            # These leave out assertions, or put something else in the place of GPU kernels.
            "PYTHONOPTIMIZE", "TRITON_INTERPRET", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE",
            )  # fmt: skip
# What runs under test may not sign or publish: no CI's tokens, no key's path, no agent.
_SECRET = re.compile(
    r"(^|_)(PASSWORD|PASSWD|TOKEN|SECRET|SECRETS|CREDENTIALS|KEY)(_|$)|^TWINE_|^SSH_AUTH_SOCK$"
)
_LOGIN = re.compile(r"://[^/?#\s]*@")  # as in GitLab's CI_REPOSITORY_URL, which has the job's token


@dataclass(frozen=True)
class Environment:
    """An interpreter and the variables that everything under test runs with."""

    python: Path
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Content:
    """The wheel as it was found installed: its folder, and its import packages."""

    site: Path
    packages: tuple[str, ...]


def existing(python: str) -> Environment:
    """Take an environment as it is, PYTHONPATH included.

    :raises ToolchainError: there is no such interpreter.
    """
    found = shutil.which(python)
    if found is None:
        raise ToolchainError(
            "no such interpreter", where=python, next_step="give --python ENV/bin/python"
        )
    # Not resolved: the link's place makes it a virtual environment's.
    return Environment(Path(found).absolute(), _variables(Path(found).absolute().parent))


def create(folder: Path, base: str = sys.executable) -> Environment:
    """Make an empty virtual environment of the base interpreter's version.

    :raises ToolchainError: the base interpreter cannot.
    """
    command = [base, "-m", "venv", *(["--without-pip"] if uv() else []), str(folder)]
    _run(command, "no virtual environment can be made", variables_of_children(), folder)
    variables = _variables(folder / "bin")
    variables.pop("PYTHONPATH", None)
    return Environment(folder / "bin" / "python", {**variables, "PYTHONNOUSERSITE": "1"})


def install(environment: Environment, arguments: list[str], index: Mapping[str, str]) -> None:
    """Install into an environment with uv where there is one, else with its own pip.

    :param index: variables that name the package index.
    :raises ToolchainError: the installer's own words.
    """
    python = str(environment.python)
    program = uv()
    if program:
        command = [program, "pip", "install", "--quiet", "--python", python, *arguments]
    else:
        command = [python, "-m", "pip", "install", "--quiet", "--no-input", *arguments]
    variables = variables_of_installers() | dict(index)
    _run(command, "the wheel cannot be installed", variables, environment.python)


def variables_of_installers() -> dict[str, str]:
    """Return our environment for pip and uv, which must not take this interpreter's for theirs."""
    given = variables_of_children().items()
    return {name: value for name, value in given if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def uv() -> str | None:
    """Return uv's path, the one beside this interpreter first."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


def _run(command: list[str], what: str, variables: dict[str, str], folder: Path) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    except OSError as error:
        raise ToolchainError(what, where=command[0], next_step=str(error)) from error
    if run.returncode and atomic.says_disk_full(run.stderr.splitlines(), folder):
        raise atomic.disk_full_error(folder)
    if run.returncode:
        lines = redacted(run.stderr or run.stdout).strip().splitlines()
        raise ToolchainError(
            what,
            where=command[0],
            details=tuple(lines[-15:]),
            next_step="see the installer's words above",
        )


def _variables(programs: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _OURS
        or not (name.startswith(_FOREIGN) or _SECRET.search(name) or _LOGIN.search(value))
    }
    kept["PATH"] = f"{programs}{os.pathsep}{kept.get('PATH', os.defpath)}"
    kept["HF_HUB_OFFLINE"] = "1"
    return kept


def inside(environment: Environment, scratch: Path) -> Environment:
    """Put copies of what runs inside on the environment's path; return it with that path."""
    folder = scratch / "inside"
    folder.mkdir()
    for file in INSIDE.glob("vllm_glm5_*.py"):
        shutil.copyfile(file, folder / file.name)
    path = environment.variables.get("PYTHONPATH")
    joined = f"{folder}{os.pathsep}{path}" if path else str(folder)
    return Environment(environment.python, {**environment.variables, "PYTHONPATH": joined})


def probe(environment: Environment, *question: str) -> dict[str, Any]:
    """Ask the interpreter; ``error`` in the answer says why it has none."""
    command = [str(environment.python), "-m", "vllm_glm5_probe", *question]
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(environment.variables), cwd="/",
        )  # fmt: skip
    except OSError as error:
        return {"error": str(error)}
    try:
        output, errors = process.communicate(timeout=_PROBE_LIMIT)
        answer: dict[str, Any] = json.loads(output.rstrip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_PROBE_LIMIT:.0f} s"}
    except ValueError:
        last = errors.strip().rpartition("\n")[2]
        return {"error": f"the interpreter ended with {process.returncode}: {last}"}
    finally:
        _end(process)
    return answer


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what has not ended, and wait no longer than it takes where a signal arrives at all.

    subprocess.run waits for ever for a process that hangs in the driver of a lost card.
    """
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DEATH_LIMIT)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def machine(answer: Mapping[str, Any]) -> Machine:
    """Return the cards and versions of the answer about the GPU."""
    versions = {key: str(answer.get(key, ""))
                for key in ("driver", "cuda", "torch", "triton", "python")}  # fmt: skip
    gpus = tuple(Gpu(g["name"], g["capability"], g["memory"]) for g in answer.get("gpus", ()))
    return Machine(gpus=gpus, **versions)


def verify(environment: Environment, wheel_name: str, wheel: IO[bytes]) -> Content:
    """Prove that what the environment imports is the wheel's content.

    Each file that RECORD lists is there with RECORD's hash, no other importable file lies among
    them, and the import packages come from that place. A wheel that requires its alias has it.

    :raises EnvironmentMismatchError: which files differ, are missing, or too many.
    :raises AuditError: not a wheel.
    """
    record, project, version, needs_alias = _read_wheel(wheel_name, wheel)
    names = _import_names(record)
    answer = probe(environment, "package", project, *names)
    where = str(environment.python)
    if "error" in answer:
        raise _mismatch(f"{project} is not installed: {answer['error']}", where)
    if answer["version"] != version:
        raise _mismatch(f"it has {project} {answer['version']}, not {version}", where)
    if needs_alias:
        _require_alias(environment, version)
    site = Path(answer["site"])
    wrong = [
        f"{'differs' if (site / path).is_file() else 'missing'}  {path}"
        for path, digest in record.items()
        if not _same(site / path, digest)
    ]
    wrong += [f"not in the wheel  {path}" for path in _others(site, names, record)]
    wrong += [
        f"import {name} takes another file  {origin or 'none'}"
        for name, origin in answer["origins"].items()
        if origin and not Path(origin).is_relative_to(site)
    ]
    if wrong:
        rest = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise _mismatch("what it imports is not the wheel's content", where, *wrong[:_SHOWN], *rest)
    return Content(site, names)


def _require_alias(environment: Environment, version: str) -> None:
    found = probe(environment, "package", UPSTREAM_DISTRIBUTION)
    if found.get("version") != version:
        has = found.get("version", "none")
        raise _mismatch(
            f"the wheel requires its alias {alias.requirement(version)}, and there is {has}",
            str(environment.python),
        )


def imported_elsewhere(content: Content, imported: Mapping[str, str]) -> list[str]:
    """Return which packages the suite took from another place than the one that was checked."""
    return [
        f"import {name} took {Path(path).name} from outside the checked environment"
        for name, path in imported.items()
        if not Path(path).is_relative_to(content.site)
    ]


def _read_wheel(name: str, wheel: IO[bytes]) -> tuple[dict[str, str], str, str, bool]:
    """Return hashes by installed path, the project, its version, and if it requires its alias."""
    try:
        project, version, *_ = parse_wheel_filename(name)
        with zipfile.ZipFile(wheel) as archive:
            members = [info.filename for info in archive.infolist() if not info.is_dir()]
            dist_info = dist_info_of(members, name)
            record = read_record(archive, dist_info)
            needs_alias = alias.is_required(archive.read(f"{dist_info}/METADATA"), str(version))
    except (*UNREADABLE, InvalidWheelFilename) as error:
        raise AuditError(
            f"not a readable wheel: {error}", where=name, next_step="build the wheel again"
        ) from error
    signatures = {f"{dist_info}/{end}" for end in ("RECORD", "RECORD.jws", "RECORD.p7s")}
    if unlisted := set(members) - set(record) - signatures:
        raise AuditError(
            "RECORD does not list each member",
            where=name,
            details=tuple(sorted(unlisted)[:_SHOWN]),
            next_step="build the wheel again",
        )
    installed = {_installed_path(path): entry.hash for path, entry in record.items()}
    kept = {path: digest for path, digest in installed.items() if path}
    return kept, project, str(version), needs_alias


def _installed_path(member: str) -> str:
    """Return where a member goes, relative to site-packages; scripts are rewritten: none."""
    folder, _, rest = member.partition("/")
    if not folder.endswith(".data"):
        return member
    scheme, _, path = rest.partition("/")
    return path if scheme in {"purelib", "platlib"} else ""


def _import_names(record: Mapping[str, str]) -> tuple[str, ...]:
    suffixes = tuple(importlib.machinery.all_suffixes())
    names = set()
    for path in record:
        first, slash, _ = path.partition("/")
        if slash and first.isidentifier():
            names.add(first)
        elif not slash and first.endswith(suffixes):
            names.add(first.partition(".")[0])
    return tuple(sorted(names))


def _same(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return record_hash(hashlib.file_digest(file, "sha256").digest()) == digest


def _others(site: Path, names: tuple[str, ...], record: Mapping[str, str]) -> list[str]:
    """Return importable files among the wheel's that it does not bring; bytecode caches aside."""
    suffixes = tuple(importlib.machinery.all_suffixes())
    return [
        path.relative_to(site).as_posix()
        for name in names
        for path in sorted((site / name).rglob("*"))
        if path.name.endswith(suffixes)
        and path.parent.name != "__pycache__"
        and path.is_file()
        and path.relative_to(site).as_posix() not in record
    ]


def _mismatch(what: str, where: str, *details: str) -> EnvironmentMismatchError:
    return EnvironmentMismatchError(
        what,
        where=where,
        details=details,
        next_step="install exactly that wheel there, or leave --python out for a clean environment",
    )
