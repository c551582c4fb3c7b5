"""The gate on a wheel that requires its alias, which no index has before the gate has passed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from builder.alias import alias_name, write_alias
from tests.gate import lab as labs
from tests.gate.lab import UV, VERSION, Lab
from tests.index.wheels import write_wheel

HASH_MISMATCH, MISMATCH = 4, 27
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
BOTH = """
    import importlib.metadata

    def test_both():
        versions = {importlib.metadata.version(name) for name in ("vllm", "vllm-glm5")}
        assert len(versions) == 1, versions
"""


@pytest.fixture
def requiring(lab, indexes, tmp_path):
    """A lab whose wheel requires its alias; none lies beside it."""
    requires = ["torch==2.11.0+fake", "triton==3.6.0", f"vllm=={VERSION}"]
    lab.wheel = write_wheel(tmp_path / "requiring", VERSION, labs.PACKAGE, requires=requires)
    lab.variables |= indexes
    lab.write("requirements.txt", "pytest>=8.3\n")
    lab.write("test_both.py", BOTH)
    return lab


def passed(lab: Lab, done) -> None:
    assert done.returncode == 0, done.stderr
    assert lab.outcomes["test_both.py::test_both"] == "passed"
    assert not lab.wheel.with_name(alias_name(VERSION)).exists()


def test_a_clean_environment_has_both(requiring):
    passed(requiring, requiring.test(python=False))


def test_an_alias_beside_it_that_is_none_is_refused(requiring, tmp_path):
    write_wheel(requiring.wheel.parent, VERSION, {"vllm/evil.py": ""}, name="vllm")
    done = requiring.test(python=False)
    assert done.returncode == 16
    assert "not the alias that this tool writes" in done.stderr


def test_a_wheelhouse_has_both(requiring, tmp_path):
    house = tmp_path / "house"
    done = requiring.command("wheelhouse", requiring.wheel, "--python", THIS_PYTHON, "--out", house)
    assert done.returncode == 0, done.stderr
    alias = house / "wheels" / alias_name(VERSION)
    digest = hashlib.sha256(alias.read_bytes()).hexdigest()
    lock = (house / "requirements.txt").read_text()
    assert f"vllm=={VERSION} --hash=sha256:{digest}" in lock
    assert len(list(house.glob("wheels/*.whl"))) == lock.count("==")
    passed(
        requiring,
        requiring.command("test", "--wheelhouse", house, "--report", requiring.report_path),
    )
    with alias.open("ab") as file:
        file.write(b"x")
    done = requiring.command("test", "--wheelhouse", house, "--report", requiring.report_path)
    assert done.returncode == HASH_MISMATCH
    assert f"changed since it was made: {alias.name}" in done.stderr


def test_an_environment_without_the_alias_is_refused(requiring, dependencies, tmp_path):
    """As pip leaves it with --no-deps: what is tested is not what users will have."""
    python = labs.make_environment(tmp_path / "env", write_tested(tmp_path), dependencies)
    requiring.python = python

    def install(*wheels):
        command = [UV, "pip", "install", "--quiet", "--python", python, "--no-deps", *wheels]
        subprocess.run(command, check=True, env=os.environ | labs.public_index())

    install("--reinstall", requiring.wheel)
    done = requiring.test()
    assert done.returncode == MISMATCH
    assert f"requires its alias vllm=={VERSION}, and there is none" in done.stderr
    (tmp_path / "alias").mkdir()
    install(write_alias(VERSION, tmp_path / "alias"))
    passed(requiring, requiring.test())


def write_tested(tmp_path):
    return labs.write_tested_wheel(tmp_path / "plain")
