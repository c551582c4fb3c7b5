"""A GPU machine without a GPU: a made-up torch whose cards a file describes, a tiny wheel, suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from builder import package_index
from tests.commands import run_builder
from tests.gate.reports import make_key
from tests.index.wheels import write_wheel

VERSION = "0.20.2+glm5.1"
UV = str(Path(sys.executable).with_name("uv"))
H200 = {"name": "NVIDIA H200", "capability": [9, 0], "memory": 150_000_000_000}
RTX = {"name": "NVIDIA RTX PRO 6000", "capability": [12, 0], "memory": 100_000_000_000}

TORCH = """
import json, os, types

__version__ = "2.11.0+fake"
version = types.SimpleNamespace(cuda="13.0")


def _cards():
    with open(os.environ["FAKE_GPU"]) as file:
        return json.load(file)


class ones:
    def __init__(self, count, device):
        self.count = count
        if _cards()[int(device[5:])].get("lost"):
            raise RuntimeError("CUDA error: GPU is lost")

    def sum(self):
        return self

    def item(self):
        return self.count


def _properties(number):
    card = _cards()[number]
    major, minor = card["capability"]
    return types.SimpleNamespace(
        name=card["name"], major=major, minor=minor, total_memory=card["memory"]
    )


cuda = types.SimpleNamespace(
    is_available=lambda: bool(_cards()),
    device_count=lambda: len(_cards()),
    get_device_properties=_properties,
)
"""
PACKAGE = {"vllm/__init__.py": "answer = 42\n", "vllm/core.py": "shared = 1\n"}
NVIDIA_SMI = "#!/bin/sh\necho 580.65.06\n"

POLICY = """\
allowed-signers = "allowed_signers"

[channels.stable]
capability = ">=9.0"
required-tests = ["test_good.py::*"]
max-age-days = 14
signers = ["gpu-gate"]
"""

GOOD = """
    import json, os
    import pytest
    import vllm

    def figure(name, value):
        path = os.environ["VLLM_GLM5_FIGURES"]
        known = json.load(open(path)) if os.path.exists(path) else {}
        json.dump(known | {name: value}, open(path, "w"))

    @pytest.fixture(scope="session")
    def process():
        return os.getpid()

    def test_one(process):
        figure("relative L2", 0.025)
        figure("not a number", float("nan"))
        assert vllm.answer == 42

    @pytest.mark.parametrize("kind", ["bf16", "q8_0"])
    def test_kinds(kind, process):
        figure(f"process {kind}", process)
"""


def write_dependencies(folder: Path) -> None:
    """Write what the wheel requires, as wheels."""
    write_wheel(folder, "2.11.0+fake", {"torch/__init__.py": TORCH}, name="torch")
    write_wheel(folder, "3.6.0", {"triton/__init__.py": ""}, name="triton")


def write_tested_wheel(folder: Path, files=PACKAGE, version=VERSION) -> Path:
    requires = ["torch==2.11.0+fake", "triton==3.6.0"]
    return write_wheel(folder, version, files, requires=requires)


def public_index() -> dict[str, str]:
    # Copies: an edit of a file that is a link would reach uv's cache.
    return {
        "UV_DEFAULT_INDEX": package_index.pip_settings().urls[0],
        "UV_NATIVE_TLS": "1",
        "UV_SYSTEM_CERTS": "1",
        "UV_LINK_MODE": "copy",
    }


def make_environment(folder: Path, wheel: Path, dependencies: Path) -> Path:
    """Make a virtual environment with the wheel, its made-up dependencies, and what the tests use."""
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", folder / "bin" / "python",
         "--find-links", dependencies, wheel, "pytest", "setproctitle"],
        check=True, env=os.environ | public_index(),
    )  # fmt: skip
    return folder / "bin" / "python"


# What a vLLM worker does: it writes its title over its arguments and, unless told not to, over the
# variables behind them. It says when it has, by its process id in a file.
WORKER = """
import os, pathlib, setproctitle, sys, time
setproctitle.setproctitle("VLLM::Worker_TP1")
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(1000)
"""
HANG = f"""
    import subprocess, sys, time
    import pytest

    WORKER = [sys.executable, "-c", {WORKER!r}, {{pid!r}}]

    @pytest.mark.timeout(5)
    def test_hang():
        # As an engine's: in a session of its own, and it outlives its parent.
        subprocess.Popen(WORKER, start_new_session=True)
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


class Lab:
    """A project folder of its own, a machine's cards, and the command on both."""

    def __init__(self, folder: Path, wheel: Path, python: Path):
        self.folder = folder
        self.wheel = wheel
        self.python = python
        self.cards(H200)
        self.suite = folder / "project" / "tests" / "gpu"
        self.suite.mkdir(parents=True)
        (folder / "project" / "ci").mkdir()
        (folder / "project" / "ci" / "policy.toml").write_text(POLICY)
        (folder / "project" / "ci" / "allowed_signers").write_text("")
        (folder / "project" / "upstream").mkdir()
        self.write("test_good.py", GOOD)
        self.report_path = folder / "out" / "gpu-report.json"
        programs = folder / "programs"
        programs.mkdir()
        (programs / "nvidia-smi").write_text(NVIDIA_SMI)
        (programs / "nvidia-smi").chmod(0o755)
        self.variables = {
            **os.environ,
            "FAKE_GPU": str(folder / "cards.json"),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "VLLM_GLM5_CACHE": str(folder / "cache"),
        }

    def cards(self, *cards) -> None:
        (self.folder / "cards.json").write_text(json.dumps(cards))

    def write(self, name: str, text: str) -> None:
        (self.suite / name).write_text(textwrap.dedent(text))

    def command(self, *arguments, **options):
        project = ["--project", self.folder / "project"]
        return run_builder(*project, *arguments, env=self.variables, check=False, **options)

    def test(self, *arguments, python=True, wheel=True):
        given = [self.wheel] if wheel else []
        where = ["--python", self.python] if python else []
        return self.command("test", *given, *where, "--report", self.report_path, *arguments)

    def start(self, *arguments, **how) -> subprocess.Popen:
        """Start the gate as ``test`` does, for who does something to it before it ends."""
        command = [sys.executable, "-m", "builder", "--project", self.folder / "project", "test",
                   self.wheel, "--python", self.python, "--report", self.report_path, *arguments]  # fmt: skip
        return subprocess.Popen(command, env=self.variables, **how)

    @property
    def statement(self) -> dict:
        return json.loads(self.report_path.read_text())

    @property
    def facts(self) -> dict:
        return self.statement["predicate"]["vllm-glm5"]

    @property
    def outcomes(self) -> dict[str, str]:
        return {test["name"]: test["outcome"] for test in self.facts["tests"]}

    def reason(self, name: str) -> str:
        return next(test["reason"] for test in self.facts["tests"] if test["name"] == name)

    def allowed_key(self) -> Path:
        key = make_key(self.folder, "gate-key")
        line = self.command("sign", "--key", key, "--show-line").stdout
        (self.folder / "project" / "ci" / "allowed_signers").write_text(line)
        return key
