"""A rebase that is killed at any moment: nobody's work is lost, patches/ is the old or the new."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import signal

import pytest

from tests.build.killing import Span, run_and_kill
from tests.rebase.moving import ENGINE, NEW, OLD, edit
from tests.rebase.test_rebase import ABOVE, HOOK, LOAD, OTHER, PATH, RESOLVED, STOP, TAKEN
from tests.series.fork import ROOT

COUNT = int(os.environ.get("VLLM_GLM5_KILLS", "30"))


@pytest.fixture
def stopping(moving):
    """Four patches, of which the second conflicts."""
    return moving(
        {PATH: ENGINE, OTHER: ENGINE}, {PATH: edit(ENGINE, ABOVE), OTHER: edit(ENGINE, TAKEN)},
        ("load", {PATH: LOAD}), ("hook", {OTHER: edit(ENGINE, HOOK)}), ("stop", {PATH: STOP}),
        ("common ours", {"vllm/ours.py": "a = 1\n"}),
    )  # fmt: skip


def killed(case, after, *arguments):
    """Run the command, SIGKILL it after so many seconds; tell whether it was still at work."""
    command = [os.sys.executable, "-m", "builder", "--project", str(case.fork.project.root),
               "rebase", *arguments]  # fmt: skip
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(case.fork.root),
        "VLLM_GLM5_CACHE": str(case.fork.cache.root),
    }  # fmt: skip
    number = signal.SIGKILL
    return run_and_kill(
        command, environment, case.fork.root, after=after, number=number, whole_group=True
    )


def span(case, *arguments, code):
    measured = Span()
    measured.of(lambda: case.rebase(*arguments, code=code))
    return measured


def resolve(case):
    case.user.write({OTHER: edit(edit(ENGINE, TAKEN), RESOLVED)})
    case.user.git("add", OTHER)


def finish(case):
    """Whatever state it was killed in: --continue leads to the stop, and past it."""
    if not case.status():
        case.begin(code=30)
        resolve(case)
    elif case.status()[0]["stop"] is None or not case.status()[0]["stop"]["is_laid"]:
        process = case.rebase("--continue", code=None)
        if process.returncode == 30:
            resolve(case)
        else:
            assert process.returncode == 0, process.stderr
            return
    else:
        resolve(case)
    case.rebase("--continue")


def check_end(case, before):
    after = case.patches()
    assert {n: d for n, d in after.items() if not n.startswith(NEW)} == {
        n: d for n, d in before.items() if not n.startswith(NEW)
    }
    assert [e.line for e in case.fork.series(NEW).entries] == list(case.data)
    assert case.result(OTHER) == edit(edit(ENGINE, TAKEN), RESOLVED)
    assert case.result(PATH) == edit(STOP, ABOVE)
    assert case.status() == []
    return {n: d for n, d in after.items() if n.startswith(NEW)}


def test_killed_at_any_moment(stopping):
    """The way to the stop, and the way from the resolution to the end, killed again and again.

    After each kill patches/ is untouched, or (killed behind the last rename) the whole new series is
    there; --continue and --abort both work, in turn.
    """
    case = stopping
    before = case.patches()
    to_stop = span(case, "--from", OLD, "--onto", NEW, code=30)
    resolve(case)
    spans = [to_stop, span(case, "--continue", code=0)]
    expected = check_end(case, before)
    chance = random.Random(7)
    hits = 0
    for number in range(COUNT):
        _forget(case, before)
        is_second = number % 2 == 1
        after = spans[is_second].seconds * (number + chance.random()) / COUNT
        if is_second:
            case.begin(code=30)
            resolve(case)
        arguments = ["--continue"] if is_second else ["--from", OLD, "--onto", NEW]
        run = killed(case, after, *arguments)
        hits += run.in_time
        if not run.in_time:
            spans[is_second].saw(run.seconds)
        now = case.patches()
        whole = expected.items() <= now.items()
        moving_in = not any(name.startswith(f"{NEW}/") for name in now)
        assert now == before or whole or (is_second and moving_in), (number, after)
        if number % 4 < 2:
            if case.status():
                case.rebase("--abort")
            now = case.patches()
            assert now == before or expected.items() <= now.items()
            continue
        if not (is_second and expected.items() <= now.items() and not case.status()):
            if is_second:  # what was resolved is still there, staged or taken: no second time
                case.rebase("--continue")
            else:
                finish(case)
        assert check_end(case, before) == expected
    assert hits >= COUNT // 2, "the kills came too late to prove anything"


def _forget(case, before):
    """Go back to where the project was before any rebase."""
    if case.status():
        case.rebase("--abort")
    folder = case.fork.folder(NEW)
    for path in folder.iterdir():
        path.unlink()
    for name, data in before.items():
        if name.startswith(f"{NEW}/"):
            (case.fork.project.patches / name).write_bytes(data)


class Died(BaseException):
    """In place of the SIGKILL: raised before or after a step that changes something on the disk."""


STEPS = (
    ("builder.rebase_state", "save"),
    ("builder.rebase_tree", "make_tree"),
    ("builder.rebase_tree", "lay"),
    ("builder.rebase_tree", "take"),
    ("builder.rebase_tree", "remove"),
    ("builder.rebase_finish", "_move"),
    ("builder.rebase_finish", "raise_revision"),
    ("builder.rebase_finish", "_prove"),
    ("builder.rebase", "make_commits"),
    ("pathlib.Path", "rename"),
)


def die_at(monkeypatch, number):
    """Die at the ``number``-th moment: before a step or behind it."""
    moments = itertools.count()

    def dying(step):
        def run(*arguments, **options):
            if next(moments) == number:
                raise Died
            result = step(*arguments, **options)
            if next(moments) == number:
                raise Died
            return result

        return run

    for module, name in STEPS:
        head, _, last = module.rpartition(".")
        owner = (
            getattr(importlib.import_module(head), last)
            if last == "Path"
            else importlib.import_module(module)
        )
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("way_out", ["--continue", "--abort"])
def test_killed_beside_each_step(stopping, monkeypatch, way_out):
    """No moment is missed: before and after everything that changes the disk."""
    from builder import rebase
    from builder.errors import RebaseStoppedError

    case = stopping
    project, cache = case.fork.project, case.fork.cache
    before = case.patches()
    with pytest.raises(RebaseStoppedError):
        rebase.begin(project, cache, OLD, NEW)
    resolve(case)
    rebase.go_on(project, cache)
    expected = check_end(case, before)
    deaths = 0
    # both ways out at each second moment, and the harder one at the others too
    for number in range(0, 200, 2 if way_out == "--abort" else 1):
        _forget(case, before)
        resolved = died = False
        with monkeypatch.context() as patch:
            die_at(patch, number)
            try:
                with pytest.raises(RebaseStoppedError):
                    rebase.begin(project, cache, OLD, NEW)
                assert case.patches() == before
                resolve(case)
                resolved = True
                rebase.go_on(project, cache)
            except Died:
                died = True
        if not died:
            break
        deaths += 1
        now = case.patches()
        untouched = {n: d for n, d in before.items() if not n.startswith(f"{NEW}/")}
        assert untouched.items() <= now.items()
        if way_out == "--abort":
            if _under_way(case):
                rebase.abort(project)
            now = case.patches()
            assert now == before or expected.items() <= now.items(), number
            continue
        while _under_way(case):
            try:
                rebase.go_on(project, cache)
            except RebaseStoppedError:
                assert not resolved, f"step {number}: what was resolved is asked for again"
                resolve(case)
                resolved = True
            except rebase.RebaseStateError:
                assert not resolved, number
                resolve(case)
                resolved = True
        if not case.fork.series(NEW).entries:  # it died before it began
            assert case.patches() == before
            continue
        assert check_end(case, before) == expected
    assert deaths > 15
    assert not died


def _under_way(case):
    from builder import rebase_state

    return bool(rebase_state.under_way(case.fork.project))
