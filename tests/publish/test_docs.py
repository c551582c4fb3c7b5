"""What docs/publishing.md tells people to type."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from builder import cli
from tests.commands import ROOT

from . import servers
from .conftest import as_user
from .release import VERSION

PAGE = (ROOT / "docs" / "publishing.md").read_text()


def lines(program):
    found = [line.strip().partition("  #")[0] for line in PAGE.splitlines()
             if line.startswith(f"    {program} ")]  # fmt: skip
    assert found, program
    return found


def test_each_command_takes_these_options(monkeypatch):
    for line in lines("python -m builder"):
        monkeypatch.setattr(sys, "argv", ["builder", *shlex.split(line)[3:], "--help"])
        assert cli.main() == 0, line


def test_the_errors_page_has_our_codes():
    from builder import errors

    page = (ROOT / "docs" / "errors.md").read_text()
    for kind in (errors.UploadRefusedError, errors.UnsupportedByServerError,
                 errors.UploadFailedError):  # fmt: skip
        assert f"| {kind.exit_code} | `{kind.__name__}` |" in page


@pytest.fixture
def index(tmp_path):
    return tmp_path / "index"


def test_the_directory_index(release, tool, index):
    """The lines of its section, in order, on a wheel of the version that they name."""
    wheel = release.wheel()
    report = release.report(wheel)
    section = PAGE.partition("### A directory index")[2].partition("### ")[0]
    commands = [line.strip() for line in section.splitlines() if line.startswith("    python")]
    assert len(commands) == 5
    replaced = {"WHEEL": wheel, "gpu-report.json": report, "/srv/glm5": index}
    for command in commands:
        words = [str(replaced.get(word, word)) for word in shlex.split(command)[3:]]
        assert VERSION in " ".join(words), "the version that the wheel has"
        tool.run(*words)


def test_devpi_as_its_own_client_sets_it_up(release, tool, devpi, tmp_path):
    name = next(devpi.names)
    bases = devpi.index(devpi.user(f"{name}-public"), "pypi")
    root = bases.removeprefix(devpi.url).rstrip("/")
    passwords = {"root": devpi.root[1], name: servers.PASSWORD}
    for line in lines("devpi"):
        words = [w.replace("URL", devpi.url).replace("glm5", name).replace("root/pypi", root)
                 for w in shlex.split(line)]  # fmt: skip
        if words[1] == "login":
            words += ["--password", passwords[words[2]]]
        if words[1] == "user":
            words += [f"password={servers.PASSWORD}", "email=a@b.invalid"]
        done = subprocess.run(
            [sys.executable, "-m", "devpi", *words[1:], "--clientdir", str(tmp_path / "client")],
            capture_output=True, text=True, check=False,
            env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""},
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    wheel = release.wheel()
    replaced = {"WHEEL": wheel, "gpu-report.json": release.report(wheel)}
    section = PAGE.partition("### devpi")[2].partition("### ")[0]
    commands = [line.strip() for line in section.splitlines() if line.startswith("    python")]
    assert len(commands) == 2
    for command in commands:
        words = [str(replaced.get(word, word)) for word in shlex.split(command)[3:]]
        words = [word.replace("URL/glm5", f"{devpi.url}{name}") for word in words]
        tool.run(*words, **as_user(name))
