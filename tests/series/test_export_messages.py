"""What a commit may say and hold: all that a patch can carry comes through, the rest is refused."""

from __future__ import annotations

import shutil

import pytest

from builder.errors import PatchFormatError
from tests.series.fork import REASON, TAG, Work, message

NEW = {"vllm/new.py": "x = 1\n"}


SUBJECTS = {
    "tags": "[Core][Bugfix] Start [again]",
    "a patch tag": "[PATCH 1/2] Start",
    "re": "Re: Start",
    "not ASCII": "[Größe] Łódź → 東京 🚀",
    "quotes": "Say \"yes\" to 'no' & <b> (c) [d] {e} \\ %s",
    "dots and slashes": "../../etc/passwd: don't... end.",
    "long": "[Core] " + "a rather long subject that a mail header would fold, " * 6 + "end",
    "long without spaces": "x" * 300,
    "long and not ASCII": "Größe " * 40 + "ende",
    "number": "0009-Start.patch",
    "only signs": "!!!",
}


def messages(git, base, head="HEAD"):
    return git("log", "--reverse", "--format=%B%T", f"{base}..{head}")


def test_subjects_come_through(work):
    for n, subject in enumerate(SUBJECTS.values()):
        work.user.commit({f"vllm/new{n}.py": "x = 1\n"}, message(subject))
    written, removed = work.export()
    assert removed == []
    assert [line[:5] for line in written] == [f"{n:04d}-" for n in range(4, 4 + len(SUBJECTS))]
    assert all(len(line) <= 5 + 52 + 6 for line in written)
    work.check()
    again = work.fork.apply()
    assert messages(again.repository.run, again.base, again.head) == messages(work.user.git, TAG)
    assert [patch.subject for patch in again.patches[3:]] == list(SUBJECTS.values())
    shutil.rmtree(work.folder)
    assert Work(work.fork).export() == ([], [])


BODIES = {
    "header-like lines": f"{REASON}\nFrom: a line that says from\nSubject: to change\nDate: never\n",
    "a sentence with From": f"{REASON}\nFrom now on it works: since 10:30, at least.\n",
    "quoted": "> quoted\n>> twice\n>From the past\n\n" + REASON,
    "indented code": REASON
    + "\n    diff --git a/x b/x\n    --- a/x\n    +++ b/x\n    @@ -1 +1 @@\n",
    "scissors": REASON + "\n-- >8 --\n\nbelow\n",
    "rule and list": REASON + "\n----\n--\n* a\n- b\n# c\n=====\n",
    "not ASCII": REASON + "\nGröße → 東京 🚀\n",
    "long line": REASON + "\n" + "word " * 400 + "end\n",
    "trailers": REASON
    + "\nCo-authored-by: Jöhn <j@example.invalid>\nLink: https://example.invalid/1\n",
    "no body": "",
    "CR in a line": REASON + "\na\rb\n",
    "tabs": REASON + "\n\tx\ty\n",
}


def test_bodies_come_through(work):
    for n, (case, body) in enumerate(BODIES.items()):
        work.user.commit({f"vllm/new{n}.py": "x = 1\n"}, message(f"[Core] {case}", body=body))
    work.export()
    work.check()
    again = work.fork.apply()
    assert messages(again.repository.run, again.base, again.head) == messages(work.user.git, TAG)


def test_blank_lines_that_git_strips_do_not_make_an_endless_export(work):
    texts = [
        "\n\n" + message("[Core] 1"),
        message("[Core] 2") + "\n\n\n",
        message("[Core] 3").replace("stop at", "stop at  \n\n\n\n"),
        message("[Core] 4  \t"),
        message("[Core] 5").rstrip("\n"),
    ]
    for n, text in enumerate(texts):
        work.user.commit({f"vllm/new{n}.py": "x = 1\n"}, text)
    work.export()
    work.check()
    shutil.rmtree(work.folder)
    assert Work(work.fork).export() == ([], [])


REFUSED_LINES = {
    "---": "---",
    "--- with spaces": "---  ",
    "--- path": "--- a/vllm/core.py",
    "diff": "diff --git a/x b/x",
    "index": "Index: x",
    "mbox": "From me@example.invalid Mon Jan  1 10:00:00 2024",
}


@pytest.mark.parametrize("case", REFUSED_LINES)
def test_a_line_that_would_cut_the_message_is_refused(work, case):
    before = work.fork.files()
    line = REFUSED_LINES[case]
    work.user.commit(NEW, message("[Core] Start", body=f"{REASON}\n{line}\n\n{REASON}"))
    with pytest.raises(PatchFormatError) as caught:
        work.export()
    assert repr(line[:12]) in caught.value.what
    assert "cut the message" in caught.value.what
    assert caught.value.where == "[Core] Start"
    assert "reword" in caught.value.next_step
    assert work.fork.files() == before
    assert work.fork.leftovers() == []


@pytest.mark.parametrize(
    "first",
    ["From: me <me@example.invalid>", "Date: today", "Subject: other", "[PATCH] x", ">From x"],
)
def test_a_body_that_begins_like_a_header_is_refused(work, first):
    work.user.commit(NEW, message("[Core] Start", body=f"{first}\n{REASON}"))
    with pytest.raises(PatchFormatError) as caught:
        work.export()
    assert "header" in caught.value.what


def test_a_subject_of_two_lines_is_refused(work):
    work.user.commit(NEW, message("[Core] Start\nand stop"))
    with pytest.raises(PatchFormatError, match="two lines"):
        work.export()


def test_a_subject_that_a_mail_reader_would_decode_is_refused(work):
    work.user.commit(NEW, message("[Core] Read =?UTF-8?q?x?="))
    with pytest.raises(PatchFormatError, match="does not survive"):
        work.export()


def add_link(user):
    (user.folder / "vllm" / "link.py").symlink_to("core.py")


UNFIT = {
    "binary": (lambda user: user.write({"vllm/x.bin": b"\0\1"}), "binary file"),
    "latin-1": (lambda user: user.write({"vllm/x.txt": b"\xfc\n"}), "not UTF-8"),
    "mode": (lambda user: (user.folder / "vllm/core.py").chmod(0o755), "file's mode"),
    "link": (add_link, "a link"),
    "nothing": (lambda _: None, "changes nothing"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_no_patch_can_carry_is_refused(work, case):
    change, said = UNFIT[case]
    before = work.fork.files()
    change(work.user)
    work.user.commit({}, message("[Core] Start"))
    with pytest.raises(PatchFormatError, match=said) as caught:
        work.export()
    assert caught.value.where == "[Core] Start"
    assert work.fork.files() == before
    assert work.fork.leftovers() == []
