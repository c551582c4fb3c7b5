"""A patch that changed on one release reaches the series of the others, or says where it does not."""

from __future__ import annotations

import json

import pytest

from tests.rebase.moving import ENGINE, NEW, OLD, edit
from tests.series.fork import Developer, message

PATH, OTHER = "vllm/engine.py", "vllm/other.py"
ABOVE = ("import os\n", "import os\nimport sys\n")
HOOK = ("    engine.open(name)\n", "    engine.open(name)\n    engine.hook(name)\n")
BETTER = ("    engine.hook(name)\n", "    engine.hook(name, now=True)\n")
LATER = ("        self.size = 0\n", "        self.size = -1\n")
COMMON = {"vllm/ours.py": "def ours():\n    return 1\n"}


def with_both(moving):
    """Both releases have the series: a hook, a shared patch, and a later one in the hook's file."""
    case = moving(
        {PATH: ENGINE}, {PATH: edit(ENGINE, ABOVE)},
        ("hook", {PATH: edit(ENGINE, HOOK)}),
        ("common ours", COMMON),
        ("later", {PATH: edit(ENGINE, HOOK, LATER)}),
    )  # fmt: skip
    case.begin()
    case.fork.run("revision", "--tag", OLD, "--raise")
    return case


@pytest.fixture
def two(moving):
    return with_both(moving)


def change(case, tag, path, text):
    """Amend, as a maintainer does, the commit that last made the line; export it."""
    folder = case.fork.root / f"edit-{tag}"
    case.fork.run("edit", "--tag", tag, "--worktree", folder)
    user = Developer(folder)
    commits = user.git("rev-list", "--reverse", f"{tag}..HEAD").decode().split()
    user.git("reset", "--quiet", "--hard", commits[0])
    user.write({path: text(user.read(path).decode())})
    user.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    for commit in commits[1:]:
        user.git("cherry-pick", commit)
    case.fork.run("export", "--tag", tag, "--worktree", folder, "--raise-revision")


def test_a_hook_reaches_the_other_release(two):
    change(two, NEW, PATH, lambda text: edit(text, BETTER))
    before = two.fork.files(NEW)
    said = two.fork.run("backport", "1", "--to", OLD).stdout
    assert "written 0001-hook.patch" in said
    assert f"revision --tag {OLD} --raise" in said
    applied = two.fork.apply(OLD)
    assert two.fork.blob(applied, PATH).decode() == edit(ENGINE, HOOK, BETTER, LATER)
    assert [e.line for e in two.fork.series(OLD).entries] == list(two.data)
    assert two.fork.files(NEW) == before
    two.fork.run("revision", "--tag", OLD, "--raise")
    two.fork.run("export", "--check", "--tag", OLD)
    again = json.loads(two.fork.run("backport", "0001", "--to", OLD, "--json").stdout)
    assert [(one["tag"], one["state"], one["written"]) for one in again] == [(OLD, "unchanged", [])]


def test_check_writes_nothing(two):
    change(two, NEW, PATH, lambda text: edit(text, BETTER))
    before = two.fork.files(OLD)
    assert "would write 0001-hook.patch" in two.fork.run("backport", "1", "--check").stdout
    assert two.fork.files(OLD) == before


def test_a_conflict_is_reported_and_nothing_is_written(two):
    """The line that the better hook changes is another one on the old release."""
    other = ("    engine.hook(name)\n", "    engine.hook(name)\n    sys.exit(name)\n    del name\n")
    change(
        two, OLD, PATH, lambda text: edit(text, ("    engine.hook(name)\n", "    engine.hooks()\n"))
    )
    change(two, NEW, PATH, lambda text: edit(text, other))
    broken = two.fork.folder(OLD) / "0003-later.patch"
    before = two.fork.files(OLD)
    # a patch behind it that changes the same lines: made on the old release alone
    developer = two.developer
    developer.reset()
    developer.commit({PATH: edit(ENGINE, (HOOK[0], HOOK[0] + "    engine.hooks()\n"))}, "base\n")
    data = developer.patch(
        {PATH: edit(ENGINE, (HOOK[0], HOOK[0] + "    engine.hooks(3)\n"))}, text=message("later")
    )
    broken.write_bytes(data)
    said = two.fork.run("backport", "1", "--to", OLD, code=30).stderr
    assert "behind it, 0003-later.patch" in said
    assert two.fork.files(OLD) == before | {f"{OLD}/0003-later.patch": data}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_release_that_has_it_needs_none(moving, elsewhere):
    """Nobody has to do anything there, unless its line may be another matter."""
    hooked = edit(ENGINE, HOOK)
    below = ("    engine.close()\n", "    engine.hook(name)\n    engine.close()\n")
    case = moving({PATH: ENGINE}, {PATH: edit(ENGINE, below) if elsewhere else hooked},
                  ("hook", {PATH: hooked}))  # fmt: skip
    before = case.patches()
    run = case.fork.run("backport", "1", "--to", NEW, code=30 if elsewhere else 0)
    assert "upstream has every hunk of it" in (run.stderr if elsewhere else run.stdout)
    assert case.patches() == before


def test_a_new_patch_is_added_in_its_place(two):
    two.fork.run("revision", "--tag", NEW, "--raise")
    folder = two.fork.root / "edit"
    two.fork.run("edit", "--tag", NEW, "--worktree", folder)
    user = Developer(folder)
    user.commit({OTHER: "a = 1\n"}, message("Add other"))
    two.fork.run("export", "--tag", NEW, "--worktree", folder, "--raise-revision")
    two.fork.run("backport", "4")
    assert [e.line for e in two.fork.series(OLD).entries] == [*two.data, "0004-Add-other.patch"]
    assert two.fork.blob(two.fork.apply(OLD), OTHER) == b"a = 1\n"


def test_a_file_that_the_older_release_does_not_have_yet(moving):
    """Nobody deleted it."""
    case = moving(
        {PATH: ENGINE}, {PATH: ENGINE, OTHER: "a = 1\n"}, ("hook", {PATH: edit(ENGINE, HOOK)})
    )
    case.begin()
    folder = case.fork.root / "edit"
    case.fork.run("edit", "--tag", NEW, "--worktree", folder)
    Developer(folder).commit({OTHER: "a = 2\n"}, message("Change other"))
    case.fork.run("export", "--tag", NEW, "--worktree", folder, "--raise-revision")
    said = case.fork.run("backport", "2", "--to", OLD, code=30).stderr
    assert f"conflict: {OTHER}: {OLD} has no such file" in said


def test_a_shared_patch_is_tried_where_it_is_named(two):
    shared = two.fork.project.patches / "common" / "0002-common-ours.patch"
    shared.write_bytes(shared.read_bytes().replace(b"return 1", b"return 2"))
    found = json.loads(two.fork.run("backport", "2", "--json").stdout)
    assert [(one["tag"], one["state"], one["needs_revision"]) for one in found] == [
        (OLD, "unchanged", True)
    ]
    shared.write_bytes(shared.read_bytes().replace(b"vllm/ours.py", PATH.encode()))
    said = two.fork.run("backport", "2", "--from", OLD, code=9).stderr
    assert "adds a file that is there already" in said


def test_no_such_patch(two):
    assert "no patch 0042" in two.fork.run("backport", "42", code=3).stderr
