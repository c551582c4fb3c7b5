"""Everything that the gate needs in one folder, and the gate on a machine without a network."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builder import environment
from builder.locations import default_project
from tests.commands import run_builder
from tests.gate import lab as labs
from tests.gate.lab import Lab, write_tested_wheel
from tests.index.wheels import write_wheel

HASH_MISMATCH, NO_PACKAGE, TOOLCHAIN = 4, 5, 14
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def filled(indexes, tested_wheel, gpu_python, tmp_path_factory):
    """A lab and the wheelhouse that it made."""
    lab = Lab(tmp_path_factory.mktemp("lab"), tested_wheel, gpu_python)
    lab.variables |= indexes
    lab.write("requirements.txt", "pytest>=8.3\n")
    house = lab.folder / "house"
    done = lab.command("wheelhouse", tested_wheel, "--python", THIS_PYTHON, "--out", house)
    assert done.returncode == 0, done.stderr
    assert f"test --wheelhouse {house}" in done.stdout
    return lab, house


@pytest.fixture
def house(filled, tmp_path):
    """A copy to spoil; the lab's report goes to a place of its own."""
    lab, made = filled
    lab.report_path = tmp_path / "gpu-report.json"
    copy = tmp_path / "house"
    shutil.copytree(made, copy)
    return copy


@pytest.fixture
def lab_of(filled):
    return filled[0]


def offline(lab, tmp_path):
    """A machine without a network and without a cache of any installer."""
    return lab.variables | {
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "PIP_CACHE_DIR": str(tmp_path / "pip"),
        "VLLM_GLM5_CACHE": str(tmp_path / "cache"),
    }


def test_it_holds_the_wheel_the_lock_the_suite_and_the_policy(filled, tested_wheel):
    lab, house = filled
    lock = (house / "requirements.txt").read_text()
    digest = hashlib.sha256(tested_wheel.read_bytes()).hexdigest()
    assert f"vllm-glm5==0.20.2+glm5.1 --hash=sha256:{digest}" in lock
    locked = re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)
    assert {"vllm-glm5", "torch", "triton", "pytest", "pluggy"} <= set(locked)
    assert len(list((house / "wheels").iterdir())) == len(locked)
    assert (house / "tests/gpu/test_good.py").read_text() == (
        lab.suite / "test_good.py"
    ).read_text()
    policy = lab.folder / "project/ci/policy.toml"
    assert (house / "ci/policy.toml").read_bytes() == policy.read_bytes()


def test_without_a_network_and_from_nothing_else(lab_of, house, tmp_path):
    cut_off = ["unshare", "-rn", sys.executable, "-m", "builder", "test", "--report",
               str(lab_of.report_path)]  # fmt: skip
    variables = offline(lab_of, tmp_path)
    run = functools.partial(
        subprocess.run, capture_output=True, text=True, env=variables, cwd=tmp_path, check=False
    )
    done = run([*cut_off, "--wheelhouse", str(house)])
    assert done.returncode == 0, done.stderr
    assert set(lab_of.outcomes.values()) == {"passed"}
    # Its own suite and policy, though the tool that runs has others.
    digest = hashlib.sha256((house / "ci/policy.toml").read_bytes()).hexdigest()
    configuration = lab_of.statement["predicate"]["configuration"]
    assert configuration[0]["digest"] == {"sha256": digest}
    assert default_project().policy.read_bytes() != (house / "ci/policy.toml").read_bytes()
    # Control: the index cannot be reached from there.
    assert run([*cut_off, str(lab_of.wheel)]).returncode == TOOLCHAIN
    # The publisher's machine takes the report for the same wheel, suite and policy.
    key = lab_of.allowed_key()
    lab_of.command("sign", lab_of.report_path, "--key", key)
    done = lab_of.command("check-report", lab_of.wheel, "--report", lab_of.report_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("requirements.txt", "lock"),
        ("tests/gpu/test_good.py", "suite"),
        ("ci/policy.toml", "policy"),
        ("wheels/vllm_glm5-0.20.2+glm5.1-py3-none-any.whl", "wheel"),
    ],
)
def test_a_changed_part_is_refused(lab_of, house, part, named):
    with (house / part).open("ab") as file:
        file.write(b"\n")
    done = lab_of.command("test", "--wheelhouse", house, "--report", lab_of.report_path)
    assert done.returncode == HASH_MISMATCH
    assert f"changed since it was made: {named}" in done.stderr


def test_a_changed_dependency_is_refused(lab_of, house, tmp_path):
    """By the installer, which the lock tells each hash."""
    assert (house / "wheels" / "triton-3.6.0-py3-none-any.whl").exists()
    write_wheel(house / "wheels", "3.6.0", {"triton/__init__.py": "x = 1"}, name="triton")
    done = run_builder("test", "--wheelhouse", house, "--report", lab_of.report_path,
                       env=offline(lab_of, tmp_path), check=False)  # fmt: skip
    assert done.returncode == TOOLCHAIN
    assert "hash" in done.stderr.lower()
    assert "triton" in done.stderr
    assert not lab_of.report_path.exists()


@pytest.mark.parametrize("spoil", ["no manifest", "no folder", "no wheel", "a text"])
def test_an_incomplete_one_is_refused(lab_of, house, spoil):
    if spoil == "no manifest":
        (house / "wheelhouse.json").unlink()
    elif spoil == "no wheel":
        shutil.rmtree(house / "wheels")
    elif spoil == "a text":
        (house / "wheelhouse.json").write_text("{")
    else:
        shutil.rmtree(house)
    done = lab_of.command("test", "--wheelhouse", house)
    assert done.returncode == HASH_MISMATCH
    assert "not a complete wheelhouse" in done.stderr


def test_another_wheel_than_its_own_is_refused(lab_of, house, tmp_path):
    other = write_tested_wheel(tmp_path, {"vllm/__init__.py": "answer = 43\n"})
    done = lab_of.command("test", other, "--wheelhouse", house)
    assert done.returncode == HASH_MISMATCH
    assert "not the wheel that the wheelhouse was made for" in done.stderr


def test_the_lock_is_for_the_other_python(lab_of, tmp_path):
    """A marker of pytest's own metadata says so: 3.10 needs tomli, 3.12 does not."""
    out = tmp_path / "house"

    def fill(python):
        command = ["wheelhouse", lab_of.wheel, "--python", python, "--out", out]
        done = lab_of.command(*command)
        assert done.returncode == 0, done.stderr
        assert json.loads((out / "wheelhouse.json").read_text())["python"] == python
        return {path.name.partition("-")[0] for path in out.rglob("*.whl")}

    older, newer = fill("3.10"), fill("3.12")
    # The folder was filled once more for another Python: it holds what that one needs, no more.
    assert older - newer >= {"tomli"}
    assert len(newer) == (out / "requirements.txt").read_text().count("==")


def test_a_dependency_that_nobody_has(lab_of, tmp_path):
    wheel = write_wheel(tmp_path, labs.VERSION, requires=["torch==9.9.9+nobody"])
    out = tmp_path / "house"
    done = lab_of.command("wheelhouse", wheel, "--python", THIS_PYTHON, "--out", out)
    assert done.returncode == NO_PACKAGE
    assert "torch==9.9.9+nobody" in done.stderr
    assert lab_of.command("test", "--wheelhouse", out).returncode == HASH_MISMATCH


def test_a_folder_with_other_things_is_left_alone(lab_of, tmp_path):
    """A checkout, say: it has folders of the same names."""
    kept = tmp_path / "tests" / "gpu" / "test_mine.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("precious")
    done = lab_of.command("wheelhouse", lab_of.wheel, "--python", THIS_PYTHON, "--out", tmp_path)
    assert done.returncode == 12
    assert "not empty, and no wheelhouse" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]


def test_killed_while_it_is_filled(lab_of, filled, tmp_path):
    """What is there is not complete; a second run completes it."""
    out = tmp_path / "house"
    command = [sys.executable, "-m", "builder", "--project", lab_of.folder / "project",
               "wheelhouse", lab_of.wheel, "--python", THIS_PYTHON, "--out", out]  # fmt: skip
    process = subprocess.Popen(command, env=lab_of.variables, stderr=subprocess.DEVNULL)
    while not (out / "wheels").exists() or not any((out / "wheels").glob("*.whl")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert lab_of.command("test", "--wheelhouse", out).returncode == HASH_MISMATCH
    assert subprocess.run(command, env=lab_of.variables, check=False).returncode == 0
    made = {path.name for path in (filled[1] / "wheels").iterdir()}
    assert {path.name for path in (out / "wheels").iterdir()} == made


def test_a_clean_environment_from_the_index(lab_of, tmp_path):
    """The default: nothing of the caller's environment is in it."""
    lab_of.report_path = tmp_path / "gpu-report.json"
    done = lab_of.test(python=False)
    assert done.returncode == 0, done.stderr
    assert set(lab_of.outcomes.values()) == {"passed"}
    assert not list((lab_of.folder / "cache" / "work").glob("*/environment"))
    assert "no NVIDIA driver is seen" not in done.stderr


def test_without_a_driver_it_says_so_before_it_installs(lab_of, tmp_path):
    lab_of.report_path = tmp_path / "gpu-report.json"
    lab_of.cards()
    programs = lab_of.folder / "programs"
    paths = [p for p in os.environ["PATH"].split(":") if not (Path(p) / "nvidia-smi").exists()]
    hidden = (programs / "nvidia-smi").rename(lab_of.folder / "nvidia-smi")
    try:
        done = run_builder(
            "--project", lab_of.folder / "project", "test", lab_of.wheel, "--report",
            lab_of.report_path, env=lab_of.variables | {"PATH": ":".join(paths)}, check=False,
        )  # fmt: skip
    finally:
        hidden.rename(programs / "nvidia-smi")
        lab_of.cards(labs.H200)
    assert lab_of.facts["faults"] == ["no GPU that can be used: torch finds none"]
    warned = done.stderr.find("no NVIDIA driver is seen on this machine")
    if Path("/proc/driver/nvidia").exists():
        assert warned == -1
    else:
        assert 0 <= warned < done.stderr.index("environment:")


def test_pip_does_where_there_is_no_uv(house, tmp_path, monkeypatch):
    from builder import wheelhouse

    monkeypatch.setattr(environment, "uv", lambda: None)
    made = environment.create(tmp_path / "env")
    environment.install(made, wheelhouse.read(house).install_arguments(), {"PIP_INDEX_URL": "x:"})
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([made.python, "-c", "import vllm, triton, pytest"], check=True, env=variables)


def test_no_such_wheel(tmp_path):
    name = "vllm_glm5-1+glm5.1-py3-none-any.whl"
    done = run_builder("wheelhouse", tmp_path / name, "--python", "3.12", "--out", tmp_path / "o",
                       check=False)  # fmt: skip
    assert done.returncode == 16
    assert "No such file" in done.stderr
    assert not (tmp_path / "o").exists()
