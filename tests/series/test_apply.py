"""Applying a series: the same commits everywhere, strictly, and nothing left behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from builder import apply, atomic
from builder.errors import BuilderError, MisplacedHunkError, PatchConflictError
from tests.series import hostile
from tests.series.fork import CORE, FILES, ROOT, message, three


@pytest.fixture
def series(developer):
    return three(developer)


def ids(applied):
    return [applied.base, *(patch.commit for patch in applied.patches), applied.head]


def test_one_commit_a_patch_with_author_message_and_date(fork, developer, series):
    fork.put(series)
    applied = fork.apply()
    git = applied.repository
    assert [patch.name for patch in applied.patches] == list(series)
    assert applied.head == applied.patches[-1].commit
    shape = "--format=%T%n%an <%ae> %ad%n%B"
    ours = git.run("log", "--reverse", "--date=raw", shape, f"{applied.base}..{applied.head}")
    theirs = developer.git("log", "--reverse", "--date=raw", shape, "release..HEAD")
    assert ours == theirs
    assert git.text("log", "-1", "--format=%cn <%ce> %cd", "--date=raw", applied.head) == (
        "vllm-glm5 maintainers <maintainers@vllm-glm5.invalid> 1700000000 +0100"
    )


def test_the_same_ids_in_two_caches_and_a_second_later(fork, series):
    fork.put(series)
    first = fork.apply()
    time.sleep(1.1)
    second = fork.with_cache(fork.root / "other-cache").apply()
    assert ids(first) == ids(second)
    shutil.rmtree(fork.cache.root / "series")
    assert ids(fork.apply()) == ids(first)


def in_child(fork, cache, environment):
    """Apply the series in a process that has this environment; return the ids."""
    code = (
        "import sys, json; from pathlib import Path; from tests.series.fork import *\n"
        "fork = Fork(Path(sys.argv[1]), Project(Path(sys.argv[1]) / 'project'), "
        "Cache(Path(sys.argv[2])))\n"
        "a = fork.apply(); print(json.dumps([a.base, *(p.commit for p in a.patches), a.head]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(fork.root), str(cache)],
        env=environment | {"PYTHONPATH": str(ROOT)}, cwd=fork.root,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "a hook ran" not in process.stderr
    return json.loads(process.stdout)


def test_the_users_git_settings_change_nothing(fork, series, tmp_path):
    fork.put(series)
    expected = ids(fork.apply())
    home = tmp_path / "home"
    environment = hostile.environment(home)
    other = fork.with_cache(tmp_path / "hostile-cache").cache.root
    assert in_child(fork, other, environment) == expected
    assert not (home / "nowhere.git").exists()
    assert not (home / "index").exists()


def test_the_settings_are_hostile_indeed(developer, series, tmp_path):
    """The control: plain git with them writes other bytes, and fails to apply."""
    environment = hostile.environment(tmp_path / "home")
    plain = {name: value for name, value in environment.items() if not name.startswith("GIT_")}
    plain["GIT_CONFIG_GLOBAL"] = environment["GIT_CONFIG_GLOBAL"]
    written = subprocess.run(
        ["git", "format-patch", "--stdout", "-1"], cwd=developer.folder, env=plain,
        capture_output=True, check=False,
    )  # fmt: skip
    assert written.stdout != series["0003-three.patch"]
    developer.reset()
    for name, data in series.items():
        (tmp_path / name).write_bytes(data)
    applied = subprocess.run(
        ["git", "am", str(tmp_path / "0001-one.patch")], cwd=developer.folder, env=plain,
        capture_output=True, check=False,
    )  # fmt: skip
    assert applied.returncode


def test_locale_time_zone_umask_and_folder_change_nothing(fork, series, tmp_path):
    fork.put(series)
    expected = ids(fork.apply())
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0",
                   "PYTHONUTF8": "0", "TZ": "Pacific/Chatham", "PYTHONHASHSEED": "7"}  # fmt: skip
    old = os.umask(0o077)
    try:
        assert in_child(fork, fork.with_cache(tmp_path / "c").cache.root, environment) == expected
    finally:
        os.umask(old)


def test_what_was_applied_is_not_applied_again(fork, series, monkeypatch):
    fork.put(series)
    first = fork.apply()
    monkeypatch.setattr(apply, "_apply", None)  # would fail
    again = fork.apply()
    assert again == first


@pytest.mark.parametrize("damage", ["{", "{}", "[]", '{"head": 1, "patches": 2}', ""])
def test_a_damaged_record_is_made_again(fork, series, damage):
    fork.put(series)
    first = fork.apply()
    (record,) = (fork.cache.root / "series").glob("*.json")
    record.write_text(damage)
    assert ids(fork.apply()) == ids(first)


def test_a_repository_that_was_deleted_is_made_again(fork, series):
    fork.put(series)
    first = fork.apply()
    shutil.rmtree(fork.cache.repository)
    assert ids(fork.apply()) == ids(first)
    assert fork.blob(fork.apply(), "vllm/table.json") == b'{\n  "a": 1,\n  "b": 3\n}\n'


def test_gc_leaves_the_commits(fork, series):
    fork.put(series)
    applied = fork.apply()
    applied.repository.run("gc", "--prune=now", "--quiet")
    assert fork.blob(applied, "vllm/table.json")


def test_any_changed_byte_is_another_series(fork, series):
    fork.put(series)
    first = fork.apply()
    fork.put(series | {"0003-three.patch": series["0003-three.patch"].replace(b"Three", b"Third")})
    assert fork.apply().head != first.head
    assert fork.apply().patches[1].commit == first.patches[1].commit


def test_an_empty_series_is_the_release(fork):
    fork.put({})
    applied = fork.apply()
    assert applied.head == applied.base
    assert applied.patches == ()


def test_upstreams_own_attributes_convert_nothing(fork, series):
    """.gitattributes says that .txt gets CRLF, .dat is binary and .lock has no diff."""
    fork.put(series)
    applied = fork.apply()
    assert fork.blob(applied, "vllm/deps.lock") == b"a=1\nb=3\nc=3\n"
    assert (
        fork.blob(applied, "vllm/dos.py") == FILES["vllm/dos.py"].replace("y = 2", "y = 3").encode()
    )


def test_a_text_file_with_converted_line_ends_in_upstreams_attributes(fork, developer):
    applied = fork.apply_one(developer.patch({"vllm/notes.txt": "one\n2\nthree\n"}))
    assert fork.blob(applied, "vllm/notes.txt") == b"one\n2\nthree\n"


def test_white_space_is_not_mended(fork, developer):
    odd = CORE.replace("total = 0", "total = 0  \t") + " \t\n\n\n"
    applied = fork.apply_one(developer.patch({"vllm/core.py": odd}))
    assert fork.blob(applied, "vllm/core.py") == odd.encode()


CONFLICTS = {
    "adds a file that exists": (
        {"vllm/core.py": None}, {"vllm/core.py": "x = 1\n"}, "adds a file that is there already",
    ),
    "deletes a missing file": (
        {"vllm/gone.py": "x = 1\n"}, {"vllm/gone.py": None}, "deletes a file that is not there",
    ),
    "changes a missing file": (
        {"vllm/gone.py": "x = 1\n"}, {"vllm/gone.py": "x = 2\n"}, "changes a file that is not there",
    ),
    "deletes a file that has changed": (
        {"vllm/notes.txt": "one\ntwo\n"}, {"vllm/notes.txt": None}, "ends at the last line",
    ),
    "changes other lines": (
        {"vllm/core.py": CORE.replace("self.running = False", "self.up = False")},
        {"vllm/core.py": CORE.replace("self.running = False", "self.up = None")},
        "are not there",
    ),
    "adds below a file": (
        {"vllm/notes.txt": None}, {"vllm/notes.txt/x.py": "x = 1\n"}, "git am refuses the patch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFLICTS)
def test_a_conflict_is_named_and_leaves_nothing_behind(fork, developer, series, case):
    before, after, said = CONFLICTS[case]
    developer.reset()
    developer.commit(before, "another release\n")
    bad = developer.patch(after, "Bad")
    good = {name: series[name] for name in ("0001-one.patch", "0002-two.patch")}
    if case == "changes other lines":
        good.pop("0001-one.patch")
        good.pop("0002-two.patch")
    fork.put(good | {"0009-bad.patch": bad})
    with pytest.raises(PatchConflictError) as caught:
        fork.apply()
    assert said in caught.value.what
    assert "0009-bad.patch" in caught.value.where
    assert next(iter(after)) in caught.value.where + "".join(caught.value.details)
    assert fork.leftovers() == []
    assert not list((fork.cache.root / "series").glob("*.json"))
    if case == "changes other lines":
        shown = "\n".join(caught.value.details)
        assert "-         self.up = False" in shown
        assert "+         self.running = False" in shown
        assert "hunk 1" in caught.value.where
        assert f"from line {CORE.splitlines().index('        return total') + 1})" in shown
    fork.put(series)
    assert fork.apply().patches[2].subject == "[Core] Three"
    assert fork.leftovers() == []


def test_git_has_to_agree_about_the_place(fork, developer, series, monkeypatch):
    """If git put a hunk elsewhere than placement says, the build would stop there."""
    monkeypatch.setattr(apply, "AM", (*apply.AM, "--exclude=vllm/new.py"))
    fork.put(series)
    with pytest.raises(MisplacedHunkError) as caught:
        fork.apply()
    assert caught.value.where == "0001-one.patch: vllm/new.py"
    assert fork.leftovers() == []


def test_a_rename_is_followed(fork, developer):
    longer = CORE.replace("total = 0", "total = 1")
    data = developer.patch(
        {"vllm/core.py": None, "vllm/engine.py": longer}, options=("--find-renames",)
    )
    assert b"rename from" in data
    applied = fork.apply_one(data)
    assert fork.blob(applied, "vllm/engine.py") == longer.encode()
    developer.reset()
    data = developer.patch(
        {"vllm/core.py": None, "vllm/engine.py": CORE}, options=("--find-renames",)
    )
    assert b"similarity index 100%" in data
    assert fork.blob(fork.apply_one(data), "vllm/engine.py") == CORE.encode()


def test_a_new_script_is_executable(fork, developer):
    (developer.folder / "vllm/run.sh").write_text("#!/bin/sh\n")
    (developer.folder / "vllm/run.sh").chmod(0o755)
    applied = fork.apply_one(developer.patch({}))
    listed = applied.repository.text("ls-tree", applied.head, "vllm/run.sh")
    assert listed.startswith("100755 ")


def test_two_at_once_end_alike(fork, series, tmp_path):
    fork.put(series)
    code = (
        "import sys; from pathlib import Path; from tests.series.fork import *\n"
        "fork = Fork(Path(sys.argv[1]), Project(Path(sys.argv[1]) / 'project'), "
        "Cache(Path(sys.argv[1]) / 'cache'))\n"
        "print(fork.apply().head)"
    )
    shutil.rmtree(fork.cache.repository)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(fork.root)], cwd=fork.root,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    ends = [(process.communicate(timeout=60), process.returncode) for process in running]
    assert [code for _, code in ends] == [0, 0, 0], ends
    assert len({out for (out, _), _ in ends}) == 1
    assert fork.leftovers() == []


@pytest.mark.parametrize("delay", [0.02, 0.08, 0.15, 0.25, 0.4])
def test_a_killed_run_does_no_harm(fork, series, delay):
    fork.put(series)
    expected = ids(fork.with_cache(fork.root / "other").apply())
    process = subprocess.Popen(
        [sys.executable, "-c",
         ("import sys; from pathlib import Path; from tests.series.fork import *\n"
         "fork = Fork(Path(sys.argv[1]), Project(Path(sys.argv[1]) / 'project'), "
         "Cache(Path(sys.argv[1]) / 'cache'))\n"
         "print('ready', flush=True); fork.apply()"), str(fork.root)],
        cwd=fork.root, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == b"ready\n"
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert ids(fork.apply()) == expected
    assert fork.leftovers() == []


def test_a_git_that_outlived_its_run_leaves_nothing_for_long(fork, series):
    """Its record of a work tree comes after the next run has applied the series, and pruned."""
    fork.put(series)
    applied = fork.apply()
    tree = fork.root / "tree"
    applied.repository.run("worktree", "add", "--detach", "--no-checkout", str(tree), applied.head)
    shutil.rmtree(tree)
    assert fork.leftovers() != []
    assert ids(fork.apply()) == ids(applied)
    assert fork.leftovers() == []


@pytest.mark.parametrize("written", ["all", "no gitdir", "an empty gitdir"])
def test_a_git_killed_while_it_made_a_work_tree_leaves_nothing_for_long(fork, series, written):
    """It locks its record before anything else, and git's own prune leaves a locked one for ever.

    A hook keeps git where it holds HEAD.lock, until SIGKILL.
    """
    fork.put(series)
    applied = fork.apply()
    repository = applied.repository.folder
    reached = fork.root / "reached"
    hook = fork.root / "hooks" / "reference-transaction"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(reached))}\nsleep 60\n")
    hook.chmod(0o755)
    with atomic.scratch_folder(fork.cache.work) as scratch:
        process = subprocess.Popen(
            ["git", "-c", f"core.hooksPath={hook.parent}", "worktree", "add", "--quiet",
             "--detach", "--no-checkout", str(scratch / "tree"), applied.head],
            cwd=repository, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not reached.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        (record,) = (repository / "worktrees").iterdir()
        assert (record / "HEAD.lock").exists()
        # Its scratch folder is still held: for all that is known, git is at work on it.
        assert ids(fork.apply()) == ids(applied)
        assert (record / "locked").exists()
        if written == "no gitdir":
            (record / "gitdir").unlink()
        elif written == "an empty gitdir":
            (record / "gitdir").write_bytes(b"")
    applied.repository.run("worktree", "prune", "--expire=now")
    assert fork.leftovers() == [str(record)]
    assert ids(fork.apply()) == ids(applied)
    assert fork.leftovers() == []


@pytest.mark.parametrize("reason", [(), ("--reason", "on another disk")], ids=["none", "one"])
def test_a_work_tree_that_a_person_locked_is_kept(fork, series, tmp_path, reason):
    """It is on a disk that is not there now, say. The control: one that is not locked goes."""
    fork.put(series)
    applied = fork.apply()
    git = applied.repository
    for name in ("kept", "gone"):
        tree = str(tmp_path / "disk" / name)
        git.run("worktree", "add", "--detach", "--no-checkout", tree, applied.head)
    git.run("worktree", "lock", *reason, str(tmp_path / "disk" / "kept"))
    shutil.rmtree(tmp_path / "disk")
    assert ids(fork.apply()) == ids(applied)
    assert fork.leftovers() == [str(git.folder / "worktrees" / "kept")]


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b"], ids=["too long", "no path"])
def test_a_record_of_which_nothing_can_be_told_ends_no_command(fork, series, path):
    fork.put(series)
    applied = fork.apply()
    record = applied.repository.folder / "worktrees" / "strange"
    record.mkdir(parents=True)
    (record / "gitdir").write_text(f"/{path}/tree/.git\n")
    (record / "locked").write_text("initializing")
    assert ids(fork.apply()) == ids(applied)


def test_a_message_keeps_what_a_mail_reader_would_cut(fork, developer):
    body = (
        "One line, then a scissors line:\n\n-- >8 --\n\n> quoted\n>From a line\n    From: indented\n"
        "#comment\n* starred\n\n\n\nthree blank lines above\n\ttab\n"
    )
    text = message("[A][B] x: [C] y", body=body)
    applied = fork.apply_one(developer.patch({"vllm/new.py": "x = 1\n"}, text=text))
    said = applied.repository.run("log", "-1", "--format=%B", applied.head).decode()
    assert said.strip().splitlines()[:3] == text.splitlines()[:3]
    for line in ("-- >8 --", ">From a line", "    From: indented", "#comment", "\ttab"):
        assert line in said.splitlines()


def test_errors_are_the_projects_own(fork, series):
    """Whatever happens to a patch file, an error of this tool says so (here: half of its bytes)."""
    data = series["0002-two.patch"]
    for part in range(7, len(data), 97):
        fork.put({"0001-one.patch": series["0001-one.patch"], "0002-two.patch": data[:part]})
        with pytest.raises(BuilderError) as caught:
            fork.apply()
        assert caught.value.exit_code in (8, 9), (part, str(caught.value))
        assert "0002-two.patch" in caught.value.where
        assert fork.leftovers() == []
