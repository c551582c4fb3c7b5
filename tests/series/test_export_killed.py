"""An export that is killed at any write, and one from a work tree of something else."""

from __future__ import annotations

import shutil

import pytest

from builder.export import write_export
from tests.series.fork import FILES, TAG, Developer, Work, message
from tests.series.sudden_death import killed_at


def killed_export(plan, number):
    return killed_at(number, plan.series.folder.parent, lambda: write_export(plan))


def contents(fork):
    """The series' folder without what a killed run may leave until the next export."""
    return {name: data for name, data in fork.files().items() if "/.vllm-glm5-tmp-" not in name}


def test_an_export_killed_at_any_write_is_all_or_nothing(work):
    """Renamed, dropped, shifted and new patches at once; then kill at each write."""
    fork = work.fork
    one, two, _ = work.commits()
    work.rebuild(
        lambda user: user.commit({"vllm/zero.py": "x = 0\n"}, message("[Core] Zero")),
        one, two_reworded(two),
        lambda user: user.commit({"vllm/four.py": "x = 4\n"}, message("[Core] Four")),
    )  # fmt: skip
    before, plan = contents(fork), work.plan()
    patches, copy = fork.project.patches, fork.root / "before"
    shutil.copytree(patches, copy)
    assert not killed_export(plan, 10_000)
    after = contents(fork)
    assert set(before) - set(after) == {
        f"{TAG}/0002-Core-Two.patch",
        f"{TAG}/0003-Core-Three.patch",
    }
    outcomes = set()
    for number in range(1, 100):
        shutil.rmtree(patches)
        shutil.copytree(copy, patches)
        if not killed_export(plan, number):
            break
        fork.apply()  # what any command does, and it works
        outcomes.add(contents(fork) == after)
        assert contents(fork) in (before, after), number
        # and the next export ends as if nothing had happened, temporary files gone
        write_export(work.plan())
        assert fork.files() == after
    assert outcomes == {False, True}
    assert number > 10


def two_reworded(commit):
    def act(user):
        user.git("cherry-pick", commit)
        user.git("commit", "--quiet", "--amend", "-F-", stdin=message("[Core] Zwei").encode())

    return act


def test_files_changed_since_the_kill_are_not_overwritten(work):
    fork = work.fork
    journal = fork.folder() / ".export"
    work.user.commit({"vllm/four.py": "x = 4\n"}, message("[Core] Four"))
    plan = work.plan()
    next(n for n in range(1, 100) if killed_export(plan, n) and journal.exists())
    series = fork.folder() / "series"
    series.write_text("# mine\n" + series.read_text())
    kept = series.read_bytes()
    refused = fork.run("series", "--tag", TAG, code=11).stderr
    assert "files that it was to write were changed since" in refused
    assert series.read_bytes() == kept
    journal.unlink()  # what the message says
    (fork.folder() / "0004-Core-Four.patch").unlink(missing_ok=True)
    fork.run("series", "--tag", TAG)
    assert series.read_bytes() == kept


# --- a work tree of something else -------------------------------------------------------------


def test_a_work_tree_of_another_tag(work):
    fork = work.fork
    fork.release(FILES | {"vllm/later.py": "x = 1\n"}, "v1.3.0")
    before = fork.files("v1.3.0")
    refused = fork.run("export", "--tag", "v1.3.0", "--worktree", work.folder, code=20).stderr
    assert "the work tree has no tag v1.3.0 (it has: v1.2.3)" in refused
    assert "edit --tag v1.3.0 --worktree OTHER" in refused
    # and one where the user has fetched or made such a tag
    work.user.git("tag", "v1.3.0", TAG)
    refused = fork.run("export", "--tag", "v1.3.0", "--worktree", work.folder, code=20).stderr
    assert "is not the release as it is pinned" in refused
    assert fork.files("v1.3.0") == before


@pytest.mark.parametrize("with_cache", [True, False])
def test_a_work_tree_of_an_outdated_import(work, with_cache):
    """The pin has changed since: another sdist under the same tag."""
    fork = work.fork
    fork.release(FILES | {"vllm/later.py": "x = 1\n"}, TAG)
    if with_cache:
        fork.source()
    before = fork.files()
    work.user.commit({"vllm/four.py": "x = 4\n"}, message("[Core] Four"))
    refused = fork.run("export", "--tag", TAG, code=20).stderr
    assert "is not the release as it is pinned" in refused
    assert f"edit --tag {TAG} --worktree OTHER" in refused
    assert fork.files() == before


def test_a_work_tree_of_another_import_of_the_same_sdist(work):
    """Two versions of the tool may import one sdist differently."""
    fork = work.fork
    user = Developer(fork.cache.repository)
    text = user.git("log", "-1", "--format=%B", TAG)
    other = user.git("commit-tree", f"{TAG}^{{tree}}", "-F-", stdin=text).decode().strip()
    user.git("update-ref", f"refs/tags/{TAG}", other)
    refused = fork.run("export", "--tag", TAG, code=20).stderr
    assert f"imported:  {other}" in refused


def test_an_export_needs_neither_cache_nor_network(work):
    fork = work.fork
    shutil.rmtree(fork.cache.root)
    work.user.commit({"vllm/four.py": "x = 4\n"}, message("[Core] Four"))
    assert "0004-Core-Four" in fork.run("export", "--tag", TAG, "--raise-revision").stdout
    assert Work(fork).lines()[-1] == "0004-Core-Four.patch"
