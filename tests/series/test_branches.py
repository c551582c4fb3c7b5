"""A hunk in another branch of its own function: git takes it there, and the tool does not."""

from __future__ import annotations

import ast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import branches
from tests.series.test_same_place import B4, is_refused, lines, with_new_line

B8, B12 = lines("        "), lines("            ")
PASS = "        pass\n"
# Where the hunk's lines stood, where they stand on the new release, and the two branches' names.
CASES = {
    "if and else": (
        f"    if cuda:\n{B8}    else:\n{PASS}",
        f"    if cuda:\n{PASS}    else:\n{B8}",
        ("if cuda", "else of if cuda"),
    ),
    "if and elif": (
        f"    if cuda:\n{B8}    elif rocm:\n{PASS}",
        f"    if cuda:\n{PASS}    elif rocm:\n{B8}",
        ("if cuda", "if rocm"),
    ),
    "the last of several": (
        f"    if cuda:\n{PASS}    elif rocm:\n{PASS}    else:\n{B8}",
        f"    if cuda:\n{PASS}    elif rocm:\n{B8}    else:\n{PASS}",
        ("else of if cuda", "if rocm"),
    ),
    "an if below else": (
        f"    if cuda:\n{PASS}    else:\n        if rocm:\n{B12}        x = 1\n",
        f"    if cuda:\n        if rocm:\n{B12}    else:\n        if rocm:\n            pass\n",
        ("else of if cuda, if rocm", "if cuda, if rocm"),
    ),
    "two conditions": (
        f"    if cuda:\n{PASS}    if rocm:\n{B8}",
        f"    if cuda:\n{B8}    if rocm:\n{PASS}",
        ("if rocm", "if cuda"),
    ),
    "a comment above": (
        f"    if cuda:\n        # fast\n{B8}    else:\n{PASS}",
        f"    if cuda:\n{PASS}    else:\n        # slow\n{B8}",
        ("if cuda", "else of if cuda"),
    ),
    "while and its else": (
        f"    while x:\n{B8}    else:\n{PASS}",
        f"    while x:\n{PASS}    else:\n{B8}",
        ("while x", "else of while x"),
    ),
    "two loops": (
        f"    for a, b in x:\n{B8}    for c in y:\n{PASS}",
        f"    for a, b in x:\n{PASS}    for c in y:\n{B8}",
        ("for (a, b) in x", "for c in y"),
    ),
    "a loop's else": (
        f"    for a in x:\n{PASS}    else:\n{B8}",
        f"    for a in x:\n{B8}    else:\n{PASS}",
        ("else of for a in x", "for a in x"),
    ),
    "two contexts": (
        f"    with lock(), file as f:\n{PASS}    with lock():\n{B8}",
        f"    with lock(), file as f:\n{B8}    with lock():\n{PASS}",
        ("with (lock(),)", "with (lock(), file)"),
    ),
    "try and finally": (
        f"    try:\n{B8}    finally:\n{PASS}",
        f"    try:\n{PASS}    finally:\n{B8}",
        ("try", "finally"),
    ),
    "two exceptions": (
        f"    try:\n{PASS}    except OSError:\n{B8}    except ValueError as e:\n{PASS}",
        f"    try:\n{PASS}    except OSError:\n{PASS}    except ValueError as e:\n{B8}",
        ("except OSError", "except ValueError"),
    ),
    "a bare except": (
        f"    try:\n{PASS}    except:\n{B8}    else:\n{PASS}",
        f"    try:\n{PASS}    except:\n{PASS}    else:\n{B8}",
        ("except", "else of try"),
    ),
    "two cases": (
        f"    match x:\n      case A():\n{B8}      case [b] if b:\n{PASS}",
        f"    match x:\n      case A():\n{PASS}      case [b] if b:\n{B8}",
        ("case A()", "case [b] if b"),
    ),
    "one pattern with and without a guard": (
        f"    match x:\n      case A() if y:\n{B8}      case A():\n{PASS}",
        f"    match x:\n      case A() if y:\n{PASS}      case A():\n{B8}",
        ("case A() if y", "case A()"),
    ),
    "one of two that are headed so": (
        f"    try:\n{B8}    except A:\n{PASS}    try:\n{PASS}    except B:\n{PASS}",
        f"    try:\n{PASS}    except A:\n{PASS}    try:\n{B8}    except B:\n{PASS}",
        ("try (1 of 2)", "try (2 of 2)"),
    ),
    "with what is around it": (
        f"    if x:\n        for a in y:\n{B12}    else:\n{PASS}",
        f"    if x:\n{PASS}    else:\n        for a in y:\n{B12}",
        ("if x, for a in y", "else of if x, for a in y"),
    ),
    "below a condition that is another now": (
        f"    if x:\n        if cuda:\n{B12}        else:\n            pass\n",
        f"    if x and y:\n        if cuda:\n            pass\n        else:\n{B12}",
        ("if x, if cuda", "if x and y, else of if cuda"),
    ),
    "within another": (
        f"    if x:\n        if cuda:\n{B12}        else:\n            pass\n    else:\n{PASS}",
        f"    if x:\n        if cuda:\n            pass\n        else:\n{B12}    else:\n{PASS}",
        ("if cuda", "else of if cuda"),
    ),
}


def strayed(path, old, line, new, new_line):
    return branches.Compared(path, old, new).strayed(line, new_line)


def function(body, *, method=False):
    if method:
        text = "".join(f"    {line}" for line in f"def f(x):\n{body}".splitlines(keepends=True))
        return f"import sys\nclass C:\n    '''One.'''\n{text}"
    return f"import sys\n@decorated\ndef f(x):\n{body}    return x\n"


@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
@pytest.mark.parametrize("case", CASES)
def test_a_hunk_does_not_move_into_another_branch(rebase, case, method):
    old, new, (meant, found) = CASES[case]
    old, new = function(old, method=method), function(new, method=method)
    said = f"it belongs under `{meant}`, and stands under `{found}`"
    is_refused(rebase, "vllm/m.py", old, new, above="import os\n", said=said)


def test_at_the_module_level(rebase):
    old, new = f"if cuda:\n{B4}else:\n    pass\n", f"if cuda:\n    pass\nelse:\n{B4}"
    said = "it belongs under `if cuda`, and stands under `else of if cuda`"
    is_refused(rebase, "vllm/m.py", old, new, above="import os\n", said=said)


def test_the_place_is_told_though_upstream_added_a_branch_above(rebase):
    old = function(f"    if cuda:\n{B8}    else:\n{PASS}")
    new = function(f"    if xpu:\n{PASS}    if cuda:\n{B8}    else:\n{PASS}")
    assert rebase("vllm/m.py", old, with_new_line(old), new) == with_new_line(new).encode()


@pytest.mark.parametrize("branch", ["elif rocm", "else"])
def test_a_case_that_upstream_put_before_it_moves_no_branch(rebase, branch):
    old = function(f"    if cuda:\n{PASS}    {branch}:\n{B8}")
    new = function(f"    if cuda:\n{PASS}    elif xpu:\n{PASS}    {branch}:\n{B8}")
    assert rebase("vllm/m.py", old, with_new_line(old), new) == with_new_line(new).encode()


def test_a_condition_that_upstream_wrote_anew_is_another_branch_and_none_is_left():
    """Nothing is there where the change could belong instead: a person is told, not stopped."""
    old = function(f"    if cuda:\n{B8}    else:\n{PASS}").splitlines(keepends=True)
    new = function(f"    if cuda and fast(x):\n{B8}    else:\n{PASS}").splitlines(keepends=True)
    found = strayed("vllm/m.py", old, 6, new, 6)
    assert str(found) == "it belongs under `if cuda`, and stands under `if cuda and fast(x)`"
    assert not found.is_left


@pytest.mark.parametrize("first", ["if cuda", "if xpu"], ids=["first", "second"])
def test_one_of_two_like_conditions_that_upstream_wrote_anew_is_not_left(rebase, first):
    old = function(f"    if cuda:\n{B8}    mid()\n    if cuda:\n{PASS}    else:\n{PASS}")
    new = old.replace("if cuda", "if cuda and fast", 1)
    assert rebase("vllm/m.py", old, with_new_line(old), new) == with_new_line(new).encode()
    # the control: one of them goes as well, and the lines stand where something else was before
    moved = function(f"    {first}:\n{PASS}    else:\n{PASS}    if cuda:\n{PASS}    else:\n{B8}")
    rebase.refused("vllm/m.py", old, with_new_line(old), moved)


@pytest.mark.parametrize(
    "new",
    [
        "    if (\n        cuda\n        and rocm(1, 2)\n    ):\n",
        "    if cuda and rocm(1,2):  # both\n",
    ],
)
def test_how_a_condition_is_written_does_not_matter(rebase, new):
    old = function(f"    if cuda and rocm(1, 2):\n{B8}    else:\n{PASS}")
    now = function(f"{new}{B8}    else:\n{PASS}")
    assert rebase("vllm/m.py", old, with_new_line(old), now) == with_new_line(now).encode()


@pytest.mark.parametrize("behind", ["    y()\n", "    else:\n        y()\n"])
def test_a_comment_behind_a_branch_belongs_to_either(behind):
    """Upstream goes on with the branch below it: the comment has not moved."""
    old = f"def f(x):\n    if x:\n        a()\n        # then\n{behind}".splitlines(True)
    new = f"def f(x):\n    if x:\n        a()\n        # then\n        b()\n{behind}".splitlines(
        True
    )
    assert strayed("m.py", old, 3, new, 3) is None
    other = "def f(x):\n    if x:\n        z()\n    else:\n        a()\n    y()\n".splitlines(True)
    assert strayed("m.py", old, 2, other, 4).is_left


BRANCH = "def f(x):\n    if x:\n        a()\n"
SUM = " + ".join(["x"] * 900)
UNREADABLE = {
    "Python 2": f"{BRANCH}    print 1\n",
    "a lone carriage return": f"{BRANCH}    b(\r)\n",
    "one above": f"b = (\r1)\n{BRANCH}",
    "a zero byte": f"{BRANCH}\0",
    "a long sum in a condition": f"{BRANCH}    while {SUM}:\n        b()\n",
    "a number that Python does not write": f"{BRANCH}    while 0x{'f' * 5000}:\n        b()\n",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_has_neither_branches_nor_none(kind):
    """No file is refused, and no command ends, for what is only not known."""
    text, other = UNREADABLE[kind], BRANCH.replace("if x", "if y")
    unread, read = text.splitlines(True), other.splitlines(True)
    if kind.endswith(("return", "above")):
        unread = [f"{line}\n" for line in text.split("\n")]
    at = next(n for n, line in enumerate(unread) if "a()" in line)
    assert strayed("m.py", unread, at, read, 2) is None
    assert strayed("m.py", read, 2, unread, at) is None
    assert strayed("m.py", BRANCH.splitlines(True), 2, read, 2) is not None


def test_a_condition_that_python_does_not_write_ends_no_command(rebase):
    old = function(f"    if x == 0x{'f' * 5000}:\n{B8}    else:\n{PASS}")
    new = "import os\n" + old
    assert rebase("vllm/m.py", old, with_new_line(old), new) == with_new_line(new).encode()


def test_a_mark_of_the_byte_order_hides_no_branch():
    old, new = (f"\ufeffif x:\n    {a}\nelse:\n    {b}\n" for a, b in (("a", "b"), ("b", "a")))
    assert strayed("m.py", old.splitlines(True), 1, new.splitlines(True), 3).is_left


def test_a_function_of_many_branches_is_read_once():
    """Of 600 lines in a branch with a new condition, each looked through all others: minutes."""
    ifs = "".join(f"    if c{n}:\n        a()\n" for n in range(600))
    block = "".join(f"        b({n})\n" for n in range(600))
    old = f"def f(x):\n{ifs}    if last:\n{block}".splitlines(True)
    new = f"def f(x):\n{ifs}    if last and x:\n{block}".splitlines(True)
    branches._function.cache_clear()
    with mock.patch.object(branches.ast, "unparse", wraps=ast.unparse) as unparse:
        files = branches.Compared("m.py", old, new)
        found = [files.strayed(n, n) for n in range(1202, 1802)]
    assert all(found)
    assert unparse.call_count <= 4 * 601  # scope names conditions, too


@given(st.data())
def test_whatever_stands_there_it_has_branches_or_none(data):
    """Bodies of all kinds within each other: every statement that has one is in it, none is lost."""
    text = "async def f(x):\n" + body(data, 1, 3)
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    assert strayed("m.py", lines, 0, lines, 0) is None
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            found = branches._function(text).around[node.lineno - 1]
            assert len(found) == (node.col_offset // 4 - 1), (found, text)


HEADS = (
    ("if a:",), ("if a:", "else:"), ("while b:",), ("for c in d:", "else:"), ("with e:",),
    ("try:", "finally:"), ("try:", "except E:", "else:", "finally:"), ("async with g:",),
)  # fmt: skip


def body(data, depth, most):
    indent, out = "    " * depth, ""
    for _ in range(data.draw(st.integers(1, 2))):
        heads = data.draw(st.sampled_from(HEADS)) if depth < most else ()
        out += "".join(f"{indent}{head}\n{body(data, depth + 1, most)}" for head in heads)
        out += f"{indent}s()\n"
    return out
