"""The made-up upstream, its package index, and projects on it; the tool runs as a user runs it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.build import madeup
from tests.build.package_server import PackageServer
from tests.commands import ROOT, advised


@cache
def path_without_nvcc() -> str:
    """PATH with every program but nvcc, wherever that lies."""
    kept = []
    for folder in map(Path, os.get_exec_path()):
        if (folder / "nvcc").exists():
            copy = Path(tempfile.mkdtemp(prefix="vllm-glm5-path-"))
            atexit.register(shutil.rmtree, copy, ignore_errors=True)
            for program in folder.iterdir():
                if program.name != "nvcc":
                    (copy / program.name).symlink_to(program)
            kept.append(str(copy))
        else:
            kept.append(str(folder))
    return os.pathsep.join(kept)


@dataclass
class User:
    """Somebody with a project, a cache and a package index, and no other settings."""

    project: Path
    cache: Path
    home: Path
    index_url: str
    extra: dict[str, str] = field(default_factory=dict)

    def environment(self, **more: str) -> dict[str, str]:
        base = {
            "PATH": path_without_nvcc(),
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "VLLM_GLM5_CACHE": str(self.cache),
            "PIP_INDEX_URL": self.index_url,
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }
        return base | self.extra | more

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "builder", "--project", str(self.project),
                *map(str, arguments)]  # fmt: skip

    def run(self, *arguments: object, cwd: Path | None = None, **environment: str):
        """Run the tool; whatever happens, nobody sees a traceback."""
        process = subprocess.run(
            self.command(*arguments),
            cwd=cwd or self.home, env=self.environment(**environment),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in process.stderr, process.stderr
        return process

    def ok(self, *arguments: object, cwd: Path | None = None, **environment: str):
        process = self.run(*arguments, cwd=cwd, **environment)
        assert process.returncode == 0, process.stderr
        return process

    def fails(self, code: int, *arguments: object, **environment: str) -> str:
        """Run what must fail with this exit code; return the message."""
        process = self.run(*arguments, **environment)
        assert process.returncode == code, (process.returncode, process.stderr, process.stdout)
        assert "next:" in process.stderr
        return process.stderr

    def advised(self, text: str) -> str:
        """Return the text as it is printed to who named the project."""
        return advised(text, self.project)

    def build(self, *arguments: object, out: Path | None = None, stage: bool = False, **env: str):
        """Build the release of the project; return the parsed result."""
        tag = next((self.project / "upstream").glob("*.toml")).stem
        out = out or self.home / "dist"
        staging = [] if stage else ["--no-stage"]
        run = self.ok("--tag", tag, "--out", out, *staging, "--json", *arguments, **env)
        return json.loads(run.stdout)

    @property
    def tag(self) -> str:
        return next((self.project / "upstream").glob("*.toml")).stem


@pytest.fixture(scope="session")
def upstream(tmp_path_factory, setuptools_wheel):
    return madeup.make_upstream(tmp_path_factory.mktemp("upstream"), setuptools_wheel)


@pytest.fixture(scope="session")
def _server(upstream):
    with PackageServer(upstream.files) as server:
        yield server


@pytest.fixture
def index(_server):
    """The package index, behaving well and holding upstream's files."""
    _server.reset()
    return _server


@pytest.fixture(scope="session")
def pin_files(_server, upstream, tmp_path_factory):
    """The pins that the tool itself writes for both releases."""
    folder = tmp_path_factory.mktemp("pins")
    (folder / "home").mkdir()
    user = User(folder / "project", folder / "cache", folder / "home", _server.url)
    for tag in (madeup.TAG, madeup.SOURCE_TAG):
        user.ok("pin", tag)
    return {p.stem: p for p in (folder / "project" / "upstream").glob("*.toml")}


@pytest.fixture(scope="session")
def environments(tmp_path_factory):
    """Where build environments are kept, so that not every cache makes its own."""
    return tmp_path_factory.mktemp("environments")


@pytest.fixture
def make_user(index, upstream, pin_files, tmp_path, environments):
    """Make users: their own project and cache, or parts of another user's."""
    made = []

    def make(patches=madeup.SERIES, *, tag=madeup.TAG, project=None, cache=None):
        folder = tmp_path / f"user{len(made)}"
        (folder / "home").mkdir(parents=True)
        if project is None:
            project = madeup.make_project(folder / "project", upstream, pin_files[tag], patches)
        if cache is None:
            cache = folder / "cache"
            cache.mkdir()
            (cache / "environments").symlink_to(environments)
        made.append(User(project, cache, folder / "home", index.url))
        return made[-1]

    return make


@pytest.fixture(scope="session")
def plain_sha256(_server, upstream, pin_files, tmp_path_factory):
    """The sha256 of the wheel that the made-up release with its plain series ends in."""
    folder = tmp_path_factory.mktemp("plain")
    _server.reset()
    project = madeup.make_project(folder / "project", upstream, pin_files[madeup.TAG])
    return User(project, folder / "cache", folder, _server.url).build()["sha256"]


@pytest.fixture(scope="session")
def build_wheel(_server, upstream, pin_files):
    """A function that builds a series in a folder: its user, and the wheel's bytes."""

    def build(folder: Path, patches=madeup.SERIES) -> tuple[User, bytes]:
        _server.reset()
        project = madeup.make_project(folder / "project", upstream, pin_files[madeup.TAG], patches)
        user = User(project, folder / "cache", folder, _server.url)
        return user, Path(user.build()["wheel"]).read_bytes()

    return build


@pytest.fixture
def verify(built, tmp_path, monkeypatch):
    """verify() of some bytes against the project of the module's ``built``."""
    from builder import pipeline
    from builder.locations import Cache, Project

    user, _ = built
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")  # everything is in the cache

    def check(data: bytes, name: str = madeup.WHEEL_NAME):
        path = tmp_path / name
        path.write_bytes(data)
        return pipeline.verify(path, Project(user.project), Cache(user.cache))[0]

    return check


@pytest.fixture
def user(make_user):
    return make_user()
