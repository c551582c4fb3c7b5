"""Several processes side by side: --jobs."""

from __future__ import annotations

import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from builder.gpu_suite import share_out
from tests.gate.test_gate import GATE_FAILED, GOOD_TESTS

MEET = """
    import os, pathlib, time

    def test_meets_{name}():
        here = pathlib.Path({folder!r})
        (here / "{name}").touch()
        while not (here / "{other}").exists():
            time.sleep(0.05)

    def test_after_{name}(tmp_path):
        (tmp_path / "of_my_own").mkdir()
"""


def write_meeting(lab):
    """Two files, the first test of each of which ends when that of the other has begun."""
    for name, other in (("a", "b"), ("b", "a")):
        lab.write(f"test_{name}.py", MEET.format(name=name, other=other, folder=str(lab.folder)))
    return {f"test_{n}.py::test_{what}_{n}": "passed" for n in "ab" for what in ("meets", "after")}


def test_lanes_run_side_by_side(lab):
    expected = write_meeting(lab)
    done = lab.test("--jobs", 3, "--time-limit", 30)
    assert done.returncode == 0, done.stderr
    assert lab.outcomes == expected | GOOD_TESTS
    assert list(lab.outcomes) == sorted(lab.outcomes, key=lambda name: name.partition("::")[0])
    logs = sorted(path.name for path in lab.report_path.parent.glob("*.log"))
    assert logs == ["gpu-report.1.log", "gpu-report.2.log", "gpu-report.3.log", "gpu-report.log"]
    # Control: one after the other they wait in vain.
    for name in "ab":
        (lab.folder / name).unlink()
    assert lab.test("--time-limit", 3).returncode == GATE_FAILED
    assert lab.outcomes["test_a.py::test_meets_a"] == "hang"


def test_what_measures_runs_alone(lab):
    busy = lab.folder / "busy"
    lab.write(
        "test_a_rate.py",
        f"import pathlib, pytest\n@pytest.mark.alone\ndef test_rate():\n"
        f"    assert list(pathlib.Path({str(busy)!r}).iterdir()) == []",
    )
    busy.mkdir()
    for name in "bc":
        lab.write(
            f"test_{name}.py",
            f"import pathlib, time\ndef test_{name}():\n    mark = pathlib.Path({str(busy)!r}, "
            f"'{name}')\n    mark.touch()\n    time.sleep(2)\n    mark.unlink()",
        )
    done = lab.test("--jobs", 3)
    assert done.returncode == 0, done.stderr
    assert lab.outcomes["test_a_rate.py::test_rate"] == "passed"


ONCE = """
    import os, pathlib, sys
    sys.path.insert(0, {gpu!r})
    from made_once import key_of, once
    import pytest

    @pytest.mark.parametrize("n", range(3))
    def test_{name}(n):
        path = pathlib.Path(os.environ["VLLM_GLM5_SHARED"], key_of(["a job"]))

        def make(path):
            with open({count!r}, "a") as file:
                file.write("made ")
            first = pathlib.Path({count!r}).read_text() == "made "
            if {name!r} == "dies" and first:
                path.mkdir()
                os._exit(1)
            path.write_text("whole")

        assert once(path, make).read_text() == "whole"
"""


def test_what_several_lanes_need_is_made_once(lab):
    count, gpu = lab.folder / "count", Path(__file__).parents[1] / "gpu"
    for name in ("one", "two"):
        lab.write(f"test_{name}.py", ONCE.format(name=name, count=str(count), gpu=str(gpu)))
    done = lab.test("--jobs", 2)
    assert done.returncode == 0, done.stderr
    assert count.read_text().split() == ["made"]
    # The next gate takes nothing from it.
    assert lab.test("--jobs", 2).returncode == 0
    assert count.read_text().split() == ["made"] * 2


def test_who_dies_while_making_it_leaves_it_to_the_next(lab):
    count, gpu = lab.folder / "count", Path(__file__).parents[1] / "gpu"
    lab.write("test_dies.py", ONCE.format(name="dies", count=str(count), gpu=str(gpu)))
    assert lab.test("--jobs", 2).returncode == GATE_FAILED
    assert sorted(lab.outcomes[f"test_dies.py::test_dies[{n}]"] for n in range(3)) == [
        "crash", "passed", "passed",
    ]  # fmt: skip
    assert count.read_text().split() == ["made"] * 2


def test_a_crash_in_one_lane(lab):
    expected = write_meeting(lab)
    lab.write(
        "test_bad.py", "import ctypes\ndef test_bad():\n    ctypes.string_at(0)\ndef test_z(): pass"
    )
    assert lab.test("--jobs", 4, "--time-limit", 30).returncode == GATE_FAILED
    bad = {"test_bad.py::test_bad": "crash", "test_bad.py::test_z": "passed"}
    assert lab.outcomes == bad | expected | GOOD_TESTS


def test_a_lost_gpu_ends_all_lanes(lab):
    lab.write(
        "test_a_lost.py",
        """
        import json, os
        def test_lost():
            with open(os.environ['FAKE_GPU'], 'w') as file:
                json.dump([{'lost': True}], file)
            os._exit(1)
        """,
    )
    lab.write("test_b.py", "import time\ndef test_b():\n    time.sleep(300)")
    began = time.monotonic()
    assert lab.test("--jobs", 2).returncode == GATE_FAILED
    assert time.monotonic() - began < 60
    assert lab.outcomes["test_a_lost.py::test_lost"] == "gpu-lost"
    assert lab.outcomes["test_b.py::test_b"] == "not-run"


def test_a_suite_that_cannot_be_collected(lab):
    lab.write("test_bad.py", "import not_there")
    assert lab.test("--jobs", 2).returncode == GATE_FAILED
    assert any("not_there" in fault for fault in lab.facts["faults"])
    assert set(lab.outcomes.values()) == {"not-run"}


limits = st.dictionaries(
    st.tuples(st.sampled_from(["a.py", "b.py", "c.py"]), st.integers(0, 40)).map(
        lambda pair: f"{pair[0]}::test_{pair[1]}"
    ),
    st.sampled_from([1.0, 120.0, 600.0, 4400.0]),
)


@given(limits, st.integers(1, 9))
def test_each_test_is_in_one_part(limits, jobs):
    parts = share_out(limits, jobs)
    assert sorted(name for part in parts for name in part) == sorted(limits)
    order = list(limits)
    for part in parts:
        assert part == sorted(part, key=order.index)
        assert len({name.partition("::")[0] for name in part}) == 1
    lengths = [sum(limits[name] for name in part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    if limits:
        assert lengths[0] <= sum(limits.values()) / jobs / 2 + max(limits.values())


def test_small_files_stay_together():
    limits = {f"{file}.py::test_{n}": 10.0 for file in "abcdefgh" for n in range(5)}
    assert {frozenset(n[0] for n in part) for part in share_out(limits, 4)} == {
        frozenset(file) for file in "abcdefgh"
    }
    # One file that is longer than that is cut, for otherwise all wait for it.
    one = {f"a.py::test_{n}": 600.0 for n in range(24)}
    assert [len(part) for part in share_out(one, 4)] == [3] * 8


def test_a_lane_that_is_done_takes_what_another_has_not_begun(lab):
    """Equal limits, unequal tests: the lane with the slow one gets no other."""
    for name in "bcdef":
        lab.write(f"test_{name}.py", f"def test_{name}(): pass")
    lab.write("test_z.py", f"""
        import pathlib
        def test_z():
            pathlib.Path({str(lab.folder / "z")!r}).touch()
        """)  # fmt: skip
    lab.write("test_a.py", f"""
        import pathlib, time
        def test_a():
            until = time.monotonic() + 60
            while not pathlib.Path({str(lab.folder / "z")!r}).exists():
                assert time.monotonic() < until, "what comes after it waits for it"
                time.sleep(0.05)
        """)  # fmt: skip
    done = lab.test("--jobs", 2)
    assert done.returncode == 0, done.stderr
