"""Trees and interpreters for the tests of patches 0001 and 0002, and an isolated pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import each_release

pytest_generate_tests = each_release
VERSION = "0.20.2+glm5.1"


@pytest.fixture(scope="session")
def site_without_vllm(tmp_path_factory, vllm_environment) -> tuple[Path, Path]:
    """An interpreter with vLLM's dependencies, and a folder that shows them without vLLM itself.

    The interpreter's own site-packages hold the distribution ``vllm``, which would answer the
    look-ups under test: it is to be run with ``-I -S`` and this folder on ``sys.path``.
    """
    python = vllm_environment
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    view = tmp_path_factory.mktemp("site-without-vllm")
    for entry in Path(site).iterdir():
        if entry.name != "vllm" and not entry.name.startswith(("vllm-", "vllm_glm5-")):
            (view / entry.name).symlink_to(entry)
    return python, view


@pytest.fixture(scope="session")
def renamed_distribution(tmp_path_factory) -> Path:
    """A folder with the metadata of ``vllm-glm5`` alone, as the renamed wheel installs it."""
    folder = tmp_path_factory.mktemp("renamed")
    dist_info = folder / f"vllm_glm5-{VERSION}.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: vllm-glm5\nVersion: {VERSION}\nProvides-Extra: audio\n"
        'Requires-Dist: no_such_module_1234; extra == "audio"\n'
    )
    return folder


class Environment:
    """A virtual environment that pip and uv fill from local files, whatever their configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        names = {"PATH", "HOME", "TMPDIR", "LANG"}
        self.variables = {k: v for k, v in os.environ.items() if k in names}
        self.variables |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "UV_NO_CONFIG": "1",
            "UV_OFFLINE": "1",
            "UV_CACHE_DIR": str(folder / "uv-cache"),
        }

    def run(self, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=self.variables,
            cwd=self.folder,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}")
        return done

    def pip(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(self.python, "-m", "pip", *arguments, check=check)

    def uv(self, verb: str, *rest: str | Path, check: bool = True):
        return self.run("uv", "pip", verb, "--python", self.python, *rest, check=check)

    def code(self, source: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(self.python, "-c", source, check=check)


@pytest.fixture(scope="session")
def empty_environment(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def environment(tmp_path, empty_environment) -> Environment:
    """A fresh environment, one for each test: these tests break it."""
    shutil.copytree(empty_environment, tmp_path / "environment", symlinks=True)
    made = Environment(tmp_path / "environment")
    made.variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{made.variables['PATH']}"
    return made
