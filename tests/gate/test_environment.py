"""What the environment imports is the wheel's content, or there is no report."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys

import pytest

from builder.wheel_archive import record_hash
from tests.gate import lab as labs
from tests.gate.lab import PACKAGE, UV, Lab, write_tested_wheel

MISMATCH = 27


@pytest.fixture
def own(tmp_path, tested_wheel, dependencies, network):
    """A lab whose environment may be spoilt."""
    python = labs.make_environment(tmp_path / "env", tested_wheel, dependencies)
    return Lab(tmp_path, tested_wheel, python)


def site(lab: Lab):
    return next((lab.folder / "env" / "lib").glob("python*/site-packages"))


def refused(lab: Lab, *lines: str) -> None:
    done = lab.test()
    assert done.returncode == MISMATCH, done.stderr
    for line in lines:
        assert line in done.stderr
    assert not lab.report_path.exists()


def test_spoilt_environments_are_refused(own):
    """Each is mended before the next: what is left is the cause that is named."""
    package = site(own) / "vllm"
    assert own.test().returncode == 0
    own.report_path.unlink()

    (package / "core.py").write_text("shared = 2\n")
    refused(own, "differs  vllm/core.py")
    (package / "core.py").unlink()
    refused(own, "missing  vllm/core.py")
    (package / "core.py").write_text(PACKAGE["vllm/core.py"])

    (package / "left_over.py").write_text("")
    refused(own, "not in the wheel  vllm/left_over.py")
    (package / "left_over.py").rename(package / "left_over.cpython-311-x86_64-linux-gnu.so")
    refused(own, "not in the wheel  vllm/left_over.cpython-311-x86_64-linux-gnu.so")
    (package / "left_over.cpython-311-x86_64-linux-gnu.so").rename(package / "a_cache.json")

    # RECORD says that all is well: it was edited along with the file.
    record = next(site(own).glob("vllm_glm5-*/RECORD"))
    kept = record.read_text()
    (package / "core.py").write_text("shared = 3\n")
    digest = record_hash(hashlib.sha256(b"shared = 3\n").digest())
    lines = [f"vllm/core.py,{digest},11" if line.startswith("vllm/core.py") else line
             for line in kept.splitlines()]  # fmt: skip
    record.write_text("\n".join(lines) + "\n")
    refused(own, "differs  vllm/core.py")
    (package / "core.py").write_text(PACKAGE["vllm/core.py"])
    assert own.test().returncode == 0


def test_another_revision_of_the_wheel_is_refused(lab, tmp_path):
    lab.wheel = write_tested_wheel(tmp_path / "other", version="0.20.2+glm5.2")
    refused(lab, "it has vllm-glm5 0.20.2+glm5.1, not 0.20.2+glm5.2")


def test_other_bytes_under_the_same_version_are_refused(lab, tmp_path):
    lab.wheel = write_tested_wheel(tmp_path / "other", PACKAGE | {"vllm/core.py": "shared = 9\n"})
    refused(lab, "differs  vllm/core.py")


def test_an_environment_without_the_wheel_is_refused(lab):
    lab.python = sys.executable
    refused(lab, "vllm-glm5 is not installed")


def test_a_package_that_hides_the_wheels_is_refused(lab, tmp_path):
    hiding = tmp_path / "hiding"
    (hiding / "vllm").mkdir(parents=True)
    (hiding / "vllm" / "__init__.py").write_text("answer = 42\n")
    lab.variables["PYTHONPATH"] = f"{hiding}:{lab.variables.get('PYTHONPATH', '')}"
    refused(lab, "import vllm takes another file")


def test_a_suite_that_imports_another_package_fails(lab):
    """Only what the suite's process does shows this: the environment itself is right."""
    lab.write(
        "conftest.py",
        "import pathlib, sys\nhere = pathlib.Path(__file__).parent / 'hidden'\n"
        "sys.path.insert(0, str(here))\n",
    )
    (lab.suite / "hidden" / "vllm").mkdir(parents=True)
    (lab.suite / "hidden" / "vllm" / "__init__.py").write_text("answer = 42\n")
    assert lab.test().returncode == 26
    fault = "import vllm took __init__.py from outside the checked environment"
    assert lab.facts["faults"] == [fault]


def test_a_folder_on_pythonpath_is_an_environment_too(lab, tmp_path, dependencies):
    """As on a GPU machine where the wheel was installed with --target."""
    target = tmp_path / "site"
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", sys.executable, "--target", target,
         "--find-links", dependencies, lab.wheel],
        check=True, env=os.environ | labs.public_index(),
    )  # fmt: skip
    lab.python = sys.executable
    lab.variables["PYTHONPATH"] = f"{lab.variables.get('PYTHONPATH', '')}:{target}"
    done = lab.test()
    assert done.returncode == 0, done.stderr
    assert set(lab.outcomes.values()) == {"passed"}


@pytest.mark.parametrize("python", ["no-such-python", "/etc/hostname"])
def test_no_interpreter(lab, python):
    lab.python = python
    done = lab.test()
    assert done.returncode in {14, MISMATCH}
    assert "Traceback" not in done.stderr
    assert python in done.stderr


@pytest.mark.parametrize("spoil", ["missing", "cut", "text", "unlisted"])
def test_a_file_that_is_no_wheel(lab, tmp_path, spoil):
    import zipfile

    wheel = tmp_path / "broken" / lab.wheel.name
    wheel.parent.mkdir()
    if spoil == "cut":
        wheel.write_bytes(lab.wheel.read_bytes()[:300])
    elif spoil == "text":
        wheel.write_text("no wheel")
    elif spoil == "unlisted":
        shutil.copyfile(lab.wheel, wheel)
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("vllm/slipped_in.py", "")
    lab.wheel = wheel
    done = lab.test()
    assert done.returncode == 16, done.stderr
    assert "Traceback" not in done.stderr
