"""Tests that do what no test should: what they do to the gate, its report and its key."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from builder import environment, gpu_process
from builder.gpu_process import Process, Progress, Suite
from builder.gpu_report import Outcome
from tests.gate.lab import WORKER
from tests.gate.test_gate import GATE_FAILED, GOOD_TESTS, alive

LEFT = """
    import os, time

    def test_forks():
        child = os.fork()
        assert child, "the child's answer is wrong"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_that_leaves_its_test(lab):
    """Its failure counts, and it runs no further test: those are its parent's."""
    lab.write("test_a.py", LEFT)
    done = lab.test()
    assert done.returncode == GATE_FAILED
    assert lab.outcomes == {"test_a.py::test_forks": "passed"} | GOOD_TESTS
    (fault,) = lab.facts["faults"]
    assert "test_forks: a process that it forked came out of the test" in fault
    assert "the child's answer is wrong" in fault
    assert done.stderr.count("test_good.py::test_one") == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_line_that_is_no_event(lab, jobs):
    lab.write(
        "test_a.py",
        "import os\ndef test_a():\n"
        "    with open(os.environ['VLLM_GLM5_GATE_EVENTS'], 'ab') as file:\n"
        '        file.write(b\'\\xff no event\\n[1]\\n{"event": "end"}\\n\')',
    )
    done = lab.test("--jobs", jobs)
    assert done.returncode == GATE_FAILED
    assert "Traceback" not in done.stderr
    assert lab.outcomes == {"test_a.py::test_a": "passed"} | GOOD_TESTS
    assert len(lab.facts["faults"]) == 3
    assert all("no event of the gate's plugin" in fault for fault in lab.facts["faults"])


WRONG_FACTS = [{"figures": []}, {"figures": None}, {"seconds": 1e999}, {"seconds": "1"},
               {"reason": 7}, {"name": {}}, {"outcome": "perfect"}]  # fmt: skip


def test_an_event_of_the_wrong_form(lab):
    """JSON, and an event by its name: the report is written all the same, and says so."""
    right = {"event": "end", "name": "x", "outcome": "passed", "seconds": 1, "reason": "",
             "figures": {}}  # fmt: skip
    lines = "".join(json.dumps(right | wrong) + "\n" for wrong in WRONG_FACTS)
    lab.write(
        "test_a.py",
        "import os\ndef test_a():\n"
        "    with open(os.environ['VLLM_GLM5_GATE_EVENTS'], 'a') as file:\n"
        f"        file.write({lines!r})",
    )
    done = lab.test()
    assert done.returncode == GATE_FAILED, done.stderr
    assert lab.outcomes == {"test_a.py::test_a": "passed"} | GOOD_TESTS
    assert len(lab.facts["faults"]) == len(WRONG_FACTS)


@pytest.mark.parametrize("end", ["pass", "os._exit(1)"])
@pytest.mark.parametrize("figures", ["[1]", "null", "{", "7", "[" * 100_000])
def test_figures_that_are_none(lab, figures, end):
    lab.write(
        "test_a.py",
        "import os\ndef test_a():\n"
        "    with open(os.environ['VLLM_GLM5_FIGURES'], 'w') as file:\n"
        f"        file.write({figures!r})\n    {end}",
    )
    (lab.suite / "test_good.py").write_text("def test_one(): pass\n")
    lab.test()
    how = "passed" if end == "pass" else "crash"
    assert lab.outcomes == {"test_a.py::test_a": how, "test_good.py::test_one": "passed"}


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("limit", ["inf", "nan", "-1"])
def test_a_limit_that_no_test_can_reach(lab, limit, jobs):
    lab.write(
        "test_a.py",
        f"import pytest, time\n@pytest.mark.timeout(float('{limit}'))\n"
        "def test_slow():\n    time.sleep(100)\n"
        f"@pytest.mark.timeout(float('{limit}'))\ndef test_quick(): pass",
    )
    assert lab.test("--jobs", jobs, "--time-limit", 3).returncode == GATE_FAILED
    outcomes = {"test_a.py::test_slow": "hang", "test_a.py::test_quick": "passed"}
    assert lab.outcomes == outcomes | GOOD_TESTS


@pytest.fixture
def unkillable(monkeypatch):
    """Signals that do not arrive, as at a process that waits for a driver in the kernel."""
    kill, started = os.kill, []

    class Watched(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *_: None)
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(subprocess, "Popen", Watched)
        yield started
    for process in started:
        kill(process.pid, signal.SIGKILL)
        process.wait()


def sleeping(folder):
    program = folder / "python"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    return program


def test_a_process_that_no_signal_ends(tmp_path, monkeypatch, unkillable):
    """The report has to be written: whoever reads it restarts the machine."""
    monkeypatch.setattr(gpu_process, "OUTSIDE_LIMIT", 1)
    monkeypatch.setattr(gpu_process, "_DEATH_LIMIT", 1)
    suite = Suite(
        python=sleeping(tmp_path), folder=tmp_path, scratch=tmp_path, variables={}, packages=(),
        only=(), limit=1, jobs=1, log=tmp_path / "log", gpu_lost=str,
    )  # fmt: skip
    progress = Progress()
    assert not Process(suite, progress, None).run()
    assert unkillable[0].poll() is None  # the control: it is still there
    hangs, stays = progress.faults
    assert "hangs outside of a test" in hangs
    assert "cannot be killed" in stays


def test_a_probe_that_no_signal_ends(tmp_path, monkeypatch, unkillable):
    for limit in ("_PROBE_LIMIT", "_DEATH_LIMIT"):
        monkeypatch.setattr(environment, limit, 1)
    asked = environment.probe(environment.Environment(sleeping(tmp_path), {}), "gpu")
    assert asked == {"error": "no answer within 1 s"}
    assert unkillable[0].poll() is None


def test_a_failure_stays_one(lab):
    """Whatever else is said of the test later."""
    pass_ = {"event": "end", "outcome": "passed", "reason": "", "seconds": 1, "figures": {}}
    lab.write(
        "test_z.py",
        f"import json, os\ndef test_bad():\n    assert False\n\ndef test_says_it_passed():\n"
        f"    event = {pass_!r} | {{'name': 'test_z.py::test_bad'}}\n"
        "    with open(os.environ['VLLM_GLM5_GATE_EVENTS'], 'a') as file:\n"
        "        file.write(json.dumps(event) + '\\n')",
    )
    assert lab.test().returncode == GATE_FAILED
    assert lab.outcomes["test_z.py::test_bad"] == "failed"
    assert "test_bad ended twice: failed, then passed" in lab.facts["faults"][0]


def test_what_is_no_text_reaches_no_terminal(lab):
    words = r"'half \udc80, \x1b]0;a title\x07 \x1b[2J\x1b[31mred \x07bell'"
    lab.write("test_a.py", f"def test_a():\n    assert False, {words}")
    lab.write(
        "test_b.py", "import os\ndef test_b():\n    os.write(2, b'\\xff\\xfe')\n    os.abort()"
    )
    done = lab.test("--json")
    assert done.returncode == GATE_FAILED
    assert not {"\x1b", "\x07"} & set(done.stderr)
    assert json.loads(done.stdout)["exit_code"] == GATE_FAILED
    assert lab.reason("test_a.py::test_a").startswith("AssertionError: half ?,  red ?bell")
    assert "SIGABRT" in lab.reason("test_b.py::test_b")


def test_what_a_foreign_report_says_reaches_no_terminal(lab):
    """Not even unsigned ones are shown as they are, beside a good one."""
    key = lab.allowed_key()
    assert lab.test("--key", key).returncode == 0
    document = lab.statement
    document["predicate"]["result"] = "FAILED"
    document["predicate"]["vllm-glm5"]["faults"] = ["half \ud80c, \x1b]0;a title\x07\x1b[2Jnext\rx"]
    foreign = lab.folder / "foreign.json"
    foreign.write_text(json.dumps(document))
    reports = ("--report", lab.report_path, "--report", foreign)
    done = lab.command("publish", lab.wheel, *reports, "--index", lab.folder / "index")
    assert done.returncode == 23
    assert "the wheel failed the gate at another time: half" in done.stderr
    assert done.stderr.rstrip("\n").count("\n") == 1
    assert not {"\x1b", "\x07", "\r"} & set(done.stderr)


def test_a_gate_whose_words_nobody_reads(lab):
    """As after the terminal was closed, or what they were piped to has ended."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as nowhere:
        assert lab.start(stderr=nowhere, stdout=subprocess.DEVNULL).wait() == 0
    assert lab.outcomes == GOOD_TESTS


def test_a_gate_that_is_killed_takes_detached_processes_along(lab):
    child = lab.folder / "child"
    lab.write(
        "test_a.py",
        "import subprocess, sys, time\ndef test_a():\n"
        f"    worker = [sys.executable, '-c', {WORKER!r}, {str(child)!r}]\n"
        "    subprocess.Popen(worker, start_new_session=True)\n    time.sleep(1000)",
    )
    gate = lab.start(stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (child.exists() and child.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    gate.kill()
    gate.wait()
    while alive(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_test_that_kills_the_gate_leaves_no_report(lab):
    """Not even the signed one of an earlier run of the same wheel, which it would have replaced."""
    key = lab.allowed_key()
    assert lab.test("--key", key).returncode == 0
    check = ("check-report", lab.wheel, "--report", lab.report_path)
    assert lab.command(*check).returncode == 0
    lab.write("test_good.py", "import os\ndef test_one():\n    os.kill(os.getppid(), 9)")
    assert lab.test("--key", key).returncode == -signal.SIGKILL
    assert lab.command(*check).returncode == 23


def test_what_runs_under_test_can_neither_sign_nor_publish(lab):
    secrets = dict.fromkeys(
        ("TWINE_USERNAME", "TWINE_PASSWORD", "GLM5_GATE_KEY", "SSH_AUTH_SOCK", "GH_TOKEN",
         "ACTIONS_ID_TOKEN_REQUEST_TOKEN", "CI_JOB_TOKEN"),
        "a secret",
    )  # fmt: skip
    secrets["CI_REPOSITORY_URL"] = "https://ci-token:secret@gitlab.invalid/glm5.git"
    secrets["PIP_INDEX_URL"] = "https://secret@index.invalid/simple/"
    lab.variables |= secrets | {"TOKENIZERS_PARALLELISM": "false", "HOME_PAGE": "https://a/@b"}
    lab.write(
        "test_a.py",
        f"import os\ndef test_a():\n    assert not {set(secrets)!r} & set(os.environ)\n"
        "    assert os.environ['TOKENIZERS_PARALLELISM'] and os.environ['HOME_PAGE']",
    )
    done = lab.test()
    assert done.returncode == 0, done.stderr


def test_a_wheel_that_changes_while_it_is_tested(lab, tmp_path):
    wheel = tmp_path / lab.wheel.name
    wheel.write_bytes(lab.wheel.read_bytes())
    lab.write("test_a.py", f"def test_a():\n    open({str(wheel)!r}, 'ab').write(b'x')")
    arguments = ("test", wheel, "--python", lab.python, "--report", lab.report_path)
    assert lab.command(*arguments).returncode == GATE_FAILED
    assert lab.facts["faults"] == ["the wheel's file was changed while it was tested"]


EDIT = """
import pathlib, sys, time

report = pathlib.Path(sys.argv[1])
while not (report.exists() and report.stat().st_size):
    time.sleep(0.0001)
report.write_bytes(report.read_bytes() + b" ")
"""


def test_what_edits_the_report_before_it_is_signed(lab):
    """A detached process without our environment, which the gate cannot find: nothing counts."""
    key = lab.allowed_key()
    (lab.folder / "edit.py").write_text(EDIT)
    lab.write(
        "test_a.py",
        "import subprocess, sys\ndef test_a():\n    subprocess.Popen([sys.executable, "
        f"{str(lab.folder / 'edit.py')!r}, {str(lab.report_path)!r}], start_new_session=True, "
        "env={}, stdin=-3, stdout=-3, stderr=-3)",
    )
    assert lab.test("--key", key).returncode == 0
    deadline = time.monotonic() + 60
    while not lab.report_path.read_bytes().endswith(b" "):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = lab.command("check-report", lab.wheel, "--report", lab.report_path)
    assert done.returncode == 24, done.stderr
    lab.report_path.write_bytes(lab.report_path.read_bytes()[:-1])  # the control
    assert lab.command("check-report", lab.wheel, "--report", lab.report_path).returncode == 0


def test_the_cause_of_a_death_is_sought_at_the_end_of_a_long_log(tmp_path):
    suite = Suite(
        python=sys.executable, folder=tmp_path, scratch=tmp_path, variables={}, packages=(),
        only=(), limit=1, jobs=1, log=tmp_path / "log", gpu_lost=str,
    )  # fmt: skip
    with suite.log.open("wb") as log:
        log.truncate(3 << 30)  # a hole, not a disk full
        log.seek(0, os.SEEK_END)
        log.write(b"\nCUDA error: out of memory\n")
    process = Process(suite, Progress(), None)
    process.running = "test_a.py::test_a"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    process._ended(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    found = process.progress.results["test_a.py::test_a"]
    assert found.outcome is Outcome.CRASH
    assert "CUDA error: out of memory" in found.reason


def test_where_the_report_goes_is_looked_at_first(lab):
    done = lab.command("test", lab.wheel, "--python", lab.python, "--report", lab.folder)
    assert done.returncode == 2
    assert "is a folder" in done.stderr
    assert "GPU:" not in done.stderr
    report = lab.folder / "gate.log"
    arguments = ("test", lab.wheel, "--python", lab.python, "--report", report)
    assert lab.command(*arguments).returncode == 0
    assert json.loads(report.read_text())["predicate"]["result"] == "PASSED"
    assert "test_good.py::test_one" in (lab.folder / "gate.log.log").read_text()
