"""What the lint demands of a patch: each rule with a patch that fails it and one that passes."""

from __future__ import annotations

import re

import pytest

from builder import lint
from builder.errors import SeriesError
from tests.series.fork import AUTHOR, EMAIL, REASON, TRAILERS, message


def trailers(**changes):
    """The good trailers with some changed, or left out."""
    values = {
        "Upstream-Status": "Pending",
        "Drop-When": 'path vllm/core.py contains "ready"',
        "Signed-off-by": f"{AUTHOR} <{EMAIL}>",
    } | {key.replace("_", "-"): value for key, value in changes.items()}
    return "".join(f"{key}: {value}\n" for key, value in values.items() if value)


def faults(fork, developer, text, **environment):
    developer.reset()
    data = developer.patch({"vllm/new.py": "x = 1\n"}, text=text, **environment)
    fork.put({"0001-x.patch": data})
    return list(lint.lint_patch(fork.patches()[0]))


def test_a_good_patch_has_none(fork, developer):
    assert faults(fork, developer, message("[Core] Start")) == []


FAILS = {
    "long subject": ({"subject": "x" * 81}, "81 characters"),
    "no reason": ({"body": ""}, "gives 0 words of reason, 20 are the least"),
    "hardly a reason": (
        {"body": "It did not work before, and now it does work.\n"}, "gives 10 words of reason"),
    "no status": ({"trailers": trailers(Upstream_Status=None)}, "no Upstream-Status"),
    "unknown status": ({"trailers": trailers(Upstream_Status="Maybe")}, "'Maybe' is none of"),
    "status without its url": ({"trailers": trailers(Upstream_Status="Submitted")}, "'Submitted' is"),
    "status with an empty reason": (
        {"trailers": trailers(Upstream_Status="Inappropriate []")}, "is none of",
    ),
    "no removal plan": ({"trailers": trailers(Drop_When=None)}, "no removal plan"),
    "vague removal plan": ({"trailers": trailers(Drop_When="upstream has it")}, "is no probe"),
    "never without a reason": ({"trailers": trailers(Drop_When="never")}, "is no probe"),
    "unquoted text": ({"trailers": trailers(Drop_When="path a contains b")}, "is no probe"),
    "no signature": ({"trailers": trailers(Signed_off_by=None)}, "no trailer Signed-off-by"),
    "another signature": (
        {"trailers": trailers(Signed_off_by="A <a@example.invalid>")}, "no trailer Signed-off-by",
    ),
    "trailers that are none": (
        {"trailers": TRAILERS + "\nThe end.\n"}, "no Upstream-Status",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILS)
def test_a_patch_that_fails_a_rule(fork, developer, case):
    changes, said = FAILS[case]
    values = {"subject": "[Core] Start", "body": REASON, "trailers": TRAILERS} | changes
    found = faults(fork, developer, message(values.pop("subject"), **values))
    assert any(said in fault for fault in found), found
    if case != "trailers that are none":
        assert len(found) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"subject": "x" * 80},
        {"trailers": trailers(Upstream_Status="Submitted [https://example.invalid/pull/1]")},
        {"trailers": trailers(Upstream_Status="Backport [v0.21.0]")},
        {"trailers": trailers(Upstream_Status="Inappropriate [the name is ours]")},
        {"trailers": trailers(Drop_When='path vllm/a.py lacks "old"')},
        {"trailers": trailers(Drop_When="path vllm/a.py exists")},
        {"trailers": trailers(Drop_When="path vllm/a.py missing")},
        {"trailers": trailers(Drop_When="never [the name is ours]")},
        {"trailers": trailers(Drop_When='path vllm/a.py contains "say \\"a: b\\""')},
    ],
)
def test_a_patch_that_passes_it(fork, developer, changes):
    values = {"subject": "[Core] Start", "body": REASON, "trailers": TRAILERS} | changes
    assert faults(fork, developer, message(values.pop("subject"), **values)) == []


def test_the_author_is_the_maintainers(fork, developer):
    (found,) = faults(fork, developer, message("[Core] Start"), GIT_AUTHOR_NAME="Jane")
    assert "the author is Jane" in found


def test_leftovers_of_a_conflict(fork, developer):
    """`git add -A` after `git apply --reject` takes them into the commit, and the wheel ships them."""
    changes = {"vllm/core.py.rej": "@@ -1 +1 @@\n", "vllm/a.py": "x = 1\n", "vllm/b.py.orig": "x\n"}
    fork.put({"0001-x.patch": developer.patch(changes, "[Core] Start")})
    found = list(lint.lint_patch(fork.patches()[0]))
    assert [fault.partition(":")[0] for fault in found] == ["vllm/b.py.orig", "vllm/core.py.rej"]


def test_short_blob_ids(fork, developer):
    data = developer.patch({"vllm/new.py": "x = 1\n"})
    short = re.sub(
        rb"index ([0-9a-f]{9})[0-9a-f]*\.\.([0-9a-f]{9})[0-9a-f]*", rb"index \1..\2", data
    )
    assert short != data
    fork.put({"0001-x.patch": short})
    found = list(lint.lint_patch(fork.patches()[0]))
    assert any("short blob ids" in fault for fault in found), found


def test_a_shared_patch_only_adds_files(fork, developer):
    fork.put({
        "0001-a.patch": developer.patch({"vllm/new.py": "x = 1\n"}),
        "0002-b.patch": developer.patch({"vllm/other.py": "x = 1\n", "vllm/notes.txt": "one\n"}),
        "0003-c.patch": developer.patch({"vllm/table.json": None}),
    })  # fmt: skip
    found = [list(lint.lint_common(patch)) for patch in fork.patches()]
    assert found[0] == []
    assert [fault.partition(":")[0] for fault in found[1]] == ["vllm/notes.txt"]
    assert [fault.partition(":")[0] for fault in found[2]] == ["vllm/table.json"]


@pytest.mark.parametrize(
    ("text", "compiles"),
    [
        ("x = 1\n", True),
        ("pattern = '\\d'\n", True),  # a warning at most
        ("async def f():\n    return [x async for x in y]\n", True),
        ("x = = 1\n", False),
        ("return 1\n", False),
        ("def f():\n  x = 1\n    y = 2\n", False),
        ("<<<<<<< HEAD\n", False),
        ("# coding: no-such\n", False),
    ],
)
def test_the_tree_compiles_after_each_patch(fork, developer, text, compiles):
    """A bisection has to work: the second patch mends the file, the first is at fault."""
    fork.put({
        "0001-breaks.patch": developer.patch({"vllm/new.py": text}, "Break"),
        "0002-mends.patch": developer.patch({"vllm/new.py": "x = 2\n"}, "Mend"),
    })  # fmt: skip
    found = list(lint.lint_trees(fork.apply(), fork.patches()))
    assert len(found) == (0 if compiles else 1)
    assert all(
        fault.startswith("0001-breaks.patch: vllm/new.py does not compile") for fault in found
    )


def test_other_files_and_deleted_ones_need_not_compile(fork, developer):
    fork.put({
        "0001-a.patch": developer.patch({"vllm/core.py": None, "vllm/t.jinja": "{% x"}),
    })  # fmt: skip
    assert list(lint.lint_trees(fork.apply(), fork.patches())) == []


def test_all_faults_are_one_error():
    lint.check([], "x")
    with pytest.raises(SeriesError, match="2 faults") as caught:
        lint.check(["a", "b"], "x")
    assert caught.value.details == ("a", "b")


def test_the_command_lints(fork, developer):
    data = developer.patch({"vllm/new.py": "x = 1\n"}, "[Core] Start")
    fork.put({"0001-x.patch": data})
    said = fork.run("series", "--tag", "v1.2.3").stdout
    assert "[Core] Start" in said
    assert "+1 -0 in 1 file: vllm/new.py" in said
    fork.put({"0001-x.patch": data.replace(b"Upstream-Status: Pending\n", b"")})
    failed = fork.run("series", "--tag", "v1.2.3", code=11)
    assert "0001-x.patch: no Upstream-Status" in failed.stderr
    fork.put({"0001-x.patch": data})
    common = fork.project.patches / "common" / "0002-y.patch"
    common.write_bytes(data)
    assert (
        "common/0002-y.patch is in no series"
        in fork.run("series", "--tag", "v1.2.3", code=11).stderr
    )
