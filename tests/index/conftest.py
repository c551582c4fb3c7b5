"""Real environments that pip and uv fill from a local index and from nowhere else."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from builder.serve import make_server

from .wheels import write_wheel

ROOT = Path(__file__).resolve().parent.parent.parent


def isolated_variables(home: Path) -> dict[str, str]:
    """Return variables with which no configuration of this machine counts."""
    names = {"PATH", "LANG", "TMPDIR"}
    kept = {name: value for name, value in os.environ.items() if name in names}
    return kept | {
        "HOME": str(home),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PYTHONPATH": str(ROOT),
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(home / "uv-cache"),
    }


class Environment:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.variables = isolated_variables(folder)
        del self.variables["PYTHONPATH"]
        tools = Path(sys.executable).parent
        self.variables["PATH"] = f"{folder}/bin:{tools}:{self.variables['PATH']}"
        self.variables["VIRTUAL_ENV"] = str(folder)

    @property
    def site(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def run(self, *command, check=True, **variables):
        done = subprocess.run(
            [*map(str, command)], env=self.variables | variables, cwd=self.folder,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}")
        return done

    def pip(self, *arguments, **options):
        return self.run(self.python, "-m", "pip", *arguments, **options)

    def uv(self, verb, *arguments, **options):
        return self.run("uv", "pip", verb, "--python", self.python, *arguments, **options)

    def install_with(self, tool, url, *requirements, check=True):
        """Install from this index alone."""
        if tool == "pip":
            return self.pip("install", "--index-url", url, *requirements, check=check)
        return self.uv("install", "--default-index", url, *requirements, check=check)

    def version(self, name="vllm-glm5"):
        source = f"import importlib.metadata as m; print(m.version({name!r}))"
        return self.run(self.python, "-c", source).stdout.strip()


@pytest.fixture(scope="session")
def empty_environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def environment(tmp_path, empty_environment):
    # Links are quick, and safe: installers replace files and never write into them.
    folder = tmp_path / "environment"
    shutil.copytree(empty_environment, folder, symlinks=True, copy_function=os.link)
    for script in folder.glob("bin/pip*"):
        script.unlink()  # its first line names the interpreter of the template
    (folder / "bin" / "pip").write_text('#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n')
    (folder / "bin" / "pip").chmod(0o755)
    yield Environment(folder)
    left = {p.name for p in empty_environment.glob("lib/python3*/site-packages/*")}
    assert not any("vllm" in name for name in left), "the template was installed into"


@pytest.fixture
def wheel(tmp_path):
    return write_wheel(tmp_path / "built", "0.20.2+glm5.1")


@contextlib.contextmanager
def served(index, prefix=""):
    with make_server(index, "127.0.0.1", 0, prefix=prefix) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
