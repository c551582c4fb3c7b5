"""Edit and export are inverses, whatever the commits say and however the user has set up git."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from builder import export as export_module
from builder.errors import BuilderError, ExportMismatchError, RevisionError, SeriesError
from builder.repository import Git
from builder.revision import checked_revision, raise_revision
from tests.series import hostile
from tests.series.fork import (
    CORE,
    FILES,
    REASON,
    ROOT,
    TAG,
    TRAILERS,
    Developer,
    Work,
    message,
    three,
)

NEW = {"vllm/new.py": "x = 1\n"}


def amend(changes=None, text=None):
    def act(user):
        user.write(changes or {})
        user.git("add", "--all")
        words = ("-F-",) if text else ("--no-edit",)
        user.git("commit", "--quiet", "--amend", *words, stdin=(text or "").encode())

    return act


def test_the_first_export_gives_names_and_the_next_nothing(fork, developer):
    fork.put(three(developer))
    made = Work(fork)
    written, removed = made.export()
    assert made.lines() == [
        "0001-Core-One-gr-er.patch",
        "0002-Core-Two.patch",
        "0003-Core-Three.patch",
    ]
    assert len(written) == len(removed) == 3
    assert made.export() == ([], [])


def test_edit_then_export_changes_no_byte(work):
    before = work.fork.files()
    assert work.export() == ([], [])
    assert work.fork.files() == before
    shutil.rmtree(work.folder)
    assert Work(work.fork).export() == ([], [])
    assert work.fork.files() == before


def test_the_exported_form(work):
    data = (work.fork.folder() / "0001-Core-One-gr-er.patch").read_bytes()
    lines = data.decode().splitlines()
    assert lines[0] == f"From {'0' * 40} Mon Sep 17 00:00:00 2001"
    assert lines[1] == "From: vllm-glm5 maintainers <maintainers@vllm-glm5.invalid>"
    assert lines[3] == "Subject: [Core] One größer"
    assert "diff --git a/vllm/core.py b/vllm/core.py" in lines
    index = next(line for line in lines if line.startswith("index "))
    assert len(index) == len("index ") + 40 + 2 + 40 + len(" 100644")
    assert "@@ -7,7 +7,7 @@ class Engine:" in lines
    assert not any(line.startswith(("-- ", " vllm/core.py |")) for line in lines)


def test_only_the_amended_commit_is_written(work):
    before = work.fork.files()
    one, two, three_ = work.commits()
    # the third touches another part: its file keeps its bytes though its parent has changed
    work.rebuild(
        one, two, amend({"vllm/dos.py": FILES["vllm/dos.py"].replace("y = 2", "y = 9")}), three_
    )
    assert work.export() == (["0002-Core-Two.patch"], [])
    after = work.fork.files()
    assert {name for name in after if after[name] != before.get(name)} == {
        f"{TAG}/0002-Core-Two.patch"
    }
    work.check()


def test_reorder(work):
    other = work.user.commit({"vllm/other.py": "x = 1\n"}, message("[Core] Other"))
    work.export()
    before = work.fork.files()
    one, two, three_, other = work.commits()
    work.rebuild(one, other, two, three_)
    assert work.export() == ([], [])
    assert work.lines() == [
        "0001-Core-One-gr-er.patch", "0004-Core-Other.patch", "0002-Core-Two.patch",
        "0003-Core-Three.patch",
    ]  # fmt: skip
    after = work.fork.files()
    assert {name for name in after if after[name] != before[name]} == {f"{TAG}/series"}
    work.check()


def test_drop(work):
    one, two, _ = work.commits()
    work.rebuild(one, two)
    assert work.export() == ([], ["0003-Core-Three.patch"])
    assert not (work.fork.folder() / "0003-Core-Three.patch").exists()
    work.check()
    work.rebuild()
    assert len(work.export()[1]) == 2
    assert work.lines() == []
    work.check()


def test_add_takes_the_next_free_number(work):
    (work.fork.project.patches / "common" / "0017-x.patch").write_bytes(b"x")
    work.user.commit(NEW, message("[Core] Four"))
    assert work.export() == (["0018-Core-Four.patch"], [])


def test_reword_keeps_the_number(work):
    one, two, three_ = work.commits()
    work.rebuild(one, amend(text=message("[Core] Uno")), two, three_)
    assert work.export() == (["0001-Core-Uno.patch"], ["0001-Core-One-gr-er.patch"])
    assert work.lines()[0] == "0001-Core-Uno.patch"
    work.check()


def test_reword_two_and_add_one_keeps_both_numbers(work):
    one, two, three_ = work.commits()
    work.rebuild(
        one, amend(text=message("[Core] Uno")),
        lambda user: user.commit({"vllm/zz.py": "z = 1\n"}, message("[Core] Between")),
        two, amend({"vllm/run.sh": "#!/bin/bash\n"}, text=message("[Core] Due")), three_,
    )  # fmt: skip
    work.export()
    assert work.lines() == [
        "0001-Core-Uno.patch", "0004-Core-Between.patch", "0002-Core-Due.patch",
        "0003-Core-Three.patch",
    ]  # fmt: skip
    work.check()


def test_two_subjects_that_begin_alike_are_two_patches(work):
    """Both give the same 52 characters of file name; neither may take the other's file."""
    start = "[Kernel] Sparse MLA decode for SM120 and for older cards, "
    work.user.commit({"vllm/a1.py": "x = 1\n"}, message(start + "part one"))
    work.user.commit({"vllm/a2.py": "x = 2\n"}, message(start + "part two"))
    work.export()
    assert [line[:4] for line in work.lines()] == ["0001", "0002", "0003", "0004", "0005"]
    work.check()
    before = work.fork.files()
    *rest, a1, a2 = work.commits()
    work.rebuild(*rest, a2, a1)
    assert work.export() == ([], [])
    assert work.lines()[3][:4] == "0005"
    assert {k for k, v in work.fork.files().items() if v != before[k]} == {f"{TAG}/series"}


def test_two_commits_of_one_subject_are_refused(work):
    work.user.commit(NEW, message("[Core] Two"))
    with pytest.raises(SeriesError, match="same subject"):
        work.export()


def test_comments_above_the_series_stay(work):
    file = work.fork.folder() / "series"
    file.write_text("# The series of this release.\n#\n\n" + file.read_text())
    assert work.export() == ([], [])
    work.user.commit(NEW, message("[Core] Four"))
    work.export()
    assert file.read_text() == (
        "# The series of this release.\n#\n\n0001-Core-One-gr-er.patch\n0002-Core-Two.patch\n"
        "0003-Core-Three.patch\n0004-Core-Four.patch\n"
    )


# --- what is edited by hand ---------------------------------------------------------------------


HAND_EDITS = {
    "a line of code": (b"+        total = 1", b"+        total = 5"),
    "the index line": (b"index ", b"index 1"),
    "the heading": (b"@@ class Engine:", b"@@ class Motor:"),
    "the line number": (b"@@ -7,7 +7,7 @@", b"@@ -8,7 +8,7 @@"),
    "text above the diff": (b"\ndiff --git", b"\n---\nA note.\n\ndiff --git"),
    "the commit id": (b"From 0000", b"From 1000"),
}


@pytest.mark.parametrize("case", HAND_EDITS)
def test_a_patch_that_was_edited_by_hand_is_found(work, case):
    old, new = HAND_EDITS[case]
    file = work.fork.folder() / "0001-Core-One-gr-er.patch"
    data = file.read_bytes()
    assert old in data
    edited = data.replace(old, new, 1)
    if case == "the index line":
        edited = data.replace(b"index " + data.partition(b"index ")[2][:4], b"index ffff", 1)
    file.write_bytes(edited)
    with pytest.raises(BuilderError) as caught:
        work.check()
    # a hunk that is not at its line in the very file it was made from is refused before that
    assert caught.value.exit_code == (9 if case == "the line number" else 22), str(caught.value)
    if caught.value.exit_code == 22:
        assert isinstance(caught.value, ExportMismatchError)
        assert any(line.startswith("0001-Core-One") for line in caught.value.details)
        shutil.rmtree(work.folder)
        Work(work.fork).export()  # the way out that the error names
        work.check()


@pytest.mark.parametrize("mark", [b"\n@@ ", b"\ndiff --git "])
def test_a_patch_that_was_cut_between_hunks_or_files_is_found(work, mark):
    """git takes what is left of it, a whole patch in itself; the revision notices in any case."""
    work.rebuild()
    work.user.commit(
        {"vllm/core.py": CORE.replace("total = 0", "total = 1").replace("print(", "print(1, "),
         "vllm/dos.py": CORE},
        message("[Core] Both"),
    )  # fmt: skip
    work.export()
    raise_revision(work.fork.pin(), work.fork.series())
    file = work.fork.folder() / work.lines()[0]
    data = file.read_bytes()
    last = data.index(b"\n@@ ", data.index(b"\n@@ ") + 1) if mark == b"\n@@ " else data.rindex(mark)
    file.write_bytes(data[: last + 1])
    if mark == b"\n@@ ":  # what is left is not the blob of the index line
        with pytest.raises(ExportMismatchError):
            work.check()
    with pytest.raises(RevisionError):
        checked_revision(work.fork.pin(), work.fork.series())


def test_a_misnamed_or_misplaced_file_is_found(work):
    folder = work.fork.folder()
    (folder / "0002-Core-Two.patch").rename(folder / "0002-zwei.patch")
    series = folder / "series"
    series.write_text(series.read_text().replace("0002-Core-Two", "0002-zwei"))
    with pytest.raises(ExportMismatchError) as caught:
        work.check()
    assert "0002-zwei.patch (would go)" in caught.value.details


# --- the user's settings ---------------------------------------------------------------------------


def test_the_users_settings_change_no_exported_byte(work, tmp_path):
    """Global, in the environment, and in the clone itself: configuration, attributes, grafts."""
    work.user.commit(
        {"vllm/core.py": work.user.read("vllm/core.py").decode().replace("print(", "print(1, "),
         "vllm/deps.lock": "a=1\nb=2\nc=4\n", "vllm/notes2.txt": "a\n", "vllm/z.json": "{}\n"},
        message("[Core] Größe"),
    )  # fmt: skip
    expected = [patch.data for patch in work.plan().patches]
    home = tmp_path / "home"
    environment = hostile.environment(home)
    local = work.folder / ".git"
    text = hostile.CONFIGURATION.format(home=home, hooks=home / "hooks")
    text = text.partition("[extensions]")[0]  # that one is for git to read, not for its output
    (local / "config").write_text((local / "config").read_text() + text)
    (local / "info" / "attributes").write_text("* binary\n*.py diff=nothing\n")
    code = (
        "import sys; from pathlib import Path; from tests.series.fork import *\n"
        "from builder.export import plan_export; from builder.repository import Git\n"
        "root = Path(sys.argv[1]); fork = Fork(root, Project(root / 'project'), Cache(root / 'cache'))\n"
        "git = Git(Path(sys.argv[2])); base = git.text('rev-parse', TAG + '^{commit}')\n"
        "plan = plan_export(git, base, git.text('rev-parse', 'HEAD'), fork.series(), fork.project, "
        "fork.cache)\n"
        "sys.stdout.buffer.write(b'|||'.join(patch.data for patch in plan.patches))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(work.fork.root), str(work.folder)],
        env=environment | {"PYTHONPATH": str(ROOT)}, cwd=home, capture_output=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr.decode()
    assert process.stdout.split(b"|||") == expected
    plain = subprocess.run(
        ["git", "format-patch", "--stdout", "-1"], cwd=work.folder, capture_output=True, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
    )  # fmt: skip
    assert plain.stdout != expected[-1]  # the control


def test_a_message_in_another_encoding_is_exported_as_utf8(work):
    text = message("[Core] Größe", body="Maß für Maß.\n" + REASON)
    work.user.write(NEW)
    work.user.git("add", "--all")
    work.user.git("-c", "i18n.commitEncoding=ISO-8859-1", "commit", "--quiet", "-F-",
                  stdin=text.encode("latin-1"))  # fmt: skip
    assert b"encoding ISO-8859-1" in work.user.git("cat-file", "commit", "HEAD")
    (line,), _ = work.export()
    assert "Maß für Maß." in (work.fork.folder() / line).read_bytes().decode()
    work.check()


def test_a_replaced_object_does_not_reach_the_patches(work):
    expected = [patch.data for patch in work.plan().patches]
    blob = work.user.git("rev-parse", f"{TAG}:vllm/core.py").decode().strip()
    other = work.user.git("hash-object", "-w", "--stdin", stdin=b"x = 1\n").decode().strip()
    work.user.git("replace", blob, other)
    git = Git(work.folder)
    plan = export_module.plan_export(
        git, git.text("rev-parse", f"{TAG}^{{commit}}"), git.text("rev-parse", "HEAD"),
        work.fork.series(), work.fork.project, work.fork.cache,
    )  # fmt: skip
    assert [patch.data for patch in plan.patches] == expected


# --- shared patches ------------------------------------------------------------------------------


NEXT = "v1.3.0"


@pytest.fixture
def two_releases(fork, developer):
    """Two releases that share one patch; both have their revision."""
    developer.reset()
    shared = developer.patch({"vllm/shared.py": "x = 1\n"}, "[Core] Share")
    own = developer.patch({"vllm/table.json": '{\n  "a": 1,\n  "b": 3\n}\n'}, "[Core] Own")
    fork.release(FILES | {"vllm/later.py": "x = 1\n"}, NEXT)
    (fork.project.patches / "common" / "0001-Core-Share.patch").write_bytes(shared)
    for tag in (TAG, NEXT):
        (fork.folder(tag) / "0002-Core-Own.patch").write_bytes(own)
        (fork.folder(tag) / "series").write_text(
            "../common/0001-Core-Share.patch\n0002-Core-Own.patch\n"
        )
        fork.run("revision", "--tag", tag, "--raise")
    fork.run("export", "--tag", TAG, "--check")
    return fork


def test_a_shared_patch_edited_from_one_release_makes_both_stale(two_releases):
    fork = two_releases
    fork.run("edit", "--tag", TAG)
    user = Developer(fork.root / f"vllm-{TAG}")
    assert "nothing changed" in fork.run("export", "--tag", TAG).stdout
    one, two = user.git("rev-list", "--reverse", f"{TAG}..HEAD").decode().split()
    user.git("reset", "--quiet", "--hard", one)
    amend({"vllm/shared.py": "x = 2\n"})(user)
    user.git("cherry-pick", two)
    run = fork.run("export", "--tag", TAG, code=19)
    assert "written ../common/0001-Core-Share.patch" in run.stdout
    assert f"has not, in: {TAG}, {NEXT}" in run.stderr
    assert f"--tag {TAG} --raise" in run.stderr
    assert f"--tag {NEXT} --raise" in run.stderr
    assert b"+x = 2" in (fork.project.patches / "common" / "0001-Core-Share.patch").read_bytes()
    raised = fork.run("export", "--tag", TAG, "--raise-revision").stdout
    assert f"{TAG}: +glm5.2" in raised
    assert f"{NEXT}: +glm5.2" in raised
    assert fork.blob(fork.apply(NEXT), "vllm/shared.py") == b"x = 2\n"
    fork.run("export", "--tag", NEXT, "--check")


def test_a_shared_patch_that_is_reworded_keeps_its_name(two_releases):
    """The other release names the file: a new name would leave it without, or a number twice."""
    fork = two_releases
    work = Work(fork)
    one, two = work.commits()
    work.rebuild(
        one, amend(text=message("[Core] Partager")), two,
        lambda user: user.commit(NEW, message("[Core] Mine")),
    )  # fmt: skip
    written, removed = work.export()
    assert removed == []
    assert work.lines() == [
        "../common/0001-Core-Share.patch", "0002-Core-Own.patch", "0003-Core-Mine.patch",
    ]  # fmt: skip
    assert set(written) == {"../common/0001-Core-Share.patch", "0003-Core-Mine.patch"}
    assert fork.apply(NEXT).patches[0].subject == "[Core] Partager"
    work.check()


def test_a_shared_patch_that_one_release_drops_stays_for_the_other(two_releases):
    fork = two_releases
    work = Work(fork)
    _, two = work.commits()
    work.rebuild(lambda user: user.commit(NEW, message("[Core] Mine")), two)
    work.export()
    assert work.lines() == ["0003-Core-Mine.patch", "0002-Core-Own.patch"]
    assert fork.series(NEXT).entries[0].line == "../common/0001-Core-Share.patch"
    assert fork.apply(NEXT).patches[0].subject == "[Core] Share"
    work.check()


def test_the_commands_end_with_their_codes(work):
    fork = work.fork
    fork.run("revision", "--tag", TAG, "--raise")
    assert (
        "3 patches are what an export writes" in fork.run("export", "--tag", TAG, "--check").stdout
    )
    work.user.write({"vllm/core.py": "x = 1\n"})
    assert "1 uncommitted" in fork.run("export", "--tag", TAG, code=12).stderr
    fork.run("edit", "--tag", TAG, code=12)
    work.user.git("checkout", "--quiet", ".")
    assert "no work tree" in fork.run("export", "--tag", TAG, cwd=work.folder, code=12).stderr
    file = fork.folder() / "0001-Core-One-gr-er.patch"
    file.write_bytes(file.read_bytes().replace(b"+        total = 1", b"+        total = 7"))
    failed = fork.run("export", "--tag", TAG, "--check", code=22)
    assert "0001-Core-One-gr-er.patch" in failed.stderr
    assert "0002-Core-Two.patch" not in failed.stderr
    assert "by hand" in failed.stderr
    failed = fork.run("export", "--tag", TAG, "--check", "--worktree", work.folder, code=22)
    assert "has other commits" in failed.stderr
    assert f"--worktree {work.folder}" in failed.stderr
    work.user.commit(
        NEW, message("[Core] Start", body=f"{REASON}\n---\nhidden\n", trailers=TRAILERS)
    )
    assert "'---'" in fork.run("export", "--tag", TAG, code=8).stderr
