"""How a patch fares on another release: what upstream may do to the code, case by case.

Where git by itself would report success and be wrong, that is run beside, so that the case proves
something.
"""

from __future__ import annotations

import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder import placement, scope
from builder.objects import open_objects
from builder.repository import GitError
from builder.try_series import State
from tests.rebase.moving import ENGINE, edit

PATH = "vllm/engine.py"
HOOK = ("    engine.open(name)\n", "    engine.open(name)\n    engine.hook(name)\n")
HOOKED = edit(ENGINE, HOOK)
PATCH = ("hook", {PATH: HOOKED})


def applied(trial, path=PATH):
    return trial.changes[path].decode()


def test_nothing_changed(moving):
    case = moving({PATH: ENGINE}, {PATH: ENGINE, "vllm/other.py": "x = 1\n"}, PATCH)
    trial = case.trial()
    assert (trial.state, applied(trial)) == (State.CLEAN, HOOKED)


def test_code_that_moved(moving):
    above = ("import os\n", "import os\nimport sys\n")
    case = moving({PATH: ENGINE}, {PATH: edit(ENGINE, above)}, PATCH)
    trial = case.trial()
    assert trial.state is State.MOVED
    assert [(h.offset, h.scope) for h in trial.files[0].hunks] == [(1, "serve")]
    assert applied(trial) == edit(ENGINE, above, HOOK)


def test_a_function_that_upstream_changed_is_not_called_clean(moving):
    """The hunk's lines stand at their place; what they rely on does not."""
    below = ("    engine.close()\n    return name\n", "    return None\n")
    trial = moving({PATH: ENGINE}, {PATH: edit(ENGINE, below)}, PATCH).trial()
    assert trial.state is State.MOVED
    assert "serve" in trial.files[0].hunks[0].around


def test_context_that_upstream_rewrote_is_merged_and_shown(moving):
    itself = ("    engine.open(name)\n", "    engine.open_all(name)\n")
    trial = moving({PATH: ENGINE}, {PATH: edit(ENGINE, itself)}, PATCH).trial()
    assert trial.state is State.CONFLICT
    assert "engine.open_all(" in trial.files[0].conflicts[0]
    near = ('    name = os.environ.get("NAME")\n', '    name = os.environ["NAME"]\n')
    trial = moving({PATH: ENGINE}, {PATH: edit(ENGINE, near)}, PATCH).trial()
    assert (trial.state, applied(trial)) == (State.MERGED, edit(ENGINE, near, HOOK))
    (hunk,) = trial.files[0].hunks
    assert (hunk.scope, hunk.line) == ("serve", 17)
    assert "serve" in hunk.around


def test_a_renamed_file(moving):
    moved = edit(ENGINE, ("    size = 1\n", "    size = 3\n"))
    trial = moving({PATH: ENGINE}, {"vllm/core/engine.py": moved}, PATCH).trial()
    assert trial.state is State.MERGED
    assert "renamed vllm/engine.py to vllm/core/engine.py" in trial.reason
    assert applied(trial, "vllm/core/engine.py") == edit(moved, HOOK)
    assert PATH not in trial.changes


def test_a_deleted_file(moving):
    trial = moving({PATH: ENGINE}, {"vllm/other.py": "x = 1\n"}, PATCH).trial()
    assert trial.state is State.CONFLICT
    assert "upstream deleted the file" in trial.reason


NAME = '    name = os.environ.get("NAME")\n'
SECOND_HALF = """\
    return answer_all(engine, name)


def answer_all(engine, name):
"""
SPLIT = edit(ENGINE, (NAME, NAME + SECOND_HALF))


def test_a_function_split_in_two_with_the_hook_in_the_new_half(moving):
    case = moving({PATH: ENGINE}, {PATH: SPLIT}, ("hook", {PATH: edit(ENGINE, (
        "    engine.close()\n", "    engine.hook()\n    engine.close()\n"))}))  # fmt: skip
    status, read = case.git_am(threeway=False)
    assert status == 0
    assert b"engine.hook()" in read(PATH)  # git sees nothing
    trial = case.trial()
    assert trial.state is State.MISPLACED
    assert "serve" in trial.reason
    assert "answer_all" in trial.reason
    assert PATH not in trial.changes


def test_a_function_defined_again_below(moving):
    """Python takes the second one: the hook stands in its function, and nobody calls that."""
    again = ENGINE + "\n\ndef serve(engine):\n    return engine.other()\n"
    case = moving({PATH: ENGINE}, {PATH: again}, PATCH)
    status, _ = case.git_am(threeway=False)
    assert status == 0
    trial = case.trial()
    assert trial.state is State.MISPLACED
    assert "serve (1 of 2)" in trial.reason


def test_a_class_renamed_and_another_of_its_name(moving):
    patch = ("size", {PATH: edit(ENGINE, ("        self.size = 2\n", "        self.size = 3\n"))})
    new = ENGINE.replace("class Worker:", "class WorkerBase:")
    new += "\n\nclass Worker(WorkerBase):\n    def start(self):\n        return 3\n"
    trial = moving({PATH: ENGINE}, {PATH: new}, patch).trial()
    assert trial.state is State.MISPLACED
    assert "WorkerBase.start" in trial.reason


NESTED = """\
def outer(x):
    def inner(y):
        a = 1
        b = 2
        c = 3
        return y
    d = 4
    e = 5
    f = 6
    return inner
"""
KERNEL = """\
int add(int a, int b) {
  int x = 1;
  int y = 2;
  int z = 3;
  int w = 4;
  int v = 5;
  return a + b;
}
"""


@pytest.mark.parametrize(
    ("path", "old", "hook", "below", "function"),
    [
        (PATH, NESTED, "        b = 2\n", ("return inner", "return None"), "outer"),
        ("csrc/x.cu", KERNEL, "  int y = 2;\n", ("a + b;", "a - b;"), "int add"),
    ],
    ids=["the function around the function", "C++"],
)
def test_upstream_changed_what_the_hook_stands_in(moving, path, old, hook, below, function):
    """Its line is the same, and what is around it in the hunk."""
    trial = moving({path: old}, {path: edit(old, below)},
                   ("hook", {path: edit(old, (hook, f"{hook}{hook.replace('2', '7')}"))})).trial()  # fmt: skip
    assert trial.state is State.MOVED
    (at,) = trial.files[0].hunks
    assert at.offset == 0
    assert f"upstream changed {function}" in at.around
    same = moving({path: old}, {path: old + "\n"},
                  ("hook", {path: edit(old, (hook, f"{hook}{hook.replace('2', '7')}"))})).trial()  # fmt: skip
    assert same.state is State.CLEAN


def test_a_file_that_upstream_moved_and_left_another_in_its_place(moving):
    """The licence and the imports stand in both; git takes the one that has the name."""
    licence = "# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText: vLLM\n\nimport os\n"
    old = licence + ENGINE.partition("import os\n")[2]
    new = {PATH: f"{licence}\n\nfrom vllm.core.engine import *\n", "vllm/core/engine.py": old}
    changed = edit(old, ("Text: vLLM\n", "Text: vLLM\n# Changed by us.\n"))
    case = moving({PATH: old}, new, ("say so", {PATH: changed}))
    status, _ = case.git_am(threeway=False)
    assert status == 0
    trial = case.trial()
    assert trial.state is State.MISPLACED
    assert "wrote the file anew" in trial.reason
    kept = moving({PATH: old}, {PATH: edit(old, HOOK)}, ("say so", {PATH: changed}))
    assert kept.trial().state is State.CLEAN


def test_a_function_split_in_two_with_the_hook_in_the_old_half(moving):
    case = moving({PATH: ENGINE}, {PATH: SPLIT}, ("hook", {PATH: edit(ENGINE, (
        "def serve(engine):\n", "def serve(engine):\n    engine.hook()\n"))}))  # fmt: skip
    trial = case.trial()
    assert trial.state not in (State.CLEAN, State.UPSTREAMED)
    assert trial.state is not State.MOVED or trial.files[0].hunks[0].around


# Both functions check and answer in the same lines; upstream rewrote those in the second one.
TWINS = """\
def first(items):
    for item in items:
        item.check()
        item.ready = True
    return items


def unrelated():
    return 1


def second(items):
    for item in items:
        item.check()
        item.ready = True
    return items
"""


def test_git_edits_the_wrong_function_and_the_tool_does_not(moving):
    """The field's case: the block stands in another function only, and 3-way reports success."""
    block = "    for item in items:\n        item.check()\n        item.ready = True\n    return items\n"
    old = f"def second(items):\n{block}\n\ndef last():\n    return 2\n"
    new = (
        f"def first(items):\n{block}\n\ndef second(items):\n    return [i.checked() for i in items]\n"
        "\n\ndef last():\n    return 2\n"
    )
    fix = ("        item.check()\n", "        item.check()\n        item.fix()\n")
    case = moving({PATH: old}, {PATH: new}, ("fix", {PATH: edit(old, fix)}))
    git_is_wrong(case, first="item.fix()", second="def second")
    trial = case.trial()
    assert trial.state is State.MISPLACED
    assert trial.changes == {}


def git_is_wrong(case, *, first, second):
    """By itself git reports success, with the hook on the wrong side of something."""
    status, read = case.git_am(threeway=True)
    assert status == 0
    text = read(PATH).decode()
    assert text.index(first) < text.index(second)


STEPS = "".join(f"        engine.step_{n}()\n" for n in "0123456")
IN_STEPS = ("        engine.step_3()\n", "        engine.step_3()\n        engine.hook()\n")
either_way = pytest.mark.parametrize(
    "near", [("step_1", "step_1"), ("step_1", "step_one")], ids=["strictly", "by a merge"]
)


@either_way
def test_git_edits_the_wrong_branch_and_the_tool_does_not(moving, near):
    """Upstream moved the block into the other branch of the function, as it is or a bit changed."""
    old = f"def serve(engine):\n    if engine.fast:\n{STEPS}    else:\n        engine.slow()\n"
    new = f"def serve(engine):\n    if engine.fast:\n        engine.run()\n    else:\n{STEPS}"
    case = moving({PATH: old}, {PATH: edit(new, near)}, ("hook", {PATH: edit(old, IN_STEPS)}))
    git_is_wrong(case, first="else:", second="engine.hook()")
    trial = case.trial()
    assert trial.state is State.MISPLACED
    assert "belongs under `if engine.fast`" in trial.reason
    assert trial.changes == {}


@either_way
def test_a_branch_with_another_condition_is_shown(moving, near):
    old = f"def serve(engine):\n    if engine.fast:\n{STEPS}    return engine\n"
    new = edit(old, near, ("engine.fast:", "engine.fast and engine.new:"))
    trial = moving({PATH: old}, {PATH: new}, ("hook", {PATH: edit(old, IN_STEPS)})).trial()
    assert trial.state.applies
    assert applied(trial) == edit(new, IN_STEPS)
    (hunk,) = trial.files[0].hunks
    assert hunk.around.endswith(
        "it belongs under `if engine.fast`, and stands under `if engine.fast and engine.new`"
    )


@pytest.mark.parametrize("function", ["first", "second"])
def test_twins_of_which_upstream_rewrote_one(moving, function):
    head, tail = TWINS.split("def unrelated")
    fix = ("        item.check()\n", "        item.check()\n        item.fix()\n")
    edited = head + "def unrelated" + edit(tail, fix)
    rewritten = ("        item.check()\n", "        item.verify()\n        item.check_again()\n")
    new = edit(head, rewritten) + "def unrelated" + tail if function == "first" else (
        head + "def unrelated" + edit(tail, rewritten)
    )  # fmt: skip
    trial = moving({PATH: TWINS}, {PATH: new}, ("fix", {PATH: edited})).trial()
    if function == "second":
        assert not trial.state.applies
    else:
        assert trial.state.applies
        assert applied(trial).index("item.fix()") > applied(trial).index("def second")


def test_a_result_that_does_not_compile_is_a_conflict(moving):
    old = "async def run(self):\n" + "".join(f"    a{n} = {n}\n" for n in range(12))
    edited = edit(old, ("    a9 = 9\n", "    a9 = 9\n    await self.more()\n"))
    case = moving({PATH: old}, {PATH: old.replace("async def", "def")}, ("wait", {PATH: edited}))
    status, _ = case.git_am(threeway=False)
    assert status == 0
    trial = case.trial()
    assert trial.state is State.CONFLICT
    assert "does not compile" in trial.reason


def test_white_space_only(moving):
    """Indentation means something in Python: said so, and left to a person."""
    new = ENGINE.replace("    engine.open", "  \tengine.open").replace("    name =", "  \tname =")
    trial = moving({PATH: ENGINE}, {PATH: new}, PATCH).trial()
    assert trial.state is State.CONFLICT
    assert "only white space" in trial.reason


def test_line_ends(moving):
    new = ENGINE.replace("\n", "\r\n")
    trial = moving({PATH: ENGINE}, {PATH: new}, PATCH).trial()
    assert trial.state is State.MERGED
    assert "CRLF" in trial.reason
    assert trial.changes[PATH].decode() == HOOKED.replace("\n", "\r\n")
    back = moving({PATH: new}, {PATH: ENGINE}, ("hook", {PATH: HOOKED.replace("\n", "\r\n")}))
    assert applied(back.trial()) == HOOKED


def test_a_new_file_that_upstream_has_too(moving):
    patch = ("file", {"vllm/new.py": "a = 1\n"})
    trial = moving({PATH: ENGINE}, {PATH: ENGINE, "vllm/new.py": "a = 2\n"}, patch).trial()
    assert (trial.state, "another file" in trial.reason) == (State.CONFLICT, True)


def test_a_later_patch_says_which_earlier_one_it_needs(moving):
    second = edit(HOOKED, ("    engine.hook(name)\n", "    engine.hook(name, 2)\n"))
    near = ("    engine.open(name)\n", "    engine.start()\n")
    case = moving({PATH: ENGINE}, {PATH: edit(ENGINE, near)}, PATCH, ("more", {PATH: second}))
    first, later = case.trials()
    assert (first.state, later.state) == (State.CONFLICT, State.CONFLICT)
    assert (first.after, later.after) == ((), ("0001-hook.patch",))


def test_sections_of_other_files(moving):
    """A row of a table belongs under its heading, though the same rows stand under another."""
    rows = "| a | 1 |\n| b | 2 |\n| c | 3 |\n"
    old = f"# One\n\nText.\n\n# Two\n\n{rows}\nEnd.\n"
    new = f"# One\n\n{rows}\nText.\n\n# Two\n\nNo table any more.\n\nEnd.\n"
    patch = ("row", {"docs/x.md": edit(old, ("| b | 2 |\n", "| b | 2 |\n| b2 | 2 |\n"))})
    trial = moving({"docs/x.md": old}, {"docs/x.md": new}, patch).trial()
    assert not trial.state.applies


@pytest.mark.parametrize("how", ["it is killed", "an object is damaged"])
def test_a_git_that_ends_is_no_file_that_is_gone(moving, how):
    """Taken for an answer, a new file would be clean and every other one deleted by upstream."""
    case = moving({PATH: ENGINE}, {PATH: ENGINE, "vllm/more.py": "a = 1\n" * 200}, PATCH)
    source = case.fork.source("v1.3.0")
    name = f"{source.commit}:vllm/more.py"
    with open_objects(source.repository, case.fork.cache) as objects:
        assert objects.read(name)
        assert objects.read(f"{source.commit}:vllm/gone.py") is None
    if how != "it is killed":
        for pack in source.repository.folder.glob("objects/pack/*.pack"):
            data = pack.read_bytes()
            pack.chmod(0o644)
            pack.write_bytes(data[:40] + b"\0" * (len(data) - 60) + data[-20:])
    with open_objects(source.repository, case.fork.cache) as objects:
        if how == "it is killed":
            objects._process.kill()
            objects._process.wait()
        with pytest.raises(GitError, match="git cat-file ended"):
            objects.read(name)


MARK = "        marker()\n"
NAMES = ("alpha", "beta", "gamma", "delta")


def _function(name, lines):
    return f"def {name}(x):\n    if x:\n" + "".join(f"        {line}\n" for line in lines)


@settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_whatever_upstream_does_the_hook_stays_in_its_function(moving, data):
    """Functions that look alike, any of them rewritten, moved or gone: never the wrong one."""
    body = st.lists(st.sampled_from(["a()", "b()", "c()"]), min_size=3, max_size=6)
    old = {name: data.draw(body) for name in NAMES}
    target = data.draw(st.sampled_from(NAMES))
    text = "\n\n".join(_function(name, old[name]) for name in NAMES)
    at = data.draw(st.integers(1, len(old[target])))
    hooked = old | {target: [*old[target][:at], "marker()", *old[target][at:]]}
    edited = "\n\n".join(_function(name, hooked[name]) for name in NAMES)
    new = {name: data.draw(st.one_of(st.just(old[name]), body)) for name in NAMES}
    order = data.draw(st.permutations(NAMES))
    kept = data.draw(st.integers(2, 4))
    now = "\n\n".join(_function(name, new[name]) for name in order[:kept])
    trial = moving({PATH: text}, {PATH: now}, ("mark", {PATH: edited})).trial()
    if not trial.state.applies:
        return
    result = applied(trial)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile(result, PATH, "exec")
    lines = placement.split_lines(result.encode())
    assert [scope.scope_at(PATH, lines, n) for n, line in enumerate(lines) if line == MARK] == [
        target
    ]
    if trial.state is State.CLEAN:
        assert new[target] == old[target]
