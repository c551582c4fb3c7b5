"""A series that conflicts: edit stops where git am would, and the maintainer's git finishes it."""

from __future__ import annotations

import shutil

import pytest

from builder.errors import PatchConflictError
from builder.pipeline import edit_series
from tests.series.fork import CORE, FILES, TAG, Developer, Fork, message, three
from tests.series.sudden_death import killed_at

FIRST, SECOND, THIRD = "0001-one.patch", "0002-two.patch", "0003-three.patch"


@pytest.fixture
def conflicting(fork, developer):
    """The second of three patches expects what the release does not have."""
    patches = three(developer)
    patches[SECOND] = patches[SECOND].replace(b"-    y = 2\r\n", b"-    y = 5\r\n")
    fork.put(patches)
    return fork


def misplaced_series(developer):
    """The lines of the second patch's hunk stand now, once, in another class than it names."""
    body = "\n".join(f"        step{n} = {n}" for n in range(8))
    old = f"class A:\n    def run(self):\n{body}\n\n\nclass B:\n    def run(self):\n        pass\n"
    other = developer.folder.with_name("misplaced")
    author = Developer.new(other, FILES | {"vllm/two.py": old})
    patch = author.patch({"vllm/two.py": old.replace("step3 = 3", "step3 = 4")}, "[Core] Step")
    moved = (
        f"class A:\n    def run(self):\n        pass\n\n\nclass B:\n    def run(self):\n{body}\n"
    )
    return moved, patch


def tree(fork) -> Developer:
    return Developer(fork.root / f"vllm-{TAG}")


def subjects(user):
    return user.git("log", "--reverse", "--format=%s", f"{TAG}..HEAD").decode().splitlines()


def correct(user):
    """What the printed commands say: what fits by git, the rest by hand."""
    user.attempt("apply", "--reject", ".git/rebase-apply/patch")
    assert (user.folder / "vllm/new.py").read_text() == "a = 2\n"
    assert (user.folder / "vllm/dos.py.rej").exists()
    (user.folder / "vllm/dos.py.rej").unlink()
    user.write({"vllm/dos.py": FILES["vllm/dos.py"].replace("y = 2", "y = 3")})
    user.git("add", "vllm")
    user.git("am", "--continue")


def test_conflict_edit_fix_export_apply(conflicting):
    fork = conflicting
    before = fork.files()
    stopped = fork.run("edit", "--tag", TAG, code=9)
    assert "0002-two.patch: vllm/dos.py, hunk 1" in stopped.stderr
    assert "-     y = 5" in stopped.stderr  # what the hunk expects
    assert "+     y = 2" in stopped.stderr  # what stands there
    assert "1 of 3 patches are commits, git am waits with 0002-two.patch" in stopped.stderr
    user = tree(fork)
    assert subjects(user) == ["[Core] One größer"]
    shown = user.git("am", "--show-current-patch=raw")
    assert shown.split(b"\n", 1)[1] == before[f"{TAG}/{SECOND}"].split(b"\n", 1)[1]
    assert user.git("status", "--porcelain") == b""
    # neither command touches unfinished work
    assert "git am --continue" in fork.run("export", "--tag", TAG, code=12).stderr
    assert "git am --continue" in fork.run("edit", "--tag", TAG, code=12).stderr
    correct(user)
    waits = fork.run("export", "--tag", TAG, code=12).stderr
    assert "1 patch is in no commit yet" in waits
    assert THIRD in waits
    assert SECOND not in waits
    assert fork.files() == before
    assert "3 commits" in fork.run("edit", "--tag", TAG).stdout
    assert subjects(user) == ["[Core] One größer", "[Core] Two", "[Core] Three"]
    fork.run("export", "--tag", TAG, "--raise-revision")
    applied = fork.apply()
    assert [patch.subject for patch in applied.patches] == subjects(user)
    assert b"y = 3" in fork.blob(applied, "vllm/dos.py")
    assert applied.repository.text("rev-parse", f"{applied.head}^{{tree}}") == (
        user.git("rev-parse", "HEAD^{tree}").decode().strip()
    )
    assert not (user.folder / ".git" / "vllm-glm5").exists()
    fork.run("export", "--tag", TAG, "--check")
    assert "nothing changed" in fork.run("export", "--tag", TAG).stdout
    assert fork.leftovers() == []


def test_the_series_that_stops_twice(fork, developer):
    patches = three(developer)
    patches[SECOND] = patches[SECOND].replace(b"-    y = 2\r\n", b"-    y = 5\r\n")
    patches[THIRD] = patches[THIRD].replace(b'-  "b": 2', b'-  "b": 7')
    fork.put(patches)
    fork.run("edit", "--tag", TAG, code=9)
    user = tree(fork)
    correct(user)
    again = fork.run("edit", "--tag", TAG, code=9).stderr
    assert "2 of 3 patches are commits, git am waits with 0003-three.patch, 0 more" in again
    assert user.git("am", "--show-current-patch=raw").count(b"[Core] Three") == 1
    user.git("am", "--skip")
    refused = fork.run("export", "--tag", TAG, code=12).stderr
    assert f"--drop {THIRD}" in refused
    fork.run("edit", "--tag", TAG, "--drop", THIRD)
    exported = fork.run("export", "--tag", TAG, "--raise-revision").stdout
    assert f"removed {THIRD}" in exported
    assert [patch.subject for patch in fork.apply().patches] == ["[Core] One größer", "[Core] Two"]


@pytest.mark.parametrize("command", ["series", "export --check", "contracts"])
def test_who_meets_the_conflict_elsewhere_is_sent_to_edit(conflicting, command):
    said = conflicting.run(*command.split(), "--tag", TAG, code=9).stderr
    step = conflicting.advised(f"python -m builder edit --tag {TAG} stops at it")
    assert step in said.partition("next: ")[2]
    # which does not send to itself
    assert "stops at it" not in conflicting.run("edit", "--tag", TAG, code=9).stderr


def test_giving_up_changes_nothing(conflicting):
    before = conflicting.files()
    first = conflicting.run("edit", "--tag", TAG, code=9).stderr
    user = tree(conflicting)
    user.git("am", "--abort")
    assert subjects(user) == ["[Core] One größer"]
    assert "2 patches are in no commit" in conflicting.run("export", "--tag", TAG, code=12).stderr
    # taken up again, it stops in the same place
    assert conflicting.run("edit", "--tag", TAG, code=9).stderr == first.replace(
        "apply: 3 patches on v1.2.3\n", ""
    )
    user.git("am", "--abort")
    shutil.rmtree(user.folder)
    assert conflicting.files() == before
    assert conflicting.run("edit", "--tag", TAG, code=9).stderr.endswith(
        first[first.index("error:") :]
    )


def test_an_earlier_patch_amended_so_that_the_next_applies(conflicting):
    conflicting.run("edit", "--tag", TAG, code=9)
    user = tree(conflicting)
    user.git("am", "--abort")
    user.write({"vllm/dos.py": FILES["vllm/dos.py"].replace("y = 2", "y = 5")})
    user.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    assert "3 commits" in conflicting.run("edit", "--tag", TAG).stdout
    conflicting.run("export", "--tag", TAG, "--raise-revision")
    assert b"y = 3" in conflicting.blob(conflicting.apply(), "vllm/dos.py")


def test_a_patch_reworded_while_it_is_corrected_needs_a_word(conflicting):
    conflicting.run("edit", "--tag", TAG, code=9)
    user = tree(conflicting)
    correct(user)
    user.git("commit", "--quiet", "--amend", "-F-", stdin=message("[Core] Zwei").encode())
    assert SECOND in conflicting.run("export", "--tag", TAG, code=12).stderr
    conflicting.run("edit", "--tag", TAG, "--drop", SECOND)
    exported = conflicting.run("export", "--tag", TAG, "--raise-revision").stdout
    assert "written 0002-Core-Zwei.patch" in exported  # it kept its number
    assert [patch.subject for patch in conflicting.apply().patches][1] == "[Core] Zwei"


def test_a_misplaced_hunk_stops_though_git_would_take_it(tmp_path, developer):
    moved, patch = misplaced_series(developer)
    fork = Fork.new(tmp_path / "misplaced-fork", FILES | {"vllm/two.py": moved})
    later = developer.patch({"vllm/later.py": "x = 1\n"}, "[Core] Later")
    fork.put({"0001-step.patch": patch, "0002-later.patch": later})
    before = fork.files()
    stopped = fork.run("edit", "--tag", TAG, code=10).stderr
    assert "git am waits with 0001-step.patch, 1 more" in stopped
    assert "git apply" not in stopped  # it would do just what was refused
    user = tree(fork)
    assert subjects(user) == []
    assert user.read("vllm/two.py").decode() == moved
    # the control: git takes it, and puts it into the other class
    user.git("apply", "--check", ".git/rebase-apply/patch")
    assert user.attempt("am", "--continue").returncode  # nothing to commit yet
    user.write({"vllm/two.py": moved.replace("pass", "step3 = 4")})
    user.git("add", "vllm/two.py")
    user.git("am", "--continue")
    fork.run("edit", "--tag", TAG)
    assert fork.files() == before
    fork.run("export", "--tag", TAG, "--raise-revision")
    applied = fork.apply()
    assert fork.blob(applied, "vllm/two.py").decode() == moved.replace("pass", "step3 = 4")
    assert len(applied.patches) == 2


def test_a_series_that_changed_meanwhile_is_not_undone(conflicting):
    conflicting.run("edit", "--tag", TAG, code=9)
    user = tree(conflicting)
    correct(user)
    first = conflicting.folder() / FIRST
    first.write_bytes(first.read_bytes().replace(b"+        total = 1", b"+        total = 9"))
    before = conflicting.files()
    for command in ("edit", "export"):
        refused = conflicting.run(command, "--tag", TAG, code=12).stderr
        assert "has changed since this edit began" in refused
        assert FIRST in refused
    assert conflicting.files() == before


def test_wrong_words(conflicting):
    refused = conflicting.run("edit", "--tag", TAG, "--drop", SECOND, code=11).stderr
    assert "no edit stopped here" in refused
    conflicting.run("edit", "--tag", TAG, code=9)
    user = tree(conflicting)
    user.git("am", "--abort")
    refused = conflicting.run("edit", "--tag", TAG, "--drop", FIRST, code=11).stderr
    assert f"waiting: {SECOND}" in refused


def test_a_folder_that_is_in_use_stays(conflicting):
    conflicting.run("edit", "--tag", TAG, code=9)
    user = tree(conflicting)
    shutil.rmtree(user.folder / ".git" / "vllm-glm5")
    user.git("am", "--abort")
    head = user.head
    refused = conflicting.run("edit", "--tag", TAG, code=12).stderr
    assert "work tree of another state" in refused
    assert user.head == head


def test_two_patches_of_one_subject_are_told_before(fork, developer):
    patches = three(developer)
    patches[SECOND] = patches[SECOND].replace(b"-    y = 2\r\n", b"-    y = 5\r\n")
    patches[THIRD] = patches[THIRD].replace(b"[Core] Three", b"[Core] Two")
    fork.put(patches)
    assert "same subject" in fork.run("edit", "--tag", TAG, code=11).stderr
    assert not tree(fork).folder.exists()


def test_the_first_patch_conflicts(fork, developer):
    fork.put({FIRST: developer.patch({"vllm/core.py": CORE.replace("total = 0", "total = 1")})
              .replace(b"-        total = 0", b"-        total = 3")})  # fmt: skip
    stopped = fork.run("edit", "--tag", TAG, "--worktree", "my trees/größer", code=9).stderr
    assert "0 of 1 patches are commits" in stopped
    assert "cd 'my trees/größer'" in stopped
    user = Developer(fork.root / "my trees" / "größer")
    user.write({"vllm/core.py": CORE.replace("total = 0", "total = 1")})
    user.git("add", "vllm")
    user.git("am", "--continue")
    fork.run("export", "--tag", TAG, "--raise-revision", "--worktree", user.folder)
    fork.run("export", "--tag", TAG, "--check")


def test_an_edit_killed_at_any_write_goes_on_or_begins_anew(fork, developer):
    """Between any two of its own writes; what git leaves when it is killed is git's to finish."""
    patches = three(developer)
    patches[THIRD] = patches[THIRD].replace(b'-  "b": 2', b'-  "b": 7')
    fork.put(patches)
    folder = tree(fork).folder
    fork.source()
    stages = set()
    for number in range(1, 100, 2):
        shutil.rmtree(folder, ignore_errors=True)
        begin = lambda: edit_series(TAG, folder, fork.project, fork.cache)  # noqa: E731
        if not killed_at(number, fork.root, begin):
            break
        stages.add(len(subjects(tree(fork))) if folder.exists() else None)
        if (folder / ".git" / "rebase-apply").exists():
            tree(fork).git("am", "--abort")
        with pytest.raises(PatchConflictError) as caught:
            begin()
        assert "2 of 3 patches are commits" in caught.value.details[-1]
        assert subjects(tree(fork)) == ["[Core] One größer", "[Core] Two"]
        assert [
            path for path in fork.root.iterdir() if path.name.startswith(".vllm-glm5-tmp-")
        ] == []
    assert stages == {None, 0, 1, 2}
