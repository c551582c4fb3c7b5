"""What git applies is what a review of the patch sees: nothing comes in past the checks."""

from __future__ import annotations

import os

import pytest

from builder import apply
from builder.errors import MisplacedHunkError, PatchFormatError
from tests.series.fork import CORE, FILES, TAG, Developer, Fork, Work, message

NOTES = b"--- a/vllm/notes.txt\n+++ b/vllm/notes.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+OTHER\n three\n"
ENCODED = (
    b"\nMIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\n"
    b"Content-Transfer-Encoding: %s\nSubject:"
)
HIDDEN = (
    b"=64iff --git a/vllm/notes.txt b/vllm/notes.txt\nindex 4cb29ea..0 100644\n"
    b"=2D-- a/vllm/notes.txt\n=2B++ b/vllm/notes.txt\n=40@ -1,3 +1,3 @@\n"
    b"=20one\n=2Dtwo\n=2BOTHER\n=20three\n"
)


@pytest.fixture
def good(developer):
    data = developer.patch({"vllm/table.json": '{\n  "a": 1,\n  "b": 3\n}\n'})
    developer.reset()
    return data


def above_the_first(data):
    return data.replace(b"\ndiff --git ", b"\n" + NOTES + b"diff --git ", 1)


def with_its_index_line(data):
    return data.replace(b"\ndiff --git ", b"\nIndex: vllm/notes.txt\n" + NOTES + b"diff --git ", 1)


def in_the_notes(data):
    return data.replace(b"\ndiff --git ", b"\n---\n\nA note.\n\n" + NOTES + b"\ndiff --git ", 1)


def in_the_head_of_another(data):
    return data.replace(b"\n--- a/vllm/table", b"\nsome words\n" + NOTES + b"--- a/vllm/table", 1)


def behind_the_last(data):
    return data + NOTES


def quoted_printable(data):
    head, at, diff = data.replace(b"\nSubject:", ENCODED % b"quoted-printable", 1).partition(
        b"\ndiff --git "
    )
    return head + at + diff.replace(b"=", b"=3D") + HIDDEN


HIDING = [
    above_the_first, with_its_index_line, in_the_notes, in_the_head_of_another, behind_the_last,
    quoted_printable,
]  # fmt: skip


@pytest.mark.parametrize("hide", HIDING)
def test_a_change_that_the_patch_does_not_name(fork, good, hide):
    data = hide(good)
    with pytest.raises(PatchFormatError) as caught:
        fork.apply_one(data)
    assert "0001-x.patch" in caught.value.where
    assert fork.leftovers() == []
    assert fork.blob(fork.apply_one(good), "vllm/notes.txt") == b"one\ntwo\nthree\n"
    fork.put({"0001-x.patch": data})
    assert "notes.txt" not in fork.run("series", "--tag", "v1.2.3", code=8).stdout


def test_git_does_take_them(good, tmp_path):
    """The control: plain git am changes the second file, of most of these without a word."""
    took = []
    for hide in HIDING:
        developer = Developer.new(tmp_path / hide.__name__)
        file = tmp_path / f"{hide.__name__}.patch"
        file.write_bytes(hide(good))
        developer.attempt("am", str(file))
        if b"OTHER" in developer.read("vllm/notes.txt"):
            took.append(hide)
    assert {above_the_first, with_its_index_line, in_the_notes, quoted_printable} <= set(took)


@pytest.mark.parametrize("hide", [above_the_first, behind_the_last])
def test_what_is_not_read_is_found_in_the_commit(fork, good, hide, monkeypatch):
    """Were the patch read wrongly, the commit's own list of files would still tell."""
    fork.put({"0001-x.patch": good})
    read = fork.patches()
    (fork.folder() / "0001-x.patch").write_bytes(hide(good))
    monkeypatch.setattr(apply, "read_patches", lambda *_: read)
    with pytest.raises(MisplacedHunkError) as caught:
        fork.apply()
    assert caught.value.where == "0001-x.patch: vllm/notes.txt"
    assert "does not seem to name" in caught.value.what
    assert fork.leftovers() == []


def test_a_mode_that_is_not_read_is_found_in_the_commit(fork, developer, monkeypatch):
    fork.put({"0001-x.patch": developer.patch({"vllm/new.py": "x = 1\n"})})
    read = fork.patches()
    file = fork.folder() / "0001-x.patch"
    file.write_bytes(file.read_bytes().replace(b"new file mode 100644", b"new file mode 100755"))
    assert fork.apply().patches[0].moved == ()
    monkeypatch.setattr(apply, "read_patches", lambda *_: read)
    with pytest.raises(MisplacedHunkError, match="another mode"):
        fork.with_cache(fork.root / "other").apply()


@pytest.mark.parametrize(
    "encoding", [b"base64", b"quoted-printable", b"BASE64", b"Quoted-Printable"]
)
def test_an_encoded_mail_is_refused_not_a_traceback(fork, good, encoding):
    data = good.replace(b"\nSubject:", ENCODED % encoding, 1)
    data = data.replace(b'"a": 1', b'"a": =31')
    with pytest.raises(PatchFormatError, match="the mail is encoded"):
        fork.apply_one(data)
    plain = good.replace(b"\nSubject:", ENCODED % b"8bit", 1)
    assert b'"b": 3' in fork.blob(fork.apply_one(plain), "vllm/table.json")


def test_the_line_above_the_others_names_the_same_file(fork, developer):
    data = developer.patch({"vllm/notes.txt": "one\n2\nthree\n"})
    for lie in (
        data.replace(b"diff --git a/vllm/notes.txt b/vllm/notes.txt", b"diff --git a/x b/x"),
        data.replace(b"+++ b/vllm/notes.txt", b"+++ b/vllm/core.py"),
    ):
        with pytest.raises(PatchFormatError, match="is of other files"):
            fork.apply_one(lie)
    assert fork.blob(fork.apply_one(data), "vllm/notes.txt") == b"one\n2\nthree\n"


@pytest.mark.parametrize(
    "junk", [b"+  mine\n", b"junk\n", b" context\n", b"-- \n+mine\n", b"\\ x\n"]
)
def test_lines_behind_the_last_hunk_are_not_left_out_without_a_word(fork, good, junk):
    with pytest.raises(PatchFormatError, match=r"stands behind a hunk|damaged"):
        fork.apply_one(good + junk)
    for end in (b"-- \n2.39.5\n\n", b"-- \n2.39.5\n", b"\n"):
        assert b'"b": 3' in fork.blob(fork.apply_one(good + end), "vllm/table.json")


def test_lines_between_two_hunks(fork, developer):
    edited = CORE.replace("total = 0", "total = 1").replace("    main()\n", "    main(1)\n")
    data = developer.patch({"vllm/core.py": edited})
    head, at, tail = data.rpartition(b"\n@@ ")
    with pytest.raises(PatchFormatError, match=r"stands behind a hunk|damaged"):
        fork.apply_one(head + b"\n+    mine()" + at + tail)
    assert fork.blob(fork.apply_one(data), "vllm/core.py") == edited.encode()


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("vllm/core.py", "        total = 0\n", "        total = 0\n        more = 0\n"),
        ("vllm/core.py", "        total = 0\n", "        total = 1\n"),
        ("vllm/core.py", '"""Core."""\n', '# first\n"""Core."""\n'),
        ("vllm/core.py", "    main()\n", "    main()\n    main()\n"),
    ],
)
def test_a_patch_without_context_is_told_so(fork, developer, path, old, new):
    edited = new.join(CORE.rsplit(old, 1))
    data = developer.patch({path: edited}, options=("--unified=0",))
    with pytest.raises(PatchFormatError) as caught:
        fork.apply_one(data)
    assert "shows no line above its change (-U0)" in caught.value.what
    assert "export" in caught.value.next_step
    again = developer.git("format-patch", *developer.FORMAT, "--unified=1", "-1")
    assert fork.blob(fork.apply_one(again), path) == edited.encode()


ODD_PATHS = ["vllm/a b/c b/d.py", "vllm/x b/vllm/x", "vllm/ü b/ü.py", "vllm/tab\tb/x.txt"]


@pytest.mark.parametrize("path", ODD_PATHS)
def test_a_path_that_reads_like_the_second_path(tmp_path, path):
    """Added, changed, emptied, deleted and renamed; through a patch and through an export."""
    developer = Developer.new(tmp_path / "developer", FILES)
    patches = {
        "0001-add.patch": developer.patch({path: "one\n", f"{path}.empty": ""}, "Add"),
        "0002-change.patch": developer.patch({path: "one\ntwo\n"}, "Change"),
        "0003-rename.patch": developer.patch(
            {path: None, f"{path} b/new": "one\ntwo\n"}, "Rename", options=("--find-renames",)
        ),
        "0004-delete.patch": developer.patch(
            {f"{path} b/new": None, f"{path}.empty": None}, "Delete"
        ),
    }
    fork = Fork.new(tmp_path / "fork", FILES)
    fork.put(dict(list(patches.items())[:3]))
    applied = fork.apply()
    assert fork.blob(applied, f"{path} b/new") == b"one\ntwo\n"
    assert [change.path for change in fork.patches()[0].changes] == [path, f"{path}.empty"]
    fork.put(patches)
    end = fork.apply()
    assert end.repository.text("diff-tree", "-r", end.base, end.head) == ""
    fork.put(dict(list(patches.items())[:2]))
    work = Work(fork)
    work.export()
    work.user.write({path: "three\n"})
    work.user.git("add", "--all")
    work.user.git("commit", "--quiet", "-m", message("Once more"))
    work.export()
    work.check()
    assert fork.blob(fork.apply(), path) == b"three\n"


@pytest.mark.parametrize("words", [b"Gr\xf6\xdfe", None])
def test_a_commit_that_nobody_can_read(work, words):
    """Its message, or (None) its author, is in no known encoding: no traceback, nothing written."""
    before = work.fork.files()
    text = b"Two\n\n" + (words or b"Words.") + b"\n"
    author = {} if words else {"GIT_AUTHOR_NAME": os.fsdecode(b"J\xf6rg")}
    work.user.write({"vllm/more.txt": "one\n"})
    work.user.git("add", "--all")
    work.user.git(
        "-c", "i18n.commitEncoding=bogus-1", "commit", "--quiet", "-F-", stdin=text, **author
    )
    run = work.fork.run("export", "--tag", TAG, "--worktree", work.folder, code=8)
    assert "not in the encoding that it names (bogus-1)" in run.stderr
    assert work.user.head[:12] in run.stderr
    assert "reword" in run.stderr
    assert work.fork.files() == before
    work.user.git(
        "commit", "--quiet", "--amend", "--reset-author", "-F-", stdin=message("Größe").encode()
    )
    assert work.export()[0]
