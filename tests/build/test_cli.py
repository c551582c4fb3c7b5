"""The command line: what it says, in which words and with which exit code."""

from __future__ import annotations

import inspect
import json
import re
import statistics
import subprocess
import time

import pytest

from builder import errors
from builder.repository import GitError
from tests.build import madeup
from tests.commands import ROOT


def every_error():
    found = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.BuilderError)
    ]
    return [*found, GitError]


def test_each_cause_has_an_exit_code_of_its_own_and_is_documented():
    codes = {}
    for kind in every_error():
        codes.setdefault(kind.exit_code, []).append(kind.__name__)
    shared = {code: names for code, names in codes.items() if len(names) > 1}
    assert shared == {1: ["BuilderError", "GitError"]}
    assert not {0, 2, 130} & codes.keys()  # done, usage, interrupted
    table = (ROOT / "docs" / "errors.md").read_text()
    documented = dict(re.findall(r"^\| (\d+) \| `(\w+)`", table, re.MULTILINE))
    for code, (name, *_) in codes.items():
        if code != 1:
            assert documented[str(code)] == name


def test_an_unknown_tag_lists_those_that_are_pinned(user):
    said = user.fails(3, "--tag", "v0.99.0")
    assert "v9.1.0" in said
    assert user.advised("write a pin with: python -m builder pin v0.99.0") in said
    pin = user.project / "upstream" / "v9.1.0.toml"
    (pin.parent / "v0.99.0.toml").write_text(pin.read_text().replace("v9.1.0", "v0.99.0"))
    said = user.fails(3, "--tag", "v0.99.0")  # pinned, and without a series
    assert "no series" in said
    assert "mkdir -p" in said


@pytest.mark.parametrize("command", ["build", "series", "revision", "edit", "export"])
def test_every_command_refuses_an_unknown_tag(user, command):
    arguments = [] if command == "build" else [command]
    user.fails(3, *arguments, "--tag", "v0.99.0", *(["--check"] if command == "export" else []))


def test_errors_as_json(user):
    process = user.run("--tag", "v0.99.0", "--json")
    facts = json.loads(process.stdout)
    assert facts["error"] == "UnknownTagError"
    assert facts["exit_code"] == process.returncode == 3
    assert set(facts) == {"error", "exit_code", "what", "where", "details", "next"}
    assert facts["what"] in process.stderr
    assert facts["next"] in process.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "fast"],
        ["--no-such-option"],
        ["no-such-command"],
        ["--source", "git"],
        ["--upstream-url", "x"],
        ["--source", "svn", "--upstream-url", "x"],
        ["pin"],
        ["verify"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(user, arguments):
    with_tag = ["--tag", user.tag] if arguments[0].startswith("--") else []
    process = user.run(*with_tag, *arguments)
    assert process.returncode == 2, process.stderr
    assert process.stderr.strip()
    assert not process.stdout


def test_a_missing_tag_is_usage(user):
    assert user.run("--json").returncode == 2


@pytest.mark.parametrize("what", ["out is a file", "cache is a file", "out cannot be written"])
def test_a_path_that_does_not_work_is_named(user, tmp_path, what):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    environment, out = {}, tmp_path / "dist"
    if what == "out is a file":
        out = blocked / "dist"
    elif what == "cache is a file":
        environment["VLLM_GLM5_CACHE"] = str(blocked)
    else:
        out = "/proc/dist"
    process = user.run("--tag", user.tag, "--no-stage", "--out", out, "--json", **environment)
    assert process.returncode == 1
    assert ("/proc" if out == "/proc/dist" else "blocked") in process.stderr
    assert json.loads(process.stdout)["exit_code"] == 1


def test_output_into_a_closed_pipe_is_no_drama(user):
    run = subprocess.run(
        ["sh", "-c", '"$@" | true', "sh", *user.command("--help")],
        env=user.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in run.stderr


def test_help_is_quick_and_names_every_command(user):
    times = []
    for _ in range(3):
        start = time.monotonic()
        said = user.ok("--help").stdout
        times.append(time.monotonic() - start)
    for command in (
        "pin",
        "series",
        "edit",
        "export",
        "revision",
        "verify",
        "serve",
        "doctor",
        "clean",
    ):
        assert command in said
    for option in ("--tag", "--arch", "--mode", "--source", "--upstream-url", "--out", "--index"):
        assert option in said
    assert statistics.median(times) < 1.5  # 0.25 s on an idle machine: no slow import at the top
    modules = user.ok("--help", PYTHONPROFILEIMPORTTIME="1").stderr
    for slow in ("requests", "rich.progress", "cyclonedx", "pypi_simple", "build.env"):
        assert f" {slow}\n" not in modules


def test_a_machine_without_git(user):
    said = user.fails(14, "--tag", user.tag, PATH="/nonexistent")
    assert "git is not installed" in said


def test_the_last_lines_say_how_to_install(user):
    index = user.home / "index"
    text = user.ok("--tag", user.tag, "--index", index).stdout
    tail = text[text.index("install it with") :]
    assert "pip install" in tail
    assert "uv pip install" in tail
    assert "9.1.0+glm5.1" in tail
    assert "all explained" in text
    assert "0001-Bugfix-Start-without-a-name.patch" in text
    assert "vllm/engine.py" in text


def test_the_alias_comes_with_it(user):
    result = user.build("--with-alias")
    assert result["alias"].endswith("vllm-9.1.0+glm5.1-py3-none-any.whl")


def test_a_changed_series_needs_a_new_revision(user, upstream):
    first = user.build()
    folder = user.project / "patches" / madeup.TAG
    patch = next(folder.glob("0001-*.patch"))
    patch.write_bytes(patch.read_bytes().replace(b'+        return "?"', b'+        return "!"'))
    said = user.fails(19, "--tag", user.tag)
    assert user.advised("python -m builder revision --tag v9.1.0 --raise") in said
    user.ok("revision", "--tag", user.tag, "--raise")
    second = user.run("--tag", user.tag, "--no-stage", "--json")
    # The blob id of the hand-edited patch is stale; whatever the verdict, N has moved on.
    assert second.returncode in (0, 8, 9, 10)
    assert user.ok("revision", "--tag", user.tag).stdout.strip() == "+glm5.2"
    assert first["version"] == "9.1.0+glm5.1"
