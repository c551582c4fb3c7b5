"""Nothing of the user's is lost: what edit and export refuse to touch."""

from __future__ import annotations

import shutil

import pytest

from builder import edit as edit_module
from builder.errors import DirtyWorktreeError, SeriesError
from tests.series.fork import TAG, Developer, message, three

NEW = {"vllm/new.py": "x = 1\n"}


def dirty_change(user):
    user.write({"vllm/core.py": "x = 1\n"})
    return "1 uncommitted", " M vllm/core.py"


def staged_change(user):
    user.write({"vllm/core.py": "x = 1\n"})
    user.git("add", "vllm/core.py")
    return "1 uncommitted", "M  vllm/core.py"


def untracked_file(user):
    user.write({"notes/mine.md": "x\n"})
    return "1 uncommitted", "?? notes/mine.md"


def rebase_stopped(user):
    user.attempt("rebase", "--interactive", "HEAD^", GIT_SEQUENCE_EDITOR="sed -i s/^pick/edit/")
    return "rebase-merge under way", ""


def rebase_conflict(user):
    user.git("checkout", "--quiet", "-b", "other", TAG)
    user.commit({"vllm/table.json": "{}\n"}, "other\n")
    assert user.attempt("rebase", "--onto", "other", TAG, f"glm5/{TAG}").returncode
    return "rebase-merge under way", ""


def am_under_way(user):
    data = user.git("format-patch", "--stdout", "-1", "HEAD")
    assert user.attempt("am", stdin=data).returncode
    return "rebase-apply under way", ""


def merge_under_way(user):
    user.git("checkout", "--quiet", "-b", "other", TAG)
    user.commit({"vllm/zz.py": "x = 1\n"}, "other\n")
    user.git("checkout", "--quiet", f"glm5/{TAG}")
    user.git("merge", "--no-commit", "--no-ff", "other")
    return "MERGE_HEAD under way", ""


def bisect_under_way(user):
    user.git("bisect", "start", "HEAD", TAG)
    return "BISECT_LOG under way", ""


STATES = [dirty_change, staged_change, untracked_file, rebase_stopped, rebase_conflict, am_under_way,
          merge_under_way, bisect_under_way]  # fmt: skip


def snapshot(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "index"
    }


@pytest.mark.parametrize("state", STATES)
def test_edit_and_export_refuse_unfinished_work(work, state):
    what, detail = state(work.user)
    files, patches = snapshot(work.folder), work.fork.files()
    applied = work.fork.apply()
    for act in (work.export, lambda: edit_module.edit(applied, work.folder)):
        with pytest.raises(DirtyWorktreeError) as caught:
            act()
        assert what in caught.value.what
        assert detail in "\n".join(caught.value.details)
        assert caught.value.next_step
    assert snapshot(work.folder) == files
    assert work.fork.files() == patches


def test_an_unfinished_rebase_in_a_linked_work_tree_is_seen(work):
    linked = work.fork.root / "linked"
    work.user.git("worktree", "add", "--quiet", "-b", "other", str(linked))
    rebase_stopped(Developer(linked))
    with pytest.raises(DirtyWorktreeError, match="rebase-merge under way"):
        edit_module.require_clean(linked)
    edit_module.require_clean(work.folder)


def test_a_merge_commit_is_refused(work):
    merge_under_way(work.user)
    work.user.git("commit", "--quiet", "-m", "merge")
    with pytest.raises(SeriesError, match="merge commit") as caught:
        work.export()
    assert "straight line" in caught.value.next_step


def test_a_branch_that_does_not_begin_at_the_tag_is_refused(work):
    work.user.git("checkout", "--quiet", "--orphan", "other")
    work.user.commit({}, "other\n")
    with pytest.raises(SeriesError, match=f"does not begin at {TAG}"):
        work.export()


def make_other_content(folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")


def make_other_repository(folder):
    Developer.new(folder)


def make_file(folder):
    folder.write_text("x")


def make_broken_repository(folder):
    (folder / ".git").mkdir(parents=True)
    (folder / "x").write_text("x")


@pytest.mark.parametrize(
    "make", [make_other_content, make_other_repository, make_file, make_broken_repository]
)
@pytest.mark.parametrize("inside_repository", [False, True])
def test_edit_refuses_a_folder_with_other_content(fork, developer, make, inside_repository):
    """Also where the folder lies inside another repository, which git would speak for."""
    parent = developer.folder if inside_repository else fork.root
    folder = parent / "mine"
    make(folder)
    before = snapshot(parent / "mine") if folder.is_dir() else folder.read_text()
    with pytest.raises(DirtyWorktreeError):
        edit_module.edit(fork.apply(), folder)
    assert (snapshot(folder) if folder.is_dir() else folder.read_text()) == before


def test_edit_refuses_commits_that_are_not_in_the_series(work):
    mine = work.user.commit(NEW, message("[Core] Mine"))
    with pytest.raises(DirtyWorktreeError, match="other commits") as caught:
        edit_module.edit(work.fork.apply(), work.folder)
    assert "export" in caught.value.next_step
    assert work.user.head == mine


def test_edit_takes_an_empty_folder_and_leaves_a_finished_one(fork, developer):
    fork.put(three(developer))
    applied = fork.apply()
    folder = fork.root / "w"
    folder.mkdir()
    assert edit_module.edit(applied, folder) == folder
    (folder / ".git" / "mark").touch()
    edit_module.edit(applied, folder)
    assert (folder / ".git" / "mark").exists()
    assert [p.name for p in fork.root.iterdir() if p.name.startswith(".vllm-glm5-tmp-")] == []


def test_the_work_tree_outlives_the_cache(work):
    shutil.rmtree(work.fork.cache.root)
    work.user.git("fsck", "--strict")
    one, two, three_ = work.commits()
    work.rebuild(one, two, three_)
    assert work.user.git("log", "-1", "--format=%an <%ae>").decode().strip() == (
        "vllm-glm5 maintainers <maintainers@vllm-glm5.invalid>"
    )
    assert work.user.git("symbolic-ref", "HEAD").decode().strip() == f"refs/heads/glm5/{TAG}"
