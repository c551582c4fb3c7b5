"""A rebase from its beginning to its end, as a maintainer runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from builder import atomic, contracts, rebase_tree
from builder.cli import State
from builder.locations import default_project
from builder.repository import Git, GitError
from tests.commands import ROOT
from tests.rebase.moving import ENGINE, NEW, OLD, Moving, edit, trailers
from tests.series.fork import message

PATH, OTHER = "vllm/engine.py", "vllm/other.py"
HOOK = ("    engine.open(name)\n", "    engine.open(name)\n    engine.hook(name)\n")
TAKEN = ("    engine.open(name)\n", "    engine.open_all(name)\n")
RESOLVED = ("    engine.open_all(name)\n", "    engine.open_all(name)\n    engine.hook(name)\n")
ABOVE = ("import os\n", "import os\nimport sys\n")
COMMON = {"vllm/ours.py": "def ours():\n    return 1\n"}
LOAD = edit(ENGINE, ("    data = path.read()\n", "    data = path.read_all()\n"))
STOP = edit(LOAD, ("        self.size = 0\n", "        self.size = -1\n"))


@pytest.fixture
def smooth(moving):
    """Four patches that need nobody: common, moved, clean, merged."""
    new = {PATH: edit(ENGINE, ABOVE), OTHER: edit(ENGINE, ("    name = ", "    label = name = ")),
           "vllm/third.py": "a = 1\n"}  # fmt: skip
    return moving(
        {PATH: ENGINE, OTHER: ENGINE, "vllm/third.py": "a = 1\n"}, new,
        ("common ours", COMMON),
        ("load", {PATH: LOAD}),
        ("third", {"vllm/third.py": "a = 2\n"}),
        ("hook", {OTHER: edit(ENGINE, HOOK)}),
    )  # fmt: skip


@pytest.fixture
def stopping(moving):
    """The second of three conflicts."""
    return moving(
        {PATH: ENGINE, OTHER: ENGINE}, {PATH: edit(ENGINE, ABOVE), OTHER: edit(ENGINE, TAKEN)},
        ("load", {PATH: LOAD}), ("hook", {OTHER: edit(ENGINE, HOOK)}), ("stop", {PATH: STOP}),
    )  # fmt: skip


def resolve(case, pair=RESOLVED):
    case.user.write({OTHER: edit(edit(ENGINE, TAKEN), pair)})
    case.user.git("add", OTHER)


def test_to_the_end(smooth):
    smooth.fork.run("revision", "--tag", OLD, "--raise")
    before = smooth.patches()
    smooth.begin()
    after = smooth.patches()
    old = {name: data for name, data in after.items() if not name.startswith(NEW)}
    assert old == {name: data for name, data in before.items() if not name.startswith(NEW)}
    lines = [entry.line for entry in smooth.fork.series(NEW).entries]
    assert lines == list(smooth.data)
    # unchanged patches are unchanged byte for byte; the moved one is not, it would be a wrong claim
    same = [n for n in lines if after.get(f"{NEW}/{n}", b"") == before.get(f"{OLD}/{n}", b"-")]
    assert same == ["0003-third.patch"]
    assert smooth.result(PATH) == edit(LOAD, ABOVE)
    assert smooth.result(OTHER) == edit(smooth.new[OTHER], HOOK)
    # What a build and CI say of it: the same commits, and the files an export writes.
    smooth.fork.run("export", "--check", "--tag", NEW)
    smooth.fork.run("series", "--tag", NEW)
    assert "revision = 1" in (smooth.fork.folder(NEW) / "revision").read_text()
    for line, word in zip(lines, ("clean", "moved", "clean", "merged"), strict=True):
        assert f"| {line} | {word} |" in smooth.report
    assert "1:  " in smooth.report  # the range-diff
    assert "engine.hook(name)" in smooth.report  # what 3-way placed, with its surroundings
    assert "upstream changed serve around it" in smooth.report
    assert not (smooth.fork.project.root / ".rebase" / NEW).exists()


def test_the_same_bytes_in_another_cache(smooth):
    smooth.begin()
    first = smooth.patches()
    shutil.rmtree(smooth.fork.folder(NEW))
    shutil.rmtree(smooth.fork.cache.repository)
    smooth.begin()
    assert smooth.patches() == first


def test_a_stop_gives_what_a_person_needs(stopping):
    before = stopping.patches()
    said = stopping.begin(code=30).stderr
    assert "0002-hook.patch (2 of 3): conflict" in said
    assert "Servers with such a card stop at start-up" in said  # the patch's purpose
    assert "<<<<<<< upstream v1.3.0" in said
    assert "+    engine.hook(name)" in said or "    engine.hook(name)" in said
    assert "+    engine.open_all(name)" in said  # upstream's own change
    assert "rebase --continue" in said
    assert stopping.patches() == before
    assert stopping.user.git("status", "--porcelain").decode() == f"UU {OTHER}\n"
    # the sides as git's own tools want them
    assert stopping.user.git("show", f":2:{OTHER}").decode() == edit(ENGINE, TAKEN)
    assert stopping.user.git("show", f":3:{OTHER}").decode() == edit(ENGINE, HOOK)
    (state,) = stopping.status()
    assert state["stop"]["line"] == "0002-hook.patch"
    assert [d["outcome"] for d in state["done"]] == ["moved"]
    said = stopping.rebase("--status").stdout
    assert "0002-hook.patch" in said
    assert "<<<<<<<" in said


@pytest.mark.parametrize("how", ["staged", "committed", "reworded", "new cache"])
def test_resolved_and_on(stopping, how):
    stopping.begin(code=30)
    resolve(stopping)
    said = stopping.rebase("--status").stdout
    assert "0002-hook.patch is resolved; next:" in said
    assert "<<<<<<<" not in said
    if how == "committed":
        stopping.user.git("commit", "--quiet", "--no-edit")
        assert "is resolved; next:" in stopping.rebase("--status").stdout
    if how == "reworded":
        text = message("hook anew", trailers=trailers()).encode()
        stopping.user.git("commit", "--quiet", "-F-", stdin=text)
    if how == "new cache":
        shutil.rmtree(stopping.fork.cache.repository)
        shutil.rmtree(stopping.fork.cache.root / "series")
    stopping.rebase("--continue")
    lines = [entry.line for entry in stopping.fork.series(NEW).entries]
    hook = "0002-hook-anew.patch" if how == "reworded" else "0002-hook.patch"
    assert lines == ["0001-load.patch", hook, "0003-stop.patch"]
    assert stopping.result(OTHER) == edit(edit(ENGINE, TAKEN), RESOLVED)
    assert stopping.result(PATH) == edit(STOP, ABOVE)
    patch = (stopping.fork.folder(NEW) / hook).read_text()
    assert "Author" not in patch
    assert "From: vllm-glm5 maintainers <maintainers@vllm-glm5.invalid>" in patch
    assert "resolved by hand" in stopping.report
    if how != "reworded":
        assert "Servers with such a card" in patch
    stopping.fork.run("export", "--check", "--tag", NEW)
    assert "no rebase is under way" in stopping.rebase("--status").stdout


def unmerged(user):
    pass


def not_added(user):
    user.write({OTHER: edit(edit(ENGINE, TAKEN), RESOLVED)})


def untracked(user):
    user.git("checkout", "--quiet", "--ours", OTHER)
    user.git("add", OTHER)
    user.write({"vllm/new.py": "a = 1\n"})


def nothing(user):
    user.git("checkout", "--quiet", "--ours", OTHER)
    user.git("add", OTHER)


def markers(user):
    user.git("add", OTHER)


def no_python(user):
    user.write({OTHER: "def broken(:\n"})
    user.git("add", OTHER)


def half_a_marker(user):
    """In a text without a syntax nothing else tells."""
    data = (user.folder / OTHER).read_text()
    user.write({OTHER: edit(edit(ENGINE, TAKEN), RESOLVED)})
    left = [line for line in data.splitlines(keepends=True) if not line.startswith("<<<<<<<")]
    user.write({"docs/x.md": "".join(left)})
    user.git("add", OTHER, "docs/x.md")


def two_commits(user):
    user.commit({OTHER: "a = 1\n"}, "one\n")
    user.commit({OTHER: "a = 2\n"}, "two\n")


def cut_message(user):
    user.write({OTHER: edit(edit(ENGINE, TAKEN), RESOLVED)})
    user.git("add", OTHER)
    text = f"hook\n\nBefore.\n---\nAfter.\n\n{trailers()}"
    user.git("commit", "--quiet", "-F-", stdin=text.encode())


def lost_message(user):
    """`git commit -m`, as one resolves elsewhere."""
    user.write({OTHER: edit(edit(ENGINE, TAKEN), RESOLVED)})
    user.git("commit", "--quiet", "-a", "-m", "resolved")


def locked(user):
    """An editor that `git commit` opened is open still."""
    user.write({OTHER: edit(edit(ENGINE, TAKEN), RESOLVED)})
    user.git("add", OTHER)
    (user.folder / ".git" / "index.lock").touch()


def binary(user):
    user.write({OTHER: edit(edit(ENGINE, TAKEN), RESOLVED), "vllm/x.bin": b"\0\1\2"})
    user.git("add", OTHER, "vllm/x.bin")


def link(user):
    user.git("checkout", "--quiet", "--ours", OTHER)
    (user.folder / "vllm" / "link").symlink_to("other.py")
    user.git("add", OTHER, "vllm/link")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (cut_message, "cut the message"),
        (binary, "binary"),
        (link, "link"),
        (unmerged, "not resolved"),
        (not_added, "not resolved"),
        (untracked, "neither staged nor committed"),
        (nothing, "nothing would be left"),
        (markers, "conflict marker"),
        (half_a_marker, "docs/x.md: a conflict marker is left"),
        (no_python, "does not compile"),
        (two_commits, "other commits"),
        (lost_message, "no Drop-When:"),
        (locked, "a git is at work in the work tree, or was killed there"),
    ],
)
def test_what_is_not_done_is_not_taken(stopping, how, words):
    before = stopping.patches()
    stopping.begin(code=30)
    how(stopping.user)
    status = stopping.user.git("status", "--porcelain")
    said = stopping.rebase("--continue", code=31).stderr
    assert words in said
    assert "next:" in said
    assert stopping.user.git("status", "--porcelain") == status  # nothing of theirs is touched
    assert stopping.patches() == before
    (stopping.tree / ".git" / "index.lock").unlink(missing_ok=True)
    stopping.user.git("reset", "--quiet", "--hard", stopping.status()[0]["stop"]["head"])
    stopping.user.git("clean", "--quiet", "-fd")
    resolve(stopping)
    stopping.rebase("--continue")
    assert stopping.result(OTHER) == edit(edit(ENGINE, TAKEN), RESOLVED)


@pytest.fixture
def half(moving):
    """One patch, two files: one conflicts, in the other upstream changed the function."""
    around = edit(ENGINE, ("    name = ", "    label = name = "))
    return moving(
        {PATH: ENGINE, OTHER: ENGINE}, {PATH: around, OTHER: edit(ENGINE, TAKEN)},
        ("hook", {PATH: edit(ENGINE, HOOK), OTHER: edit(ENGINE, HOOK)}),
    )  # fmt: skip


def test_a_stop_points_at_what_did_find_a_place(half):
    """A conflict in the docs hid that upstream had changed the function beside: nobody looked."""
    said = half.begin(code=30).stderr
    assert f"{PATH}: merged, staged: look whether it is right still" in said
    assert "upstream changed serve around it" in said
    assert "+    label = name = os.environ" in said  # upstream's own change
    assert f"{OTHER}: merged" not in said
    resolve(half)
    half.rebase("--continue")
    assert f"`{PATH}` line" in half.report
    assert "        engine.hook(name)" in half.report.partition("## Old series")[0]
    assert "no longer changes" not in half.report


def test_a_hunk_that_the_person_changed_was_looked_at(half):
    half.begin(code=30)
    half.user.write({PATH: edit((half.tree / PATH).read_text(), ("engine.hook(name)", "hook()"))})
    half.user.git("add", PATH)
    resolve(half)
    half.rebase("--continue")
    assert f"`{PATH}` line" not in half.report


def test_a_file_that_a_resolution_loses_is_named(half):
    """To take upstream's side of a file leaves the patch without it."""
    half.begin(code=30)
    half.user.git("checkout", "--quiet", "--ours", OTHER)
    half.user.git("add", OTHER)
    said = half.rebase("--continue").stdout
    assert f"it no longer changes {OTHER}\n" in said
    assert f"it no longer changes {OTHER} |" in half.report


def test_a_state_that_an_older_version_wrote(half):
    half.begin(code=30)
    file = half.tree.parent / "state.json"
    data = json.loads(file.read_text())
    del data["stop"]["paths"], data["stop"]["review"]
    file.write_text(json.dumps(data))
    resolve(half)
    half.rebase("--continue")
    assert len(half.fork.series(NEW).entries) == 1


def advised(said):
    """Return the git commands of the next step."""
    step = said.partition("next: ")[2].partition("then: ")[0]
    return [words.rstrip() for words in re.findall(r"git [^;,]*", step)]


def amended(user, head):
    resolved(user)
    user.git("commit", "--quiet", "--amend", "--no-edit")


def in_two(user, head):
    resolved(user)
    user.git("commit", "--quiet", "-m", "one")
    user.git("commit", "--quiet", "--allow-empty", "-m", "two")


def on_a_branch(user, head):
    """A branch of one's own is as good, with one commit; here with two."""
    user.git("checkout", "--quiet", "--force", "-b", "mine", head)
    in_two(user, head)


def shortened(user, head):
    resolved(user)
    user.git("commit", "--quiet", "-m", "resolved")


def left(user, head):
    resolved(user)
    user.git("commit", "--quiet", "--no-edit")
    user.git("checkout", "--quiet", f"series/{OLD}")


def detached(user, head):
    resolved(user)
    user.git("commit", "--quiet", "--no-edit")
    user.git("checkout", "--quiet", "--detach", OLD)


def resolved(user):
    user.write({OTHER: edit(edit(ENGINE, TAKEN), RESOLVED)})
    user.git("add", OTHER)


@pytest.mark.parametrize("how", [amended, in_two, on_a_branch, shortened, left, detached])
def test_the_commands_that_are_advised_lead_on(stopping, how):
    """As printed, in the work tree. Elsewhere than on the release, a `reset --soft` to it would
    make a commit that takes the whole release back.
    """
    stopping.begin(code=30)
    head = stopping.status()[0]["stop"]["head"]
    how(stopping.user, head)
    said = stopping.rebase("--continue", code=31).stderr
    series = stopping.user.git("rev-parse", f"series/{OLD}")
    (command,) = advised(said)
    subprocess.run(
        ["bash", "-ec", command],
        cwd=stopping.tree, check=True, env=os.environ | {"GIT_EDITOR": "false"},
    )  # fmt: skip
    assert stopping.user.git("rev-parse", f"series/{OLD}") == series
    stopping.rebase("--continue")
    assert stopping.result(OTHER) == edit(edit(ENGINE, TAKEN), RESOLVED)
    assert stopping.result(PATH) == edit(STOP, ABOVE)
    assert "Servers with such a card" in (stopping.fork.folder(NEW) / "0002-hook.patch").read_text()


def test_reading_what_was_resolved_locks_nothing(stopping):
    """A --continue that is killed leaves no lock in the work tree, which the next one would meet."""
    stopping.begin(code=30)
    resolve(stopping)
    git = Git(stopping.tree)
    index, other = stopping.tree / ".git" / "index", stopping.tree / PATH
    os.utime(other, (1, 1))  # what git would note in the index
    before = index.read_bytes()
    assert git.changes() == [f"M  {OTHER}"]
    assert index.read_bytes() == before
    lock = stopping.tree / ".git" / "index.lock"
    lock.touch()  # who would lock it now, fails
    with pytest.raises(GitError, match="write-tree"):
        git.run("write-tree")
    tree = rebase_tree.staged_tree(git)
    assert git.blob(f"{tree}:{OTHER}") == edit(edit(ENGINE, TAKEN), RESOLVED).encode()
    lock.unlink()
    # and the lock of the ref that it writes is of one that was killed
    (stopping.tree / ".git/refs/resolved").mkdir(parents=True)
    (stopping.tree / ".git/refs/resolved/0002.lock").touch()
    stopping.rebase("--continue")


def test_what_is_advised_is_for_the_project_that_was_named(folder):
    """Without its name, the same command ends another project's rebase, or finds none."""
    root = Path(tempfile.mkdtemp(dir=folder)) / "another folder's"
    case = Moving(root, {OTHER: ENGINE}, {OTHER: edit(ENGINE, TAKEN)},
                  [("hook", {OTHER: edit(ENGINE, HOOK)})])  # fmt: skip

    def run(command):
        """As printed, from a folder that is none of a project."""
        python = Path(sys.executable).parent
        return subprocess.run(
            ["bash", "-c", command], cwd=root, capture_output=True, text=True, check=False,
            env=os.environ | {"VLLM_GLM5_CACHE": str(case.fork.cache.root), "PYTHONPATH": str(ROOT),
                              "PATH": f"{python}:{os.environ['PATH']}"},
        )  # fmt: skip

    for told in (
        case.begin(code=30).stderr,
        case.rebase("--status").stdout,
        json.loads(case.rebase("--continue", "--json", code=31).stdout)["next"],
    ):
        command = re.search(r"python -m builder .*? rebase --continue", told)[0]
        assert "1 file is not resolved" in run(command).stderr
    resolve(case)
    done = case.rebase("--continue").stdout
    left = [line.strip() for line in done.splitlines() if " series --tag " in line]
    assert run(left[0]).returncode == 0
    assert "--project" not in case.report  # which is for others, who have it elsewhere
    shutil.rmtree(root)


def test_the_default_project_is_not_named(monkeypatch):
    monkeypatch.setattr(State, "project", default_project())
    assert State.advice("next: python -m builder clean") == "next: python -m builder clean"


def test_a_rebase_under_way_is_not_overwritten(stopping):
    stopping.begin(code=30)
    resolve(stopping)
    said = stopping.begin(code=31).stderr
    assert "under way" in said
    assert "--abort" in said
    assert stopping.user.git("status", "--porcelain").decode() == f"M  {OTHER}\n"
    stopping.rebase("--continue")
    assert "has a series already" in stopping.begin(code=31).stderr


def test_abort_while_another_process_finishes_it(stopping):
    """It waits, and then says what is so: the new series is in its place."""
    stopping.begin(code=30)
    resolve(stopping)
    with atomic.exclusive(stopping.tree.parent, "the test"):
        both = [
            subprocess.Popen(
                [sys.executable, "-m", "builder", "--project", stopping.fork.project.root, *words],
                env=os.environ | {"VLLM_GLM5_CACHE": str(stopping.fork.cache.root)},
                stderr=subprocess.PIPE, text=True, cwd=ROOT,
            )
            for words in (("rebase", "--continue"), ("rebase", "--abort"))
        ]  # fmt: skip
        said = [process.stderr.readline() for process in both]
        assert all("another process is at work" in line for line in said), said
    (_, went), (_, aborted) = [process.communicate() for process in both]
    codes = [process.returncode for process in both]
    assert "Traceback" not in went + aborted
    if codes == [0, 31]:
        assert "another process ended it" in aborted
        assert len(stopping.fork.series(NEW).entries) == 3
    else:
        assert codes == [31, 0]
        assert stopping.fork.series(NEW).entries == ()


def test_abort_leaves_nothing(stopping):
    before = stopping.patches()
    stopping.begin(code=30)
    stopping.rebase("--abort")
    assert stopping.patches() == before
    assert "no rebase is under way" in stopping.rebase("--status").stdout
    stopping.rebase("--continue", code=31)
    stopping.rebase("--abort", code=31)
    stopping.begin(code=30)  # and it can begin anew


def test_a_series_that_changed_meanwhile(stopping):
    stopping.begin(code=30)
    resolve(stopping)
    file = stopping.fork.folder(OLD) / "0003-stop.patch"
    good = file.read_bytes()
    file.write_bytes(good.replace(b"Servers", b"Machines"))
    assert "0003-stop.patch" in stopping.rebase("--continue", code=31).stderr
    file.write_bytes(good)
    stopping.rebase("--continue")


def test_a_release_that_was_pinned_anew_meanwhile(stopping):
    """The commits so far stand on the release that it was before."""
    stopping.begin(code=30)
    resolve(stopping)
    before = stopping.patches()
    pin = stopping.fork.project.pins / f"{NEW}.toml"
    good = pin.read_bytes()
    stopping.fork.release(stopping.new | {"vllm/more.py": "a = 1\n"}, NEW)
    assert "pinned anew" in stopping.rebase("--continue", code=31).stderr
    assert stopping.patches() == before
    assert stopping.user.git("status", "--porcelain").decode() == f"M  {OTHER}\n"
    pin.write_bytes(good)
    stopping.rebase("--continue")
    assert len(stopping.fork.series(NEW).entries) == 3


def test_a_work_tree_that_is_gone_is_made_again(stopping):
    stopping.begin(code=30)
    shutil.rmtree(stopping.tree)
    said = stopping.rebase("--status").stdout
    assert "is gone" in said
    assert "--continue" in said
    assert "0002-hook.patch" in stopping.rebase("--continue", code=30).stderr
    resolve(stopping)
    stopping.rebase("--continue")
    assert len(stopping.fork.series(NEW).entries) == 3


def test_the_cache_and_the_work_tree_gone_together(moving):
    """Each alone is made again from the other; both had what the person resolved."""
    taken = {path: edit(ENGINE, TAKEN) for path in (PATH, OTHER)}
    case = moving(
        {PATH: ENGINE, OTHER: ENGINE}, taken,
        ("first", {OTHER: edit(ENGINE, HOOK)}), ("second", {PATH: edit(ENGINE, HOOK)}),
    )  # fmt: skip
    case.begin(code=30)
    resolve(case)
    case.rebase("--continue", code=30)
    kept = case.tree.with_name("kept")
    case.tree.rename(kept)
    for name in ("vllm.git", "series"):
        shutil.rmtree(case.fork.cache.root / name)
    said = case.rebase("--continue", code=31).stderr
    assert "what was resolved is lost" in said
    assert "0001-first.patch" in said
    assert f"rebase --abort --onto {NEW}" in said
    kept.rename(case.tree)  # the control: with the tree it goes on
    assert "0002-second.patch" in case.rebase("--continue", code=30).stderr


def test_what_git_does_not_list_is_not_thrown_away(moving):
    """Notes, a build, an environment: upstream's own .gitignore hides them from git status."""
    files = {PATH: ENGINE, OTHER: ENGINE, ".gitignore": "*.log\n"}
    taken = {path: edit(ENGINE, TAKEN) for path in (PATH, OTHER)}
    case = moving(
        files, files | taken, *((path[5:-3], {path: edit(ENGINE, HOOK)}) for path in taken)
    )
    case.begin(code=30)
    case.user.write({PATH: edit(edit(ENGINE, TAKEN), RESOLVED), "notes.log": "mine\n"})
    case.user.git("add", PATH)
    case.rebase("--continue", code=30)
    assert (case.tree / "notes.log").read_text() == "mine\n"


def test_a_file_that_this_python_cannot_compile_can_be_resolved(moving):
    """Upstream may write for a newer Python than the one that runs the tool."""
    newer = "of the future!\n"
    case = moving({OTHER: ENGINE + newer}, {OTHER: edit(ENGINE, TAKEN) + newer},
                  ("hook", {OTHER: edit(ENGINE, HOOK) + newer}))  # fmt: skip
    case.begin(code=30)
    resolved = edit(edit(ENGINE, TAKEN), RESOLVED) + newer
    case.user.write({OTHER: resolved})
    case.user.git("add", OTHER)
    case.rebase("--continue")
    assert case.result(OTHER) == resolved


def test_a_damaged_state_is_said_and_can_be_aborted(stopping):
    before = stopping.patches()
    stopping.begin(code=30)
    state = stopping.tree.parent / "state.json"
    state.write_text(state.read_text()[:100])
    assert "--abort" in stopping.rebase("--continue", code=31).stderr
    stopping.rebase("--abort")
    assert stopping.patches() == before


def test_behind_a_stop_a_probe_is_still_about_upstream(moving):
    """What a person resolved holds the text that a later patch's probe looks for."""
    hooked = edit(ENGINE, HOOK)
    probe = f'path {OTHER} contains "engine.hook"'
    later = ("later", {PATH: LOAD}, probe)
    case = moving(
        {PATH: ENGINE, OTHER: ENGINE}, {PATH: ENGINE, OTHER: edit(ENGINE, TAKEN)},
        ("hook", {OTHER: hooked}), later,
    )  # fmt: skip
    case.begin(code=30)
    resolve(case)
    case.rebase("--continue")
    assert [e.line for e in case.fork.series(NEW).entries] == list(case.data)


def test_a_shared_patch_that_had_to_change_is_no_longer_shared(moving):
    """Other releases name the file in common/: it stays as it is."""
    taken = {"vllm/ours.py": "def ours():\n    return 0\n"}
    case = moving({PATH: ENGINE}, {PATH: ENGINE} | taken, ("common ours", COMMON))
    leans = f'[[contract]]\npatch = 1\npath = "{PATH}"\nname = "serve"\nwhy = "ours"\n'
    (case.fork.folder(OLD) / contracts.NAME).write_text(leans)
    case.begin(code=30)
    case.user.write(COMMON)
    case.user.git("add", "vllm/ours.py")
    case.rebase("--continue")
    shared = case.fork.project.patches / "common" / "0001-common-ours.patch"
    assert shared.read_bytes() == case.data["../common/0001-common-ours.patch"]
    assert [e.line for e in case.fork.series(NEW).entries] == ["0002-common-ours.patch"]
    assert [it.patch for it in contracts.read_contracts(case.fork.series(NEW))] == [2]
    assert case.result("vllm/ours.py") == COMMON["vllm/ours.py"]


def test_what_cannot_begin(stopping):
    before = stopping.patches()
    stopping.rebase("--from", OLD, "--onto", "v9.9.9", code=3)
    stopping.rebase("--from", "v9.9.9", "--onto", NEW, code=3)
    stopping.rebase("--from", OLD, "--onto", "../outside", code=3)
    assert list(stopping.fork.project.root.glob("outside*")) == []
    stopping.rebase("--from", OLD, "--onto", OLD, code=31)
    assert "0009" in stopping.begin("--drop", "9", code=31).stderr
    stopping.rebase(code=2)
    stopping.rebase("--from", OLD, code=2)
    assert stopping.patches() == before
    assert not (stopping.fork.project.root / ".rebase" / NEW).exists()


def test_settings_travel_and_an_empty_series_is_replaced(smooth):
    (smooth.fork.folder(OLD) / "settings.toml").write_text("alias = true\n")
    assert (smooth.fork.folder(NEW) / "series").read_bytes() == b""
    (smooth.fork.folder(NEW) / "notes").mkdir()
    (smooth.fork.folder(NEW) / "notes" / "plan.txt").write_text("mine\n")
    smooth.begin()
    assert smooth.fork.series(NEW).requires_alias
    assert len(smooth.fork.series(NEW).entries) == 4
    assert (smooth.fork.folder(NEW) / "notes" / "plan.txt").read_text() == "mine\n"
