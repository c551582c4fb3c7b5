"""A backport that is killed at any moment: the series' folder is the old one or the new one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys

import pytest

from builder.backport import backport
from tests.build.killing import Span, run_and_kill
from tests.rebase.moving import ENGINE, NEW, OLD, edit
from tests.rebase.test_backport import BETTER, HOOK, LATER, PATH, change, with_both
from tests.series.fork import ROOT, Developer, message
from tests.series.sudden_death import killed_at

COUNT = int(os.environ.get("VLLM_GLM5_KILLS", "30"))


@pytest.fixture
def changed(moving):
    """The hook is a better one on the new release, and a fourth patch stands behind it there."""
    case = with_both(moving)
    change(case, NEW, PATH, lambda text: edit(text, BETTER))
    return case


def contents(case):
    """The patches folder without what a killed run may leave until the next one."""
    return {name: data for name, data in case.patches().items() if ".vllm-glm5-tmp-" not in name}


def restore(case, copy):
    shutil.rmtree(case.fork.project.patches)
    shutil.copytree(copy, case.fork.project.patches)


def ends(case, before):
    """Do it undisturbed; return what it takes from where to where, and a copy to begin from."""
    copy = case.fork.root / "before"
    shutil.copytree(case.fork.project.patches, copy)
    span = Span()
    span.of(lambda: case.fork.run("backport", "1", "--to", OLD))
    after = contents(case)
    assert after != before
    assert case.fork.blob(case.fork.apply(OLD), PATH).decode() == edit(ENGINE, HOOK, BETTER, LATER)
    return after, copy, span


def test_killed_at_any_moment(changed):
    """SIGKILL to the tool and to the git that it runs; whatever command comes next works."""
    case = changed
    before = contents(case)
    after, copy, span = ends(case, before)
    command = [sys.executable, "-m", "builder", "--project", str(case.fork.project.root),
               "backport", "1", "--to", OLD]  # fmt: skip
    variables = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(case.fork.root),
        "VLLM_GLM5_CACHE": str(case.fork.cache.root),
    }  # fmt: skip
    chance = random.Random(3)
    hits = 0
    for number in range(COUNT):
        restore(case, copy)
        moment = span.seconds * (number + chance.random()) / COUNT
        run = run_and_kill(
            command, variables, case.fork.root,
            after=moment, number=signal.SIGKILL, whole_group=bool(number % 2),
        )  # fmt: skip
        hits += run.in_time
        if not run.in_time:
            span.saw(run.seconds)
        if number % 3 == 0:  # a command that only reads
            case.fork.run("series", "--tag", OLD)
            assert contents(case) in (before, after), moment
        case.fork.run("backport", "1", "--to", OLD)
        assert contents(case) == after, moment
    assert hits >= COUNT // 2, "the kills came too late to prove anything"
    assert case.fork.leftovers() == []


def test_killed_at_any_write(changed):
    """No moment is missed: before each change of a file below patches/."""
    case = changed
    before = contents(case)
    after, copy, _ = ends(case, before)
    outcomes = set()
    for number in range(1, 200):
        restore(case, copy)
        work = lambda: backport(1, [OLD], case.fork.project, case.fork.cache)  # noqa: E731
        if not killed_at(number, case.fork.project.patches, work):
            break
        case.fork.apply(OLD)  # what any command does, and it works
        assert contents(case) in (before, after), number
        outcomes.add(contents(case) == after)
        case.fork.run("backport", "1", "--to", OLD)
        assert case.patches() == after, number
    assert outcomes == {False, True}
    assert number > 3


def test_killed_while_a_new_patch_goes_in(changed):
    """A patch that the old release never had: its file must not lie there unlisted."""
    case = changed
    folder = case.fork.root / "edit"
    case.fork.run("edit", "--tag", NEW, "--worktree", folder)
    Developer(folder).commit({"vllm/other.py": "a = 1\n"}, message("Add other"))
    case.fork.run("export", "--tag", NEW, "--worktree", folder, "--raise-revision")
    before = contents(case)
    copy = case.fork.root / "before"
    shutil.copytree(case.fork.project.patches, copy)
    case.fork.run("backport", "4", "--to", OLD)
    after = contents(case)
    assert set(after) - set(before) == {f"{OLD}/0004-Add-other.patch"}
    outcomes = set()
    for number in range(1, 200):
        restore(case, copy)
        work = lambda: backport(4, [OLD], case.fork.project, case.fork.cache)  # noqa: E731
        if not killed_at(number, case.fork.project.patches, work):
            break
        case.fork.run("series", "--tag", OLD)
        assert contents(case) in (before, after), number
        outcomes.add(contents(case) == after)
    assert outcomes == {False, True}
