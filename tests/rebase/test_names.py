"""Files that a patch adds or renames, where upstream has something of that name by now."""

from __future__ import annotations

import pytest

from builder.try_series import State
from tests.rebase.moving import ENGINE, NEW, OLD, REASON, trailers
from tests.series.fork import message

PATH = "vllm/engine.py"
TEXT = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\n"


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("vllm/ours.py", "vllm/ours/__init__.py", "Python would import that"),
        ("vllm/ours/__init__.py", "vllm/ours.py", "vllm/ours.py is there"),
        ("vllm/ours/part.py", "vllm/ours.py", "vllm/ours.py is there"),
        ("docs/ours", "docs/ours/index.md", "docs/ours is a folder"),
        ("docs/ours/index.md", "docs/ours", "docs/ours is a file"),
    ],
)
def test_a_new_file_beside_one_that_it_cannot_stand_beside(moving, ours, theirs, words):
    """git am takes the first three; the last ones would delete what upstream has there."""
    case = moving({PATH: ENGINE}, {PATH: ENGINE, theirs: "up = 1\n"}, ("ours", {ours: TEXT}))
    trial = case.trial()
    assert trial.state is State.CONFLICT
    assert words in trial.reason
    before = case.patches()
    assert words in case.begin(code=30).stderr
    case.rebase("--continue", code=31)
    assert case.user.read(theirs) == b"up = 1\n"
    assert case.patches() == before
    case.user.git("reset", "--quiet", "--hard")
    case.user.write({"vllm/other_name.py": TEXT})
    case.user.git("add", "vllm/other_name.py")
    case.rebase("--continue")
    assert case.result(theirs) == "up = 1\n"


def test_what_stood_beside_it_before_is_meant(moving):
    both = {PATH: ENGINE, "vllm/ours.py": "up = 1\n"}
    trial = moving(both, both, ("ours", {"vllm/ours/__init__.py": TEXT})).trial()
    assert trial.state is State.CLEAN


@pytest.fixture
def renaming(moving):
    """A function that gives the case of a patch which renames vllm/a.py to vllm/b.py."""

    def make(new):
        case = moving({"vllm/a.py": TEXT}, new)
        developer = case.developer
        developer.git("mv", "vllm/a.py", "vllm/b.py")
        text = message("rename", trailers=trailers(), body=REASON)
        developer.git("commit", "--quiet", "-F-", stdin=text.encode())
        options = [option for option in developer.FORMAT if option != "--no-renames"]
        case.data = {"0001-rename.patch": developer.git("format-patch", *options, "-M", "-1")}
        case.fork.put(case.data, OLD)
        assert case.fork.patches(OLD)[0].changes[0].old_path == "vllm/a.py"
        return case

    return make


def test_a_rename(renaming):
    case = renaming({"vllm/a.py": TEXT})
    assert case.trial().state is State.CLEAN
    case.begin()
    assert case.result("vllm/b.py") == TEXT


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"vllm/a.py": TEXT, "vllm/b.py": "up = 1\n"}, "another file of that name"),
        ({"vllm/a.py": TEXT, "vllm/b/__init__.py": ""}, "vllm/b/__init__.py is there"),
        ({"vllm/c.py": TEXT}, "upstream renamed vllm/a.py to vllm/c.py, the patch to vllm/b.py"),
    ],
)
def test_a_rename_for_which_there_is_no_place(renaming, new, words):
    """Otherwise it overwrites upstream's file, or is lost and leaves an empty patch."""
    case = renaming(new)
    trial = case.trial()
    assert (trial.state, trial.changes) == (State.CONFLICT, {})
    assert words in trial.reason
    assert words in case.begin(code=30).stderr
    case.rebase("--continue", "--drop", "1")
    assert case.fork.series(NEW).entries == ()
    assert case.fork.apply(NEW).head == case.fork.source(NEW).commit


def test_a_rename_that_upstream_did_too(renaming):
    case = renaming({"vllm/b.py": TEXT})
    assert case.trial().state is State.UPSTREAMED
    case.begin("--auto-drop")
    assert case.fork.series(NEW).entries == ()
