"""Build modes setup-py and source: upstream's own setup.py, run through the build package.

Both work in a throw-away clone of the patched tree (upstream's build writes into its tree), and
both end in the same writer as repack: what equals the official wheel is copied from it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO
from zipfile import ZipFile

from builder import atomic, metadata
from builder.console import say
from builder.errors import BuildFailedError, ToolchainError
from builder.locations import DISTRIBUTION, UPSTREAM_DISTRIBUTION, Cache
from builder.repack import WheelInputs, own_members, wheel_member
from builder.repository import ATTRIBUTES, Git
from builder.wheel_archive import CHUNK, Content, dist_info_of, read_record, write_wheel
from builder.wheel_name import dist_info_name

# With precompiled extensions nothing is compiled, and the stand-in answers for torch.
_NOT_NEEDED = {"torch", "cmake", "ninja"}

# What a build from source takes from the user's environment; all but the two that set how many
# processes run decide what is compiled.
COMPILER_VARIABLES = ("TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CC", "CXX")
SOURCE_VARIABLES = (*COMPILER_VARIABLES, "MAX_JOBS", "NVCC_THREADS")

# How cmake, compilers and ninja begin what stopped them.
_CAUSE = re.compile(r"^CMake Error|(^|: )(fatal )?error: |^nvcc fatal|^FAILED: |^ninja: error")
_TRACEBACK = "Traceback (most recent call last)"
_SHOWN = 15

# All that upstream's setup.py (0.16 to 0.33) asks of torch.
_STAND_IN = {
    "torch/__init__.py": "from . import version\n",
    "torch/version.py": "cuda = {cuda!r}\nhip = None\nxpu = None\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": "CUDA_HOME = None\nROCM_HOME = None\n",
}


def setup_py(inputs: WheelInputs, out: IO[bytes], cache: Cache) -> None:
    """Build with precompiled extensions and without torch; no network during the build.

    :raises BuildFailedError: with the last lines of upstream's output; the whole log is kept.
    """
    from packaging.requirements import Requirement  # noqa: PLC0415 - keeps --help quick

    with atomic.scratch_folder(cache.work) as scratch:
        tree = _clone(inputs, scratch)
        wanted = [
            text for text in _build_requirements(tree) if Requirement(text).name not in _NOT_NEEDED
        ]
        python = _environment(wanted, cache)
        stand_in = scratch / "stand-in"
        for name, text in _STAND_IN.items():
            path = stand_in / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(cuda=inputs.pin.cuda or None))
        abi, arch = _tags(inputs.official.name)
        variables = _variables(inputs, scratch) | {
            "PYTHONPATH": str(stand_in),
            "VLLM_USE_PRECOMPILED": "1",
            "VLLM_PRECOMPILED_WHEEL_LOCATION": str(inputs.official),
        }
        # Without these two upstream's setup.py names the wheel after this interpreter. The
        # official WHEEL file says linux_ARCH; only the file's name says manylinux.
        options = [f"--py-limited-api={abi}", f"--plat-name=linux_{arch}"]
        say(f"build: upstream's setup.py, precompiled, {inputs.official.name}")
        raw = _build(tree, python, variables, options, scratch, cache, isolate=True)
        _write_from(raw, inputs, out, scratch)


def source(inputs: WheelInputs, out: IO[bytes], cache: Cache) -> str:
    """Compile everything with the real torch; return the wheel's own tags.

    ``SOURCE_VARIABLES`` are taken from the environment. The caller has asked ``require_nvcc``.

    :raises BuildFailedError: with the last lines of upstream's output; the whole log is kept.
    """
    with atomic.scratch_folder(cache.work) as scratch:
        tree = _clone(inputs, scratch)
        python = _environment(_build_requirements(tree), cache)
        variables = _variables(inputs, scratch) | {
            name: os.environ[name] for name in SOURCE_VARIABLES if name in os.environ
        }
        # cmake and ninja are there.
        variables["PATH"] = f"{python.parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
        say("build: upstream's setup.py from source; this takes hours for the real vLLM")
        raw = _build(tree, python, variables, [], scratch, cache, isolate=False)
        _write_from(raw, inputs, out, scratch, own_tags=True)
        return "-".join(raw.name.removesuffix(".whl").split("-")[-3:])


def rewrite(wheel: Path, inputs: WheelInputs, out: IO[bytes], scratch: Path) -> None:
    """Write a compiled wheel's members anew, as its build wrote them."""
    _write_from(wheel, inputs, out, scratch, own_tags=True)


def require_nvcc(cuda: str) -> None:
    """Refuse to start a source build without the CUDA compiler of the release.

    :param cuda: the pin's CUDA version; empty where the release needs none.
    :raises ToolchainError: nvcc is missing or of another major version.
    """
    if not cuda:
        return
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None) or shutil.which("nvcc")
    if nvcc is None:
        raise ToolchainError(
            f"--mode source needs nvcc of CUDA {cuda}, and there is none; nothing was started",
            where="PATH, CUDA_HOME",
            next_step=f"install the CUDA {cuda} toolkit and set CUDA_HOME",
        )
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found is None or found[1] != cuda.partition(".")[0]:
        raise ToolchainError(
            f"nvcc is of CUDA {found[0] if found else 'an unknown version'}, the release of {cuda}",
            where=nvcc,
            next_step=f"set CUDA_HOME to a CUDA {cuda} toolkit",
        )


def _clone(inputs: WheelInputs, scratch: Path) -> Path:
    tree = scratch / "tree"
    repository = inputs.applied.repository
    tree.mkdir()
    git = Git(tree)
    # A repository has to be there: setuptools-scm asks git which data files ship.
    git.run("init", "--quiet", "--template=", "--initial-branch=build")
    for name, text in (
        ("objects/info/alternates", f"{repository.folder / 'objects'}\n"),
        ("info/attributes", ATTRIBUTES),
    ):
        path = tree / ".git" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git.run("reset", "--quiet", "--hard", inputs.applied.head)
    _rename(tree / "pyproject.toml")
    return tree


def _rename(pyproject: Path) -> None:
    import tomlkit  # noqa: PLC0415

    document = tomlkit.parse(pyproject.read_text(encoding="utf-8"))
    project = document["project"]
    assert isinstance(project, dict)  # noqa: S101 - TOML table
    if project.get("name") != UPSTREAM_DISTRIBUTION:
        raise BuildFailedError(
            f"upstream's project is called {project.get('name')!r}",
            where="pyproject.toml",
            next_step="report this: the release was made in a new way",
        )
    project["name"] = DISTRIBUTION
    pyproject.write_text(tomlkit.dumps(document), encoding="utf-8")


def _build_requirements(tree: Path) -> list[str]:
    data = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    requires: list[str] = data["build-system"]["requires"]
    return sorted(requires)


def _environment(wanted: Sequence[str], cache: Cache) -> Path:
    """Return the interpreter of an environment with these requirements; cached."""
    key = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:16]
    folder = cache.environments / key
    python = folder / "bin" / "python"
    with atomic.exclusive(folder, "the build environment"):
        if not (folder / "complete").exists():
            say(f"build: making an environment with {', '.join(wanted)}")
            shutil.rmtree(folder, ignore_errors=True)
            # pip can install into another environment; without it there, each gets its own.
            has_pip = importlib.util.find_spec("pip") is not None
            bare, pip = (
                (["--without-pip"], [sys.executable, "-m", "pip", "--python", str(python)])
                if has_pip
                else ([], [str(python), "-m", "pip"])
            )
            what = "the build environment"
            _call([sys.executable, "-m", "venv", *bare, str(folder)], what)
            _call([*pip, "install", "--quiet", "--no-compile", *wanted], what)
            atomic.write_text(folder / "complete", "\n".join(wanted))
    return python


def _call(command: Sequence[str], what: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        if atomic.says_disk_full(run.stderr.splitlines(), Path(command[0])):
            raise atomic.disk_full_error(Path(command[0]))
        raise BuildFailedError(
            f"{what} cannot be made (status {run.returncode})",
            where=command[0],
            details=tuple((run.stderr or run.stdout).strip().splitlines()[-10:]),
            next_step="check pip's configuration and the network, then run the command again",
        )


def _tags(official: str) -> tuple[str, str]:
    """Return the limited-API tag and the architecture of the official wheel's name."""
    python, _, platform = official.removesuffix(".whl").split("-")[-3:]
    arch = re.search(r"(x86_64|aarch64)$", platform)
    return python, arch[1] if arch else platform


def _variables(inputs: WheelInputs, scratch: Path) -> dict[str, str]:
    keep = ("PATH", "LANG", "SSL_CERT_FILE", "PIP_CERT", "PIP_INDEX_URL")
    date = inputs.applied.repository.text("log", "-1", "--format=%at", inputs.applied.base)
    return {name: os.environ[name] for name in keep if name in os.environ} | {
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "SOURCE_DATE_EPOCH": date,
        "VLLM_VERSION_OVERRIDE": inputs.version,
        "SETUPTOOLS_SCM_PRETEND_VERSION": inputs.version,
        "VLLM_TARGET_DEVICE": "cuda" if inputs.pin.cuda else "empty",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }


def _offline_prefix() -> list[str]:
    """Return a command prefix that takes the network away, where the kernel allows it."""
    if shutil.which("unshare"):
        probe = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
        if probe.returncode == 0:
            return ["unshare", "-rn"]
    say("build: no network namespace here; upstream's build is trusted not to use the network")
    return []


def _build(
    tree: Path,
    python: Path,
    variables: Mapping[str, str],
    options: Sequence[str],
    scratch: Path,
    cache: Cache,
    *,
    isolate: bool,
) -> Path:
    import build  # noqa: PLC0415 - slow to import

    prefix = _offline_prefix() if isolate else []
    log = cache.root / "logs" / f"build-{variables['VLLM_VERSION_OVERRIDE']}.log"
    log.parent.mkdir(parents=True, exist_ok=True)

    def run(
        cmd: Sequence[str],
        cwd: str | None = None,
        extra_environ: Mapping[str, str] | None = None,
    ) -> None:
        with log.open("ab") as file:
            subprocess.run(
                [*prefix, *cmd], cwd=cwd, env={**variables, **(extra_environ or {})},
                stdout=file, stderr=subprocess.STDOUT, check=True,
            )  # fmt: skip

    log.write_bytes(b"")
    builder = build.ProjectBuilder(tree, python_executable=str(python), runner=run)
    settings = {"--build-option": list(options)} if options else None
    try:
        return Path(builder.build("wheel", scratch / "out", settings))
    except (build.BuildBackendException, build.BuildException, subprocess.CalledProcessError) as e:
        lines = log.read_text(errors="replace").strip().splitlines()
        if atomic.says_disk_full(lines, scratch):
            raise atomic.disk_full_error(scratch) from e
        raise BuildFailedError(
            f"upstream's build failed: {type(e).__name__}",
            where=str(log),
            details=telling(lines),
            next_step="read the log; --mode repack needs no build where it is faithful",
        ) from e


def telling(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of a build's output that say why it failed.

    Behind what cmake or a compiler says stand the tracebacks of those who had called it.
    """
    first = next((n for n, line in enumerate(lines) if _CAUSE.search(line)), len(lines))
    end = next((n for n in range(first, len(lines)) if lines[n].startswith(_TRACEBACK)), 0)
    return tuple(lines[first:end][:_SHOWN] if end else lines[-_SHOWN:])


def _write_from(
    raw: Path, inputs: WheelInputs, out: IO[bytes], scratch: Path, *, own_tags: bool = False
) -> None:
    """Write the final wheel: raw's members, those that equal official ones copied from there.

    :param own_tags: the wheel is for what raw's tags say, not for what the official one's say.
    """
    overlay: dict[str, Content] = {}
    dist_info = dist_info_name(inputs.version)
    with ZipFile(raw) as built, ZipFile(inputs.official) as official:
        new = dist_info_of(built.namelist(), raw.name)
        old = dist_info_of(official.namelist(), inputs.official.name)
        record, known = read_record(built, new), read_record(official, old)
        for name, entry in record.items():
            final = name.replace(f"{new}/", f"{dist_info}/", 1)
            before = name.replace(f"{new}/", f"{old}/", 1)
            if known.get(before) == entry:
                continue
            path = scratch / "members" / final
            path.parent.mkdir(parents=True, exist_ok=True)
            with built.open(name) as member, path.open("wb") as file:
                shutil.copyfileobj(member, file, CHUNK)
            # git's two modes: the build's umask must not show.
            is_executable = built.getinfo(name).external_attr >> 16 & 0o100
            overlay[final] = Content(path, 0o755 if is_executable else 0o644)
        present = {name.replace(f"{new}/", f"{old}/", 1) for name in record}
        removed = frozenset(set(known) - present)
        overlay |= own_members(inputs)
        if inputs.own_requirements:
            text = built.read(f"{new}/METADATA").decode()
            text = metadata.with_requirements(text, inputs.own_requirements)
            overlay[f"{dist_info}/METADATA"] = Content(text.encode())
        if own_tags:
            text = wheel_member(built.read(f"{new}/WHEEL").decode())
            overlay[f"{dist_info}/WHEEL"] = Content(text.encode())
    write_wheel(inputs.official, out, overlay, removed, dist_info)
