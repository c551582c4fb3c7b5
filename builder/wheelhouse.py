"""A folder that holds all that the gate needs, for a GPU machine without a network.

wheels/            the wheel under test, its alias if it has one, and each of its dependencies
requirements.txt   the lock: one version each, by sha256
tests/gpu/         the suite
ci/policy.toml     the policy whose hash the report will carry
wheelhouse.json    written last: a folder without it is not complete
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from builder import atomic, environment, gpu_report, unit
from builder.console import say
from builder.credentials import redacted
from builder.digests import sha256_of
from builder.errors import (
    AuditError,
    DirtyWorktreeError,
    HashMismatchError,
    PackageIndexError,
    ToolchainError,
)
from builder.locations import UPSTREAM_DISTRIBUTION, Project
from builder.words import counted

MANIFEST = "wheelhouse.json"
LOCK = "requirements.txt"

_FORMAT = 1
_INCOMPLETE = '{"complete": false}\n'
_NEWEST_GLIBC = 2, 35  # where a wheel of any platform says nothing: Ubuntu 22.04's
_OLDEST_GLIBC = 5


@dataclass(frozen=True)
class Wheelhouse:
    """A complete wheelhouse; ``python`` as ``major.minor``."""

    folder: Path
    wheel: Path
    wheel_sha256: str
    python: str

    @property
    def project(self) -> Project:
        """The suite and the policy that it brings lie as in a checkout."""
        return Project(self.folder)

    def interpreter(self) -> str:
        """Return an interpreter of the wheelhouse's version.

        :raises ToolchainError: none is installed.
        """
        if self.python == f"{sys.version_info.major}.{sys.version_info.minor}":
            return sys.executable
        found = shutil.which(f"python{self.python}")
        if found is None:
            raise ToolchainError(
                f"the wheelhouse is for Python {self.python}, which is not installed",
                where=str(self.folder),
                next_step=f"install python{self.python}, or make a wheelhouse with --python "
                f"{sys.version_info.major}.{sys.version_info.minor}",
            )
        return found

    def install_arguments(self) -> list[str]:
        """Return the installer's arguments: these files, by hash, and no index."""
        return [
            "--no-index", "--no-deps", "--require-hashes",
            "--find-links", str(self.folder / "wheels"), "-r", str(self.folder / LOCK),
        ]  # fmt: skip


def index_variables() -> dict[str, str]:
    """Return uv's variables for the index that pip is configured for; the caller's own win."""
    from builder import package_index  # noqa: PLC0415 - slow to import

    settings = package_index.pip_settings()
    ours = {"UV_DEFAULT_INDEX": settings.urls[0], "UV_NATIVE_TLS": "1", "UV_SYSTEM_CERTS": "1"}
    if len(settings.urls) > 1:
        ours["UV_INDEX"] = " ".join(settings.urls[1:])
    return {name: value for name, value in ours.items() if name not in os.environ}


def collect(wheel: Path, python: str, out: Path, project: Project) -> Wheelhouse:
    """Fill a wheelhouse; a run that was cut short goes on with what is there.

    :raises PackageIndexError: a dependency cannot be found, or not as a wheel.
    :raises DirtyWorktreeError: the folder holds something else, which would be lost.
    :raises ToolchainError: uv or pip is missing.
    """
    if not re.fullmatch(r"3\.\d+", python):
        raise ToolchainError(
            f"not a version of Python: {python!r}", where="--python", next_step="give 3.12, say"
        )
    name, version, target = _target(wheel)
    _begin(out)
    wheels = out / "wheels"
    wheels.mkdir(exist_ok=True)
    with atomic.exclusive(out / LOCK, f"the wheelhouse {out}"):
        atomic.write_text(out / MANIFEST, _INCOMPLETE)
        sha256 = _copy_wheel(wheel, wheels / wheel.name)
        ours = {name: wheels / wheel.name}
        with atomic.scratch_folder(out) as scratch:
            if alias := unit.alias_of(wheel, scratch):
                ours[UPSTREAM_DISTRIBUTION] = wheels / alias.name
                _copy_wheel(alias, wheels / alias.name)
        say(f"lock: {wheel.name} for Python {python} on {target[0]}, glibc 2.{target[1]}")
        locked = _lock(ours, python, target, project.suite)
        lines = [f"{n}=={version} --hash=sha256:{sha256_of(path)}\n" for n, path in ours.items()]
        atomic.write_text(out / LOCK, "".join(lines) + locked)
        _download(locked, wheels, python, target)
        _remove_others(wheels, set(ours.values()), locked)
        _copy_tree(project.suite, out / "tests" / "gpu")
        atomic.write_bytes(out / "ci" / "policy.toml", project.policy.read_bytes())
        manifest = {
            "format": _FORMAT, "wheel": wheel.name, "sha256": sha256, "python": python,
            "lock": sha256_of(out / LOCK), "suite": gpu_report.dir_hash(out / "tests" / "gpu"),
            "policy": sha256_of(out / "ci" / "policy.toml"),
            "alias": {p.name: sha256_of(p) for n, p in ours.items() if n == UPSTREAM_DISTRIBUTION},
        }  # fmt: skip
        atomic.write_text(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return Wheelhouse(out, wheels / wheel.name, sha256, python)


def _begin(out: Path) -> None:
    """Mark the folder as a wheelhouse before anything in it is replaced."""
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists():
        raise DirtyWorktreeError(
            "the folder is not empty, and no wheelhouse",
            where=str(out),
            next_step="give --out a folder that does not exist yet",
        )
    if not (out / MANIFEST).exists():
        atomic.write_text(out / MANIFEST, _INCOMPLETE)


def read(folder: Path) -> Wheelhouse:
    """Open a wheelhouse; the installer checks its dependencies' hashes by the lock.

    :raises HashMismatchError: it is incomplete, or its wheel, lock, suite or policy was changed.
    """
    again = "copy the wheelhouse again, whole, or make it again: python -m builder wheelhouse"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        house = Wheelhouse(
            folder.absolute(), folder.absolute() / "wheels" / manifest["wheel"],
            manifest["sha256"], manifest["python"],
        )  # fmt: skip
        parts = {
            "wheel": (manifest["sha256"], sha256_of(house.wheel)),
            "lock": (manifest["lock"], sha256_of(folder / LOCK)),
            "suite": (manifest["suite"], gpu_report.dir_hash(house.project.suite)),
            "policy": (manifest["policy"], sha256_of(house.project.policy)),
            **{name: (sha256, sha256_of(folder / "wheels" / name))
               for name, sha256 in manifest.get("alias", {}).items()},
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"no {error} in {MANIFEST}" if isinstance(error, KeyError) else str(error)
        raise HashMismatchError(
            f"not a complete wheelhouse: {what}", where=str(folder), next_step=again
        ) from error
    if changed := [part for part, (known, found) in parts.items() if known != found]:
        raise HashMismatchError(
            f"changed since it was made: {', '.join(changed)}", where=str(folder), next_step=again
        )
    return house


def _target(wheel: Path) -> tuple[str, str, tuple[str, int]]:
    """Return the project, its version, and the machine with its glibc's minor version."""
    try:
        name, version, _, tags = parse_wheel_filename(wheel.name)
        wheel.stat()
    except (InvalidWheelFilename, FileNotFoundError) as error:
        raise AuditError(
            str(error), where=str(wheel), next_step="give the path of a wheel"
        ) from error
    for tag in tags:
        if match := re.fullmatch(r"manylinux_2_(\d+)_(\w+)", tag.platform):
            return name, str(version), (match[2], int(match[1]))
    return name, str(version), (platform.machine(), _NEWEST_GLIBC[1])


def _copy_wheel(wheel: Path, target: Path) -> str:
    if not target.exists() or sha256_of(target) != sha256_of(wheel):
        atomic.copy(wheel, target)
    return sha256_of(target)


def _lock(ours: Mapping[str, Path], python: str, target: tuple[str, int], suite: Path) -> str:
    """Resolve with uv: pip judges markers by the running interpreter, whatever it is told.

    :param ours: wheels that no index has, by project.
    """
    program = environment.uv()
    if program is None:
        raise ToolchainError(
            "uv is not installed, which resolves for another Python than this one",
            where="PATH",
            next_step=f"{sys.executable} -m pip install uv",
        )
    needs = suite / environment.REQUIREMENTS
    lines = "".join(f"{name} @ {wheel.absolute().as_uri()}\n" for name, wheel in ours.items())
    lines += needs.read_text() if needs.exists() else ""
    command = [
        program, "pip", "compile", "-", "--python-version", python,
        "--python-platform", f"{target[0]}-manylinux_2_{target[1]}",
        "--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate",
        *(option for name in ours for option in ("--no-emit-package", name)), "--quiet",
    ]  # fmt: skip
    folder = next(iter(ours.values())).parent
    return _run(command, lines, "the dependencies cannot be resolved to wheels", folder)


def _download(locked: str, wheels: Path, python: str, target: tuple[str, int]) -> None:
    arch, minor = target
    platforms = [f"manylinux_2_{n}_{arch}" for n in range(minor, _OLDEST_GLIBC - 1, -1)]
    platforms += [f"manylinux2014_{arch}", f"manylinux2010_{arch}", f"manylinux1_{arch}",
                  f"linux_{arch}"]  # fmt: skip
    count = len(re.findall(r"^\S+==", locked, re.MULTILINE))
    say(f"download: {counted(count, 'dependency', 'dependencies')}")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--dest", str(wheels),
        "--no-deps", "--require-hashes", "--only-binary", ":all:", "--python-version", python,
        "--implementation", "cp", *(f"--platform={name}" for name in platforms),
        "-r", "/dev/stdin",
    ]  # fmt: skip
    if count:
        _run(command, locked, "a dependency cannot be downloaded", wheels)


def _run(command: list[str], text: str, what: str, out: Path) -> str:
    run = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False,
        env=environment.variables_of_installers() | index_variables(),
    )  # fmt: skip
    if run.returncode:
        lines = redacted(run.stderr).strip().splitlines()
        if atomic.says_disk_full(lines, out):
            raise atomic.disk_full_error(out)
        raise PackageIndexError(
            what, where=Path(command[0]).name, details=tuple(lines[-15:]),
            next_step="see the resolver's words above, then run the command again",
        )  # fmt: skip
    return run.stdout


def _remove_others(wheels: Path, ours: AbstractSet[Path], locked: str) -> None:
    """Remove what an earlier lock asked for."""
    known = set(re.findall(r"sha256:([0-9a-f]{64})", locked))
    for path in wheels.iterdir():
        if path not in ours and path.is_file():
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() not in known:
                    path.unlink()


def _copy_tree(suite: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for name, source in gpu_report.suite_files(suite).items():
        atomic.write_bytes(target / name, source.read_bytes())
