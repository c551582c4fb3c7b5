"""The gate on made-up suites: each way a test can end, in real processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time

import pytest

from tests.gate.lab import H200, HANG, RTX, alive

GOOD_TESTS = {
    "test_good.py::test_one": "passed",
    "test_good.py::test_kinds[bf16]": "passed",
    "test_good.py::test_kinds[q8_0]": "passed",
}
GATE_FAILED, REPORT_REFUSED, MISMATCH = 26, 23, 27


def test_a_pass(lab):
    done = lab.test()
    assert done.returncode == 0, done.stderr
    assert lab.outcomes == GOOD_TESTS
    statement = lab.statement
    digest = hashlib.sha256(lab.wheel.read_bytes()).hexdigest()
    assert statement["subject"] == [{"name": lab.wheel.name, "digest": {"sha256": digest}}]
    assert statement["predicate"]["result"] == "PASSED"
    policy = (lab.folder / "project" / "ci" / "policy.toml").read_bytes()
    assert statement["predicate"]["configuration"][0] == {
        "name": "ci/policy.toml", "digest": {"sha256": hashlib.sha256(policy).hexdigest()},
    }  # fmt: skip
    environment = lab.facts["environment"]
    python = subprocess.run([lab.python, "-V"], capture_output=True, text=True, check=True).stdout
    assert environment == {
        "gpus": [{"name": "NVIDIA H200", "capability": "9.0", "memory": 150_000_000_000}],
        "driver": "580.65.06",
        "cuda": "13.0",
        "torch": "2.11.0+fake",
        "triton": "3.6.0",
        "python": python.split()[1],
    }
    figures = {test["name"]: test["figures"] for test in lab.facts["tests"]}
    assert figures["test_good.py::test_one"] == {"relative L2": 0.025, "not a number": "nan"}
    assert "[2/3] passed" in done.stderr
    assert "sign it: python -m builder sign" in done.stdout


def test_all_tests_share_a_process_while_they_pass(lab):
    lab.test()
    processes = {
        value
        for test in lab.facts["tests"]
        for name, value in test["figures"].items()
        if name.startswith("process")
    }
    assert len(processes) == 1


def test_a_report_names_no_path_user_or_host(lab):
    lab.write(
        "test_bad.py",
        "def test_bad(tmp_path):\n assert not tmp_path, f'{tmp_path} {__file__}'",
    )
    assert lab.test().returncode == GATE_FAILED
    text = lab.report_path.read_text()
    assert "test_bad.py" in text
    for secret in (str(lab.folder), "/tmp/", "/root", os.uname().nodename):
        assert secret not in text


BAD_SUITES = {
    "fails": ("def test_bad():\n    assert 1 == 2, 'the sum is wrong'", "failed", "sum is wrong"),
    "fixture": (
        "import pytest\n@pytest.fixture\ndef x(): raise OSError('no model')\ndef test_bad(x): pass",
        "failed",
        "setup: OSError: no model",
    ),
    "segfault": ("import ctypes\ndef test_bad():\n    ctypes.string_at(0)", "crash", "SIGSEGV"),
    "exit": ("import os\ndef test_bad():\n    os._exit(7)", "crash", "exit code 7"),
    "abort": (
        "import os, sys\ndef test_bad():\n    os.write(2, b'terminate called\\n'); os.abort()",
        "crash",
        "SIGABRT",
    ),
    "killed": ("import os\ndef test_bad():\n    os.kill(os.getpid(), 9)", "crash", "SIGKILL"),
    "strict xpass": (
        "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_bad(): pass",
        "failed",
        "XPASS",
    ),
}


@pytest.mark.parametrize("case", BAD_SUITES)
def test_a_test_that_goes_wrong_takes_no_other_along(lab, case):
    text, outcome, reason = BAD_SUITES[case]
    lab.write("test_bad.py", text + "\n\ndef test_after(): pass\n")
    done = lab.test()
    assert done.returncode == GATE_FAILED, done.stderr
    bad = "test_bad.py::test_bad"
    assert lab.outcomes == {bad: outcome, "test_bad.py::test_after": "passed"} | GOOD_TESTS
    assert reason in lab.reason(bad)
    assert lab.statement["predicate"]["result"] == "FAILED"
    assert lab.statement["predicate"]["failedTests"] == [bad]
    assert bad in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hang_is_killed_with_all_that_it_started(lab):
    child = lab.folder / "child"
    lab.write("test_a_hang.py", HANG.format(pid=str(child)))
    began = time.monotonic()
    assert lab.test().returncode == GATE_FAILED
    assert time.monotonic() - began < 40
    assert lab.outcomes == {"test_a_hang.py::test_hang": "hang"} | GOOD_TESTS
    assert "not over after 5 s" in lab.reason("test_a_hang.py::test_hang")
    assert not alive(int(child.read_text()))
    log = lab.report_path.with_suffix(".log").read_text()
    assert "test_hang" in log.partition("Current thread")[2] or "in test_hang" in log


def test_the_limit_of_tests_without_a_mark(lab):
    lab.write("test_slow.py", "import time\ndef test_slow():\n    time.sleep(60)")
    assert lab.test("--time-limit", 2).returncode == GATE_FAILED
    assert lab.outcomes["test_slow.py::test_slow"] == "hang"


@pytest.mark.parametrize("how", ["raise RuntimeError('CUDA error')", "os._exit(1)"])
def test_a_lost_gpu_ends_the_run(lab, how):
    lost = f"""
        import json, os
        def test_lost():
            with open(os.environ['FAKE_GPU'], 'w') as file:
                json.dump([{{'lost': True}}], file)
            {how}
    """
    lab.write("test_a_lost.py", lost)
    done = lab.test()
    assert done.returncode == GATE_FAILED
    assert lab.outcomes == {"test_a_lost.py::test_lost": "gpu-lost"} | dict.fromkeys(
        GOOD_TESTS, "not-run"
    )
    assert "GPU is lost" in lab.reason("test_a_lost.py::test_lost")
    assert any(fault.startswith("the GPU was lost") for fault in lab.facts["faults"])


def test_one_card_of_two_is_lost(lab):
    lab.cards(H200, H200)
    lab.write(
        "test_a_lost.py",
        "import json, os\ndef test_lost():\n    path = os.environ['FAKE_GPU']\n"
        "    cards = json.load(open(path))\n    json.dump(cards[:1], open(path, 'w'))\n"
        "    assert False",
    )
    lab.test()
    assert "1 of 2 answer" in lab.reason("test_a_lost.py::test_lost")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import pytest\n@pytest.mark.skip(reason='no CUDA device')\ndef test_a(): pass", "1 of"),
        ("import pytest\npytest.skip('no torch', allow_module_level=True)", "1 of them skipped"),
        ("x = 1", "0 tests collected"),
        ("import not_there", "test_good.py cannot be collected: .*not_there"),
        ("import os; os._exit(3)", "exit code 3 outside of a test"),
        ("def test_a(): pass\n)", "SyntaxError"),
    ],
)
def test_a_suite_in_which_nothing_ran_is_a_failure(lab, text, fault):
    import re

    lab.write("test_good.py", text)
    assert lab.test().returncode == GATE_FAILED
    assert lab.statement["predicate"]["result"] == "FAILED"
    assert any(re.search(fault, found) for found in lab.facts["faults"]), lab.facts["faults"]
    assert any("nothing ran" in found for found in lab.facts["faults"])


def test_an_empty_suite(lab):
    (lab.suite / "test_good.py").unlink()
    assert lab.test().returncode == GATE_FAILED
    assert any("nothing ran" in found for found in lab.facts["faults"])


ENDS_BADLY = {
    "signal": ("import atexit, os\natexit.register(os.abort)", "died by SIGABRT"),
    "exit code": ("import atexit, os\natexit.register(os._exit, 3)", "ended with exit code 3"),
    "end of pytest": ("def pytest_unconfigure(): raise OSError", "ended with exit code 1"),
    "end of the session": (
        (
            "import pytest\n@pytest.hookimpl(wrapper=True)\n"
            "def pytest_sessionfinish():\n    yield\n    raise OSError"
        ),
        "ended with exit code 1",
    ),
    "error of pytest": (
        (
            "import pytest\n@pytest.hookimpl(trylast=True)\n"
            "def pytest_runtest_logfinish(nodeid):\n    if 'q8_0' in nodeid: raise OSError"
        ),
        "ended with exit code 3",
    ),
}


@pytest.mark.parametrize("case", ENDS_BADLY)
def test_a_process_that_dies_after_its_last_test(lab, case):
    text, how = ENDS_BADLY[case]
    lab.write("conftest.py", text)
    assert lab.test().returncode == GATE_FAILED
    assert lab.outcomes == GOOD_TESTS
    assert f"{how} outside of a test" in lab.facts["faults"][0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_process_that_stops_early_and_well(lab, jobs):
    """The rest runs in a new one, whose end is as good."""
    lab.write("test_a.py", "def test_a(request):\n    request.session.shouldstop = 'enough'")
    assert lab.test("--jobs", jobs).returncode == 0
    assert lab.outcomes == {"test_a.py::test_a": "passed"} | GOOD_TESTS


def test_a_pass_that_is_not_enough_for_a_channel(lab):
    """Said when it is over, and not when somebody wants to publish."""
    assert "channel  stable takes it\n" in lab.test().stdout
    path = lab.folder / "project" / "ci" / "policy.toml"
    path.write_text(path.read_text() + 'at-least = { "soak: seconds" = 3600 }\n')
    done = lab.test()
    assert done.returncode == 0
    assert "channel  stable refuses it: it has no figure 'soak: seconds'" in done.stdout


def test_a_report_does_not_take_the_place_of_the_wheel(lab):
    before = lab.wheel.read_bytes()
    link = lab.folder / "report.json"
    link.hardlink_to(lab.wheel)
    for path in (lab.wheel, link):
        done = lab.command("test", lab.wheel, "--python", lab.python, "--report", path)
        assert done.returncode == 2
        assert "names the wheel itself" in done.stderr
        assert path.read_bytes() == before


def test_no_gpu(lab):
    lab.cards()
    done = lab.test()
    assert done.returncode == GATE_FAILED
    assert lab.facts["faults"] == ["no GPU that can be used: torch finds none"]
    assert "next: run it where `nvidia-smi` lists a GPU" in done.stderr


def test_require_capability(lab):
    done = lab.test("--require-capability", "12.0")
    assert done.returncode == REPORT_REFUSED
    assert "NVIDIA H200 has compute capability 9.0, not ==12.0" in done.stderr
    assert not lab.report_path.exists()
    lab.cards(RTX)
    assert lab.test("--require-capability", "12.0").returncode == 0


def test_only(lab):
    lab.write("test_other.py", "def test_other():\n    assert False")
    assert lab.test("--only", "test_good.py::*").returncode == 0
    assert lab.outcomes == GOOD_TESTS | {"test_other.py::test_other": "not-run"}


def test_the_callers_variables_and_plugins_do_not_decide(lab):
    lab.variables |= {
        "PYTEST_ADDOPTS": "-k nothing",
        "VLLM_GLM5_TREE": "/nowhere",
        "VLLM_USE_X": "",
        "TRITON_INTERPRET": "1",
    }
    names = "{'VLLM_GLM5_TREE', 'VLLM_USE_X', 'PYTEST_ADDOPTS', 'TRITON_INTERPRET'}"
    lab.write(
        "test_env.py", f"import os\ndef test_env():\n    assert not {names} & set(os.environ)"
    )
    done = lab.test()
    assert done.returncode == 0, done.stderr


def test_assertions_of_the_suites_helpers_count(lab):
    """pytest keeps those of test files itself, and no others, where Python leaves them out."""
    (lab.suite / "helper.py").write_text("def check(value):\n    assert value, 'compared wrong'\n")
    lab.write("test_a.py", "import helper\ndef test_a():\n    helper.check(0)")
    lab.variables["PYTHONOPTIMIZE"] = "1"
    assert lab.test().returncode == GATE_FAILED
    assert "compared wrong" in lab.reason("test_a.py::test_a")


def test_a_signed_report_goes_through_to_the_channel(lab):
    key = lab.allowed_key()
    assert lab.test("--key", key).returncode == 0
    check = ["check-report", lab.wheel, "--report", lab.report_path]
    done = lab.command(*check)
    assert done.returncode == 0, done.stderr
    assert "into stable, signed by gpu-gate" in done.stdout
    assert lab.command(*check, "--require-capability", "12.0").returncode == REPORT_REFUSED
    # A new run takes the old signature away.
    lab.write("test_bad.py", "def test_bad():\n    assert False")
    assert lab.test("--key", key).returncode == GATE_FAILED
    done = lab.command(*check)
    assert done.returncode == 24
    assert "the report is not signed" in done.stderr
    lab.command("sign", lab.report_path, "--key", key)
    assert "test_bad.py::test_bad: failed" in lab.command(*check).stderr


def test_a_key_that_cannot_sign_is_told_before_the_run(lab):
    done = lab.test("--key", lab.folder / "missing")
    assert done.returncode == 14
    assert "did not sign" in done.stderr
    assert "GPU:" not in done.stderr


def test_two_gates_take_turns(lab):
    """Each suite insists that it is alone on the card."""
    mark = lab.folder / "mark"
    lab.write(
        "test_alone.py",
        f"import pathlib, time\ndef test_alone():\n    mark = pathlib.Path({str(mark)!r})\n"
        "    mark.touch(exist_ok=False)\n    time.sleep(4)\n    mark.unlink()",
    )
    gates = [
        lab.start("--report", lab.folder / f"{number}.json", stderr=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    said = [gate.communicate(timeout=90)[1] for gate in gates]
    assert [gate.returncode for gate in gates] == [0, 0], said
    assert sum("waiting: another process is at work on this machine's GPU" in text
               for text in said) == 1  # fmt: skip


def test_memory_that_is_freed_late_is_no_lost_gpu(lab):
    """The card answers again a moment after the test that had it full was killed."""
    lab.write(
        "test_a_full.py",
        """
        import json, os, subprocess, sys
        BACK = "import json, os, sys, time; time.sleep(1.5); open(sys.argv[1], 'w').write(sys.argv[2])"
        def test_full():
            path = os.environ["FAKE_GPU"]
            cards = open(path).read()
            left = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_GLM5")}
            subprocess.Popen([sys.executable, "-c", BACK, path, cards], env=left,
                             start_new_session=True)
            with open(path, "w") as file:
                json.dump([{"lost": True}], file)
            os._exit(1)
        """,
    )
    lab.test()
    assert lab.outcomes == {"test_a_full.py::test_full": "crash"} | GOOD_TESTS
