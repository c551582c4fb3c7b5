"""The tool as a user runs it, against real servers."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from builder import cli
from builder.locations import default_cache
from tests.index.conftest import Environment, empty_environment, environment, isolated_variables

from . import servers
from .release import Release

__all__ = ["Environment", "empty_environment", "environment"]


@pytest.fixture
def release(tmp_path):
    return Release(tmp_path)


@dataclasses.dataclass(frozen=True)
class Finished:
    output: str
    error: str


class Tool:
    """``python -m builder``, with no credentials but those that a test gives it."""

    def __init__(self, release: Release, home) -> None:
        self.release = release
        self.variables = isolated_variables(home) | {
            "VLLM_GLM5_CACHE": str(home / "cache"),
            "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring",
            "PIP_INDEX_URL": "https://public.invalid/simple",
        }

    def command(self, *arguments):
        root = ["--project", self.release.root]
        return [sys.executable, "-m", "builder", *map(str, [*root, *arguments])]

    def start(self, *arguments, **variables):
        return subprocess.Popen(
            self.command(*arguments), env=self.variables | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.release.root,
        )  # fmt: skip

    def run(self, *arguments, code=0, **variables):
        """Run the command line in this process, which takes a tenth of a new one's time."""
        output, error = io.StringIO(), io.StringIO()
        command = list(map(str, ["builder", "--project", self.release.root, *arguments]))
        with (
            mock.patch.dict(os.environ, self.variables | variables, clear=True),
            mock.patch.object(sys, "argv", command),
            mock.patch.object(cli.State, "cache", default_cache()),
            mock.patch.object(cli.State, "project", None),
            mock.patch.object(cli.State, "as_json", False),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(error),
        ):
            cli.State.cache = default_cache()
            found = cli.main()
        assert found == code, output.getvalue() + error.getvalue()
        return Finished(output.getvalue(), error.getvalue())

    def json(self, *arguments, **variables):
        return json.loads(self.run(*arguments, "--json", **variables).output)


@pytest.fixture
def tool(release, tmp_path):
    (tmp_path / "home").mkdir()
    return Tool(release, tmp_path / "home")


@pytest.fixture(scope="session")
def devpi(tmp_path_factory):
    with servers.devpi(tmp_path_factory.mktemp("devpi")) as server:
        server.names = (f"team{n}" for n in itertools.count())
        server.reader = server.user("reader")
        yield server


@pytest.fixture
def team(devpi):
    """A devpi user of this test's own, with the indexes staging and stable."""
    owner = devpi.user(next(devpi.names))
    devpi.index(owner, "staging")
    devpi.index(owner, "stable")
    return owner


@pytest.fixture
def pypiserver(tmp_path):
    with servers.pypiserver(tmp_path / "pypiserver") as url:
        yield url


def as_user(user=servers.USER, password=servers.PASSWORD):
    return {"TWINE_USERNAME": user, "TWINE_PASSWORD": password}


@pytest.fixture(params=["pypiserver", "devpi"])
def server(request):
    """A server's index that takes tested wheels: its URL, its simple URL, and who may upload."""
    if request.param == "pypiserver":
        url = request.getfixturevalue("pypiserver")
        return url, f"{url}simple/", as_user()
    devpi, team = request.getfixturevalue("devpi"), request.getfixturevalue("team")
    url = f"{devpi.url}{team[0]}/stable/"
    return url, f"{url}+simple/", as_user(*team)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
