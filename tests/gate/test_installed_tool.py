"""The tool's own wheel carries suite, policy, patches and pins; it works without the checkout."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile

import pytest

from builder import gpu_report
from tests.commands import ROOT
from tests.gate.lab import UV, Lab, public_index

# What `builder test` imports; the rest of the tool's dependencies is for other commands.
RUN_TIME = ["typer", "packaging", "filelock"]


@pytest.fixture(scope="module")
def tool_wheel(network, tmp_path_factory):
    out = tmp_path_factory.mktemp("tool")
    subprocess.run(
        [UV, "build", "--quiet", "--wheel", "--out-dir", out, ROOT],
        check=True, env=os.environ | public_index(),
    )  # fmt: skip
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def tool(tool_wheel, tmp_path_factory):
    """The tool's interpreter, with no more than what the gate needs."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    python = folder / "bin" / "python"
    for what in (["--no-deps", tool_wheel], RUN_TIME):
        subprocess.run(
            [UV, "pip", "install", "--quiet", "--python", python, *what],
            check=True, env=os.environ | public_index(),
        )  # fmt: skip
    return python


def run(tool, lab, *arguments):
    variables = {k: v for k, v in lab.variables.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [tool, "-m", "builder", *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=lab.folder, env=variables,
    )  # fmt: skip


def test_the_wheel_holds_each_file_once_and_no_bytecode(tool_wheel):
    names = zipfile.ZipFile(tool_wheel).namelist()
    assert len(names) == len(set(names))
    assert not [name for name in names if name.endswith(".pyc") or "__pycache__" in name]
    for part in ("tests/gpu", "patches", "upstream"):
        tracked = subprocess.run(
            ["git", "ls-files", part], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        assert tracked
        assert {f"builder/data/{name}" for name in tracked} <= set(names)


def test_the_shipped_suite_runs_without_the_checkout(tool, lab: Lab):
    """On a machine whose environment lacks what the suite needs: each file of it says so."""
    done = run(tool, lab, "test", lab.wheel, "--python", lab.python, "--report", lab.report_path)
    assert done.returncode == 26, done.stderr
    assert "Traceback" not in done.stderr
    policy, suite = lab.statement["predicate"]["configuration"]
    digest = hashlib.sha256((ROOT / "ci" / "policy.toml").read_bytes()).hexdigest()
    assert policy["digest"] == {"sha256": digest}
    assert suite["digest"] == {"dirHash": gpu_report.dir_hash(ROOT / "tests" / "gpu")}
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    seen = {f.partition(" ")[0] for f in lab.facts["faults"] if "cannot be collected" in f}
    seen |= {test["name"].partition("::")[0] for test in lab.facts["tests"]}
    assert seen == files
    assert any("numpy" in fault for fault in lab.facts["faults"])


def test_a_suite_of_the_users_passes_by_the_installed_tool(tool, lab: Lab):
    options = ["--project", lab.folder / "project"]
    done = run(tool, lab, *options, "test", lab.wheel, "--python", lab.python,
               "--report", lab.report_path, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
    assert set(lab.outcomes.values()) == {"passed"}


def test_the_shipped_policy_refuses_it_for_the_stable_channel(tool, lab: Lab):
    lab.test()
    done = run(tool, lab, "check-report", lab.wheel, "--report", lab.report_path)
    assert done.returncode == 24
    assert "not signed, and stable requires it" in done.stderr
