"""What a patch file has to be: each bad one is named with its cause, and leaves nothing behind."""

from __future__ import annotations

import re

import pytest

from builder.diff import NULL_BLOB
from builder.errors import BuilderError, PatchConflictError, PatchFormatError
from builder.patchfile import read_patch
from tests.series.fork import AUTHOR, CORE, DATE, EMAIL, REASON, TRAILERS, message

FORMAT, CONFLICT = PatchFormatError.exit_code, PatchConflictError.exit_code


def changed_core(old="total = 0", new="total = 1"):
    assert old in CORE
    return CORE.replace(old, new, 1)


@pytest.fixture
def good(developer):
    """A patch with two hunks in one file and one in another."""
    data = developer.patch({
        "vllm/core.py": changed_core().replace("print(", "print(1, "),
        "vllm/table.json": '{\n  "a": 1,\n  "b": 3\n}\n',
    })  # fmt: skip
    developer.reset()
    assert data.count(b"\n@@ ") == 3
    return data


def cut_in_line(data):
    return data[: data.rindex(b'"b": 3') + 4]


def cut_in_hunk(data):
    return data[: data.rindex(b'+  "b": 3')]


def cut_before_hunks(data):
    return data[: data.index(b"\n@@ ") + 1]


def cut_before_diff(data):
    return data[: data.index(b"\ndiff --git") + 1]


def cut_in_header(data):
    return data[: data.index(b"Subject:")]


def in_message(line):
    return lambda data: data.replace(b"Servers with", line + b"\nServers with", 1)


def path_becomes(path):
    return lambda data: data.replace(b"vllm/table.json", path)


def without(header):
    return lambda data: re.sub(rb"(?m)^%s:.*\n" % header, b"", data, count=1)


BAD = {
    "empty": (lambda _: b"", FORMAT, "empty", "restore it"),
    "blank": (lambda _: b"\n \n", FORMAT, "empty", "restore it"),
    "cut in a line": (cut_in_line, FORMAT, "middle of a line: truncated", "restore"),
    "cut in a hunk": (cut_in_hunk, FORMAT, "truncated", "restore"),
    "cut before the hunks": (cut_before_hunks, FORMAT, "truncated", "restore"),
    "cut before the diff": (cut_before_diff, FORMAT, "holds no diff: truncated", "export"),
    "cut in the header": (cut_in_header, FORMAT, "holds no diff: truncated", "export"),
    "CRLF": (lambda d: d.replace(b"\n", b"\r\n"), FORMAT, "converted to CRLF", "-text"),
    "bare diff": (lambda d: d[d.index(b"diff --git"):], FORMAT, "format-patch", "export"),
    "mbox From line": (
        in_message(b"From someone@example.invalid Mon Jan  1 00:00:00 2024"),
        FORMAT, "line 6 begins with 'From '", "reword line 6",
    ),
    "two mails": (lambda d: d + d, FORMAT, "begins with 'From '", "reword"),
    "git's own files": (path_becomes(b".git/config"), FORMAT, "'.git/config'", "remove"),
    "git's own files below": (path_becomes(b"vllm/.GIT/x"), FORMAT, "'vllm/.GIT/x'", "remove"),
    "outside": (path_becomes(b"../table.json"), FORMAT, "outside the tree", "remove"),
    "outside below": (path_becomes(b"vllm/../../x.json"), FORMAT, "outside the tree", "remove"),
    "absolute": (path_becomes(b"/etc/x.json"), FORMAT, "outside the tree", "remove"),
    "absent file": (path_becomes(b"vllm/absent.json"), CONFLICT, "changes a file that is not there",
                    "upstream moved it"),
    "no date": (without(b"Date"), FORMAT, "no Date:", "export"),
    "no author": (without(b"From"), FORMAT, "no From:", "export"),
    "no subject": (without(b"Subject"), FORMAT, "no Subject:", "export"),
    "latin-1 message": (in_message("Günther:".encode("latin-1")), FORMAT, "line 6 is not UTF-8",
                        "UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_and_leaves_nothing_behind(fork, good, case):
    damage, code, cause, next_step = BAD[case]
    with pytest.raises(BuilderError) as caught:
        fork.apply_one(damage(good), "0001-bad.patch")
    error = caught.value
    assert error.exit_code == code, str(error)
    assert "0001-bad.patch" in error.where
    assert cause in error.what
    assert next_step in error.next_step
    assert fork.leftovers() == []
    applied = fork.apply_one(good)
    assert b'"b": 3' in fork.blob(applied, "vllm/table.json")
    assert fork.leftovers() == []


def write_mode(developer, path, mode):
    developer.git("update-index", "--cacheinfo", f"{mode},{developer_blob(developer)},{path}")


def developer_blob(developer):
    return developer.git("hash-object", "-w", "--stdin", stdin=b"core.py").decode().strip()


def index_patch(developer, *commands):
    """A commit made in the index alone, as a patch."""
    for command in commands:
        developer.git(*command)
    developer.git("commit", "--quiet", "-m", message("Do the thing"))
    return developer.git("format-patch", *developer.FORMAT, "--binary", "-1")


def cacheinfo(developer, mode, path):
    return ("update-index", "--add", "--cacheinfo", f"{mode},{developer_blob(developer)},{path}")


MADE = {
    "mode": (
        lambda d: index_patch(d, ("update-index", "--chmod=+x", "vllm/core.py")),
        "changes a file's mode", "leave upstream's modes",
    ),
    "new link": (
        lambda d: index_patch(d, cacheinfo(d, "120000", "vllm/link.py")),
        "link", "regular file",
    ),
    "file becomes a link": (
        lambda d: index_patch(d, cacheinfo(d, "120000", "vllm/no_end.py")),
        "link", "regular file",
    ),
    "submodule": (
        lambda d: index_patch(
            d, ("update-index", "--add", "--cacheinfo", f"160000,{d.head},third_party/x")
        ),
        "submodule", "regular file",
    ),
    "new binary": (
        lambda d: d.patch({"vllm/x.bin": b"\0\1\2"}, options=("--binary",)),
        "binary", "build or run time",
    ),
    "binary without its data": (
        lambda d: d.patch({"vllm/x.bin": b"\0\1\2"}, options=("--no-binary",)),
        "binary", "build or run time",
    ),
    "latin-1 file": (
        lambda d: d.patch({"vllm/x.py": "x = 'ü'\n".encode("latin-1")}),
        "is not UTF-8", "UTF-8",
    ),
    "only a message": (
        lambda d: d.patch({}, options=("--always",)), "no diff", "export",
    ),
    "copy": (
        lambda d: d.patch(
            {"vllm/core2.py": CORE, "vllm/core.py": changed_core()}, options=("-C", "--find-copies"),
        ),
        "copies a file", "export",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE)
def test_a_change_that_no_patch_may_make(fork, developer, case):
    make, cause, next_step = MADE[case]
    with pytest.raises(PatchFormatError) as caught:
        fork.apply_one(make(developer), "0001-bad.patch")
    assert cause in caught.value.what
    assert next_step in caught.value.next_step
    assert "0001-bad.patch" in caught.value.where
    assert fork.leftovers() == []


def test_a_changed_link_is_refused_too(tmp_path, developer):
    index_patch(developer, cacheinfo(developer, "120000", "vllm/link.py"))
    other = developer.git("hash-object", "-w", "--stdin", stdin=b"no_end.py").decode().strip()
    changed = index_patch(
        developer, ("update-index", "--cacheinfo", f"120000,{other},vllm/link.py")
    )
    assert b"new file mode" not in changed
    removed = index_patch(developer, ("update-index", "--force-remove", "vllm/link.py"))
    for data in (changed, removed):
        (tmp_path / "0001-x.patch").write_bytes(data)
        with pytest.raises(PatchFormatError, match="link"):
            read_patch(tmp_path / "0001-x.patch", tmp_path / "scratch")


def test_a_file_that_is_no_file_is_a_fault_of_the_series(fork, good):
    fork.put({"0001-x.patch": good})
    (fork.folder() / "0001-x.patch").unlink()
    (fork.folder() / "0001-x.patch").mkdir()
    with pytest.raises(BuilderError) as caught:
        fork.apply()
    assert caught.value.exit_code == 11


def test_what_is_read_from_a_good_patch(tmp_path, developer):
    data = developer.patch(
        {
            "vllm/core.py": changed_core(),
            "vllm/new.py": "x = 1\ny = 2",
            "vllm/empty.py": "",
            "vllm/notes.txt": None,
            "vllm/run.sh": "#!/bin/sh\n",
            "vllm/with space.txt": "a\n",
            "vllm/ümlaut.txt": "a\n",
        },
        "[Core][Bugfix] Start with größe",
        GIT_AUTHOR_NAME='Jöhn "J" Doe, Jr',
        GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="core.quotePath", GIT_CONFIG_VALUE_0="false",
    )  # fmt: skip
    file = tmp_path / "0001-x.patch"
    file.write_bytes(data)
    patch = read_patch(file, tmp_path / "scratch")
    assert patch.subject == "[Core][Bugfix] Start with größe"
    assert patch.author == f'Jöhn "J" Doe, Jr <{EMAIL}>'
    assert patch.date == "Tue, 14 Nov 2023 23:13:20 +0100"
    assert DATE.startswith("1700000000")
    assert patch.trailers == (
        ("Upstream-Status", "Pending"),
        ("Drop-When", 'path vllm/core.py contains "ready"'),
        ("Signed-off-by", f"{AUTHOR} <{EMAIL}>"),
    )
    assert patch.body == f"{REASON}\n{TRAILERS}".strip()
    changes = {change.path: change for change in patch.changes}
    assert set(changes) == {
        "vllm/core.py", "vllm/new.py", "vllm/empty.py", "vllm/notes.txt", "vllm/run.sh",
        "vllm/with space.txt", "vllm/ümlaut.txt",
    }  # fmt: skip
    core = changes["vllm/core.py"]
    assert (core.added, core.removed) == (1, 1)
    assert core.old_blob == developer.git("rev-parse", "release:vllm/core.py").decode().strip()
    assert core.new_blob == developer.git("rev-parse", "HEAD:vllm/core.py").decode().strip()
    assert (
        core.hunks[0].heading == "def start(self, size):" or "class Engine" in core.hunks[0].heading
    )
    new = changes["vllm/new.py"]
    assert (new.old_path, new.old_blob) == (None, NULL_BLOB)
    assert new.hunks[0].postimage == ("x = 1\n", "y = 2")
    assert changes["vllm/empty.py"].hunks == ()
    assert changes["vllm/notes.txt"].new_path is None
    assert changes["vllm/notes.txt"].hunks[0].preimage == ("one\n", "two\n", "three\n")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_quoted_path_is_the_path(fork, developer):
    """git quotes a path outside ASCII unless core.quotePath is off."""
    data = developer.patch({"vllm/ümlaut.txt": "a\n", 'vllm/"q"\\.txt': "b\n"})
    assert rb"\303\274mlaut" in data
    applied = fork.apply_one(data)
    assert fork.blob(applied, "vllm/ümlaut.txt") == b"a\n"
    assert fork.blob(applied, 'vllm/"q"\\.txt') == b"b\n"
    assert {change.path for change in fork.patches()[0].changes} == {
        "vllm/ümlaut.txt", 'vllm/"q"\\.txt',
    }  # fmt: skip


def test_a_quoted_path_leads_nowhere_else(fork, good):
    data = good.replace(b"a/vllm/table.json", rb'"a/\056\056/table.json"').replace(
        b"b/vllm/table.json", rb'"b/\056\056/table.json"'
    )
    with pytest.raises(PatchFormatError, match="outside the tree"):
        fork.apply_one(data)


def test_a_changed_name_of_a_patch_is_read_by_git_under_any_locale(fork, developer, monkeypatch):
    """A subject and body outside ASCII are UTF-8 whatever the user's locale says."""
    monkeypatch.setenv("LC_ALL", "en_US.ISO-8859-1")
    data = developer.patch(
        {"vllm/new.py": "x = 'ü'\n"}, text=message("Größe", body="Maß\n" + REASON)
    )
    applied = fork.apply_one(data)
    patch = fork.patches()[0]
    assert patch.subject == "Größe"
    assert patch.body.startswith("Maß")
    assert applied.patches[0].subject == "Größe"


@pytest.mark.parametrize(
    "from_line", ["From now on this is quicker.", "From: nobody in particular"]
)
def test_a_sentence_that_begins_with_from_is_a_sentence(fork, developer, from_line):
    text = message("Do the thing", body=f"{REASON}{from_line}\n{REASON}")
    applied = fork.apply_one(developer.patch({"vllm/new.py": "x = 1\n"}, text=text))
    said = applied.repository.run("log", "-1", "--format=%B", applied.head).decode()
    assert said.strip() == text.strip()


def test_trailing_signature_of_another_git_changes_nothing(fork, good):
    plain = fork.apply_one(good)
    signed = fork.apply_one(good + b"-- \n2.39.5\n\n")
    assert signed.head == plain.head
