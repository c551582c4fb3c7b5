"""Where a hunk lands: only where the patch means it, in files that are not what the patch saw.

A patch is made on one release and applied on another (``moved``). Some tests keep the cache's
repository ignorant of the old release, so that only the hunk's heading tells what was meant; in the
others it holds the pre-image, as after a build of the old release.
"""

from __future__ import annotations

import subprocess

import pytest

from builder import placement, scope
from builder.errors import PatchConflictError

BLOCK = """\
    result = []
    seen = 0
    for item in items:
        if item.ready:
            result.append(item)
    return result
"""
ONE = f"def first(items):\n{BLOCK}\n\ndef second(items):\n    count = 0\n{BLOCK}\n\nlast = 1\n"


def in_second(text, old, new):
    """Replace within the function `second`."""
    head, name, tail = text.partition("def second")
    assert old in tail
    return head + name + tail.replace(old, new, 1)


HEAD = '"""A new docstring.\n\nOf several lines.\n"""\n\n'


@pytest.mark.parametrize("knows_old", [True, False])
def test_an_offset_is_accepted_and_reported(rebase, knows_old):
    old = "import os\n\n\ndef only(a):\n    b = a\n    c = b\n    d = c\n    e = d\n    return e\n"
    edited = old.replace("d = c", "d = c + 1")
    result = rebase("vllm/m.py", old, edited, HEAD + old, knows_old=knows_old)
    assert result == (HEAD + edited).encode()
    assert rebase.moved == [(1, 5, "only")]
    assert rebase.plain_git() == (0, result)


def test_nothing_is_reported_where_nothing_moved(rebase):
    old = "def only(a):\n    b = a\n    c = b\n    d = c\n    e = d\n    return e\n\n\nx = 1\n"
    result = rebase("vllm/m.py", old, old.replace("d = c", "d = 0"), old + "y = 2\n")
    assert result == old.replace("d = c", "d = 0").encode() + b"y = 2\n"
    assert rebase.moved == []


@pytest.mark.parametrize("context", [1, 3])
@pytest.mark.parametrize("knows_old", [True, False])
def test_a_hunk_does_not_move_into_another_function(rebase, context, knows_old):
    """Upstream rewrote `second`; the same block stands in `first`: git edits that, and says 0."""
    edited = in_second(ONE, "if item.ready:", "if item.ready and item.mine:")
    rewritten = in_second(ONE, BLOCK, "    return list(filter(ready, items))\n")
    said = rebase.refused("vllm/m.py", ONE, edited, rewritten, context=context, knows_old=knows_old)
    assert "belongs to second" in said
    assert "stand in first" in said
    assert "hunk 1" in said
    status, text = rebase.plain_git()
    assert status == 0
    assert b"item.mine" in text.partition(b"def second")[0]


def test_a_hunk_at_its_own_line_is_not_there_if_the_function_is_another(rebase):
    """By chance the block of `first` stands just at the line that the patch states."""
    edited = in_second(ONE, "if item.ready:", "if item.ready and item.mine:")
    shift = "# a comment\n" * 10
    rewritten = shift + in_second(ONE, BLOCK, "    return list(filter(ready, items))\n")
    assert rewritten.index(BLOCK, 1) - len(shift) == ONE.index(BLOCK)
    assert rewritten[: rewritten.index(BLOCK)].count("\n") == ONE[: ONE.rindex(BLOCK)].count("\n")
    said = rebase.refused("vllm/m.py", ONE, edited, rewritten, context=1)
    assert "belongs to second" in said
    status, text = rebase.plain_git()
    assert (status, b"item.mine" in text.partition(b"def second")[0]) == (0, True)


@pytest.mark.parametrize("knows_old", [True, False])
def test_lines_that_stand_twice_are_refused(rebase, knows_old):
    edited = in_second(ONE, "if item.ready:", "if item.ready and item.mine:")
    said = rebase.refused("vllm/m.py", ONE, edited, HEAD + ONE, context=1, knows_old=knows_old)
    assert "at 2 places (9, 19; the patch says 14)" in said
    status, text = rebase.plain_git()
    assert status == 0  # git takes the nearer one, whichever that is
    assert text != (HEAD + edited).encode() or b"item.mine" in text


def test_lines_that_stand_twice_are_clear_where_all_above_is_the_same(rebase):
    edited = in_second(ONE, "if item.ready:", "if item.ready and item.mine:")
    result = rebase("vllm/m.py", ONE, edited, ONE + "more = 1\n", context=1)
    assert result == edited.encode() + b"more = 1\n"
    assert rebase.moved == []


def test_twice_in_the_very_file_is_no_trouble(rebase):
    edited = in_second(ONE, "if item.ready:", "if item.ready and item.mine:")
    assert rebase("vllm/m.py", ONE, edited, ONE, context=1) == edited.encode()


METHODS = """\
class A:
    def run(self):
        x = 1
        y = 2
        z = 3
        return x, y, z


class B:
    def run(self):
        self.b = 0
        x = 1
        y = 2
        z = 3
        return x, y, z
"""


@pytest.mark.parametrize("knows_old", [True, False])
def test_the_same_method_name_in_two_classes(rebase, knows_old):
    head, name, tail = METHODS.partition("class B")
    edited = head + name + tail.replace("y = 2", "y = 20")
    new = head + name + tail.replace("x = 1\n        y = 2\n", "x, y = 1, 2\n")
    said = rebase.refused("vllm/m.py", METHODS, edited, new, context=1, knows_old=knows_old)
    assert ("B.run" in said and "A.run" in said) if knows_old else "more than once" in said
    status, text = rebase.plain_git()
    assert (status, b"y = 20" in text.partition(b"class B")[0]) == (0, True)


def test_a_method_that_moved_with_its_class(rebase):
    head, name, tail = METHODS.partition("class B")
    edited = head + name + tail.replace("self.b = 0", "self.b = 1")
    result = rebase("vllm/m.py", METHODS, edited, HEAD + METHODS)
    assert result == (HEAD + edited).encode()
    assert rebase.moved == [(1, 5, "B.run")]


PROPERTY = """\
class A:
    @property
    def size(self):
        x = 1
        y = 2
        z = 3
        return x

    @size.setter
    def size(self, value):
        w = 0
        x = 1
        y = 2
        z = 3
        self.value = x
"""


def test_getter_and_setter_are_two_functions(rebase):
    head, name, tail = PROPERTY.partition("@size.setter")
    edited = head + name + tail.replace("y = 2", "y = 20")
    new = head + name + tail.replace("y = 2", "y = 3")
    said = rebase.refused("vllm/m.py", PROPERTY, edited, new, context=1)
    assert "A.size (2 of 2)" in said
    assert "A.size (1 of 2)" in said
    assert rebase.plain_git()[0] == 0


DECORATED = """\
@skip
@wraps
@cache
@jit
def first():
    return 1


x = 1


@skip
@wraps
@cache
@jit
def second():
    return 2
"""


def test_a_decorator_belongs_to_its_function(rebase):
    head, name, tail = DECORATED.partition("x = 1")
    edited = head + name + tail.replace("@wraps\n@cache", "@wraps\n@lru_cache(1)")
    new = HEAD + head + name + tail.replace("@cache\n", "")
    said = rebase.refused("vllm/m.py", DECORATED, edited, new, context=1)
    assert "belongs to second" in said
    assert "stand in first" in said
    assert rebase.plain_git()[0] == 0
    assert (
        rebase("vllm/m.py", DECORATED, edited, DECORATED + "y = 1\n")
        == (edited + "y = 1\n").encode()
    )


def test_module_level_is_a_place_of_its_own(rebase):
    old = "def f():\n    x = 1\n    return x\n\n\nif True:\n    a = 0\n    x = 1\n    b = 2\n"
    edited = old[:30] + old[30:].replace("x = 1", "x = 2")
    new = old[:30] + old[30:].replace("    x = 1\n", "")
    new = new.replace("def f():\n", "def f():\n    a = 0\n").replace("return x", "b = 2")
    said = rebase.refused("vllm/m.py", old, edited, new, context=1)
    assert "belongs to the module level" in said
    assert "stand in f " in said


def test_async_and_nested_functions(rebase):
    old = (
        "async def outer():\n    async def one():\n        a = 1\n        b = 2\n        c = 3\n"
        "\n    def two():\n        z = 0\n        a = 1\n        b = 2\n        c = 3\n\n"
        "    match z:\n        case 1:\n            def three():\n                q = 1\n"
    )
    head, name, tail = old.partition("def two")
    edited = head + name + tail.replace("b = 2", "b = 20")
    new = head + name + tail.replace("b = 2", "b = 3")
    said = rebase.refused("vllm/m.py", old, edited, new, context=1)
    assert "belongs to outer.two" in said
    assert "stand in outer.one" in said
    edited = old.replace("q = 1", "q = 2")
    assert rebase("vllm/m.py", old, edited, HEAD + old) == (HEAD + edited).encode()
    assert rebase.moved == [(1, 5, "outer.three")]


def test_a_renamed_function_is_shown_not_guessed(rebase):
    old = "def before(a):\n    b = a\n    c = b\n    d = c\n    return d\n"
    new = HEAD + old.replace("before", "after")
    said = rebase.refused("vllm/m.py", old, old.replace("d = c", "d = 0"), new, context=1)
    assert "belongs to before" in said
    assert "stand in after" in said


@pytest.mark.parametrize("knows_old", [True, False])
def test_an_insertion_at_the_end_of_a_function_belongs_to_it(rebase, knows_old):
    """Nothing is removed, and the line behind the new ones is blank and belongs to nobody."""
    old = (
        "class A:\n    def one(self):\n        x = 1\n        done()\n\n    def two(self):\n"
        "        y = 1\n        done()\n\n    def three(self):\n        pass\n"
    )
    head, name, tail = old.partition("def two")
    edited = head + name + tail.replace("done()\n", "done()\n        log()\n")
    new = head + name + tail.replace("done()\n", "finish()\n")
    said = rebase.refused("vllm/m.py", old, edited, new, context=1, knows_old=knows_old)
    assert "two" in said
    status, text = rebase.plain_git()
    assert (status, b"log()" in text.partition(b"def two")[0]) == (0, True)


def test_an_insertion_moves_with_its_function(rebase):
    old = "def one():\n    x = 1\n    y = 2\n    z = 3\n    return x\n"
    edited = old.replace("    z = 3\n", "    z = 3\n    log()\n")
    assert rebase("vllm/m.py", old, edited, HEAD + old) == (HEAD + edited).encode()
    assert rebase.moved == [(1, 5, "one")]


KERNEL = """\
int first(int a) {
  int b = a;
  int c = b;
  return c;
}

int second(int a) {
  int z = 0;
  int b = a;
  int c = b;
  return c;
}
"""


@pytest.mark.parametrize("path", ["csrc/k.cu", "csrc/k.cpp", "csrc/k.h"])
@pytest.mark.parametrize("knows_old", [True, False])
def test_a_hunk_does_not_move_into_another_c_function(rebase, path, knows_old):
    head, name, tail = KERNEL.partition("int second")
    edited = head + name + tail.replace("int c = b;", "int c = b + 1;")
    new = head + name + tail.replace("int c = b;", "int c = a;")
    said = rebase.refused(path, KERNEL, edited, new, context=1, knows_old=knows_old)
    assert "belongs to int second(int a) {" in said
    assert "stand in int first(int a) {" in said
    status, text = rebase.plain_git()
    assert (status, b"b + 1" in text.partition(b"int second")[0]) == (0, True)


@pytest.mark.parametrize(
    "path", ["vllm/t.json", "requirements/cuda.txt", "docs/x.md", "vllm/x.pyi"]
)
def test_other_files_need_lines_that_stand_once(rebase, path):
    old = "".join(f"line {n} of it\n" for n in range(30))
    edited = old.replace("line 20 of", "line twenty of")
    assert rebase(path, old, edited, HEAD + old) == (HEAD + edited).encode()
    assert rebase.moved == [(1, 5, "")]
    assert "at 2 places" in rebase.refused(path, old, edited, HEAD + old + old)


def test_python_that_this_interpreter_cannot_read(rebase):
    """The heading has to do, as for a file whose pre-image is not known."""
    old = ONE.replace("last = 1", "print 'python 2'")
    edited = in_second(old, "if item.ready:", "if item.mine:")
    rewritten = in_second(old, BLOCK, "    return list(filter(ready, items))\n")
    assert "belongs to second" in rebase.refused("vllm/m.py", old, edited, rewritten, context=1)
    edited = in_second(old, "count = 0", "count = 1")
    assert rebase("vllm/m.py", old, edited, HEAD + old) == (HEAD + edited).encode()


def test_upstream_made_it_unreadable(rebase):
    """One side has a syntax tree and the other has none: they are compared by the same measure."""
    old = METHODS
    edited = old.replace("self.b = 0", "self.b = 1")
    new = old + "print 'python 2'\n"
    assert rebase("vllm/m.py", old, edited, new) == edited.encode() + b"print 'python 2'\n"


def test_escapes_that_python_warns_of_are_not_our_matter(rebase):
    old = ONE + "pattern = '\\d'\n"
    edited = in_second(old, "count = 0", "count = 1")
    assert rebase("vllm/m.py", old, edited, HEAD + old) == (HEAD + edited).encode()


@pytest.mark.parametrize("odd", ["\x0c", "\x85", "\r", "\u2028", "\x1c", "\x0b"])
def test_the_scope_of_a_line_below_odd_characters(odd):
    text = f"# a{odd}# b{odd}# c\n" * 5 + "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
    lines = placement.split_lines(text.encode())
    for name, last in (("one", "return 1"), ("two", "return 2")):
        line = next(n for n, content in enumerate(lines) if last in content)
        assert scope.scope_at("vllm/m.py", lines, line) == name


CRLF = "\r\n\r\ndef one():\r\n    x = 1\r\n    y = 2\r\n    z = 3\r\n    return x\r\n"


def test_a_file_with_crlf_keeps_it(rebase):
    edited = CRLF.replace("y = 2", "y = 3")
    assert rebase("vllm/m.py", CRLF, edited, "# c\r\n" + CRLF) == ("# c\r\n" + edited).encode()
    assert rebase.moved == [(1, 1, "one")]


def test_upstream_changed_the_line_ends(rebase):
    edited = CRLF.replace("y = 2", "y = 3")
    with pytest.raises(PatchConflictError, match="not there"):
        rebase("vllm/m.py", CRLF, edited, CRLF.replace("\r", ""))


@pytest.mark.parametrize("odd", ["\x0c", "\x85", "\r", "\u2028", "\x1c", "\x0b"])
def test_only_a_line_feed_ends_a_line(rebase, odd):
    """Python counts more line ends than git does; in functions below them, too."""
    old = f"z = 1\n# a{odd}# b{odd}# c{odd}# d\ndef one():\n    x = 1  # {odd}# x\n    y = 2\n    z = 3\n    return y\n"
    old += "\n\ndef two():\n    return 0\n"
    edited = old.replace("y = 2", "y = 3").replace("return 0", f"return 1  # {odd}# x")
    assert rebase("vllm/m.py", old, edited, "# c\n" + old) == ("# c\n" + edited).encode()
    assert [scope for _, _, scope in rebase.moved] in (["one", "two"], ["one"])


@pytest.mark.parametrize(
    ("old", "edited"),
    [
        ("a = 1\nb = 2", "a = 1\nb = 3"),
        ("a = 1\nb = 2", "a = 1\nb = 2\n"),
        ("a = 1\nb = 2\n", "a = 1\nb = 2"),
        ("a = 1\nb = 2", "a = 0\nb = 2"),
        ("a = 1\nb = 2", "a = 1\nb = 2\nc = 3"),
        ("a = 1\nb = 2\n", "z = 0\na = 1\nb = 2\n"),
        ("a = 1\nb = 2\n", "a = 1\nb = 2\nc = 3\n"),
        ("a = 1\nb = 2\n", "b = 2\n"),
        ("a = 1\nb = 2\n", "a = 1\n"),
        ("a = 1\nb = 2\n", "c = 3\n"),
        ("a = 1\nb = 2\n", ""),
        ("", "a = 1\n"),
        ("", "a = 1"),
        ("a = 1\n", "\n\n\na = 1\n\n\n"),
        ("-- a\n++ b\n", "-- c\n++ b\n"),
        ("\\ No newline at end of file\n", "\\ No newline at end of file"),
    ],
)
def test_first_and_last_lines(rebase, old, edited):
    assert rebase("vllm/m.py", old, edited, old) == edited.encode()
    assert rebase.moved == []


@pytest.mark.parametrize("knows_old", [True, False])
def test_a_hunk_at_an_end_of_the_file_stays_there(rebase, knows_old):
    """git am refuses these too; the error says why."""
    lines = [f"x{n} = {n}\n" for n in range(12)]
    old = "".join(lines)
    for edited, new, said in (
        (old.replace("x1 = 1", "x1 = 0"), "y = 1\n" + old, "begins at the first line"),
        (old + "y = 1\n", old + "z = 1\n", "ends at the last line"),
    ):
        with pytest.raises(PatchConflictError, match=said):
            rebase("vllm/m.py", old, edited, new, knows_old=knows_old and "first" in said)
        assert rebase.plain_git()[0] != 0


def test_an_empty_file_that_is_no_longer_empty(rebase):
    with pytest.raises(PatchConflictError):
        rebase("vllm/m.py", "", "a = 1\n", "b = 1\n")


def test_hunks_that_upstream_put_in_another_order(rebase):
    one = "def one():\n    a = 1\n    b = 2\n    c = 3\n    d = 4\n    return a\n"
    two = "def two():\n    e = 1\n    f = 2\n    g = 3\n    h = 4\n    return e\n"
    gap = "".join(f"x{n} = {n}\n" for n in range(12))
    edited = one.replace("b = 2", "b = 3") + gap + two.replace("f = 2", "f = 3")
    said = rebase.refused("vllm/m.py", one + gap + two, edited, two + gap + one, context=1)
    assert "above those of the hunk before" in said


def test_a_conflict_shows_what_stands_there_instead(rebase):
    old = ONE.replace("last = 1", "".join(f"x{n} = {n}\n" for n in range(30)))
    edited = in_second(old, "count = 0", "count = 1").replace("x20 = 20", "x20 = 0")
    new = HEAD + old.replace("x19 = 19", "x19 = nineteen")
    with pytest.raises(PatchConflictError) as caught:
        rebase("vllm/m.py", old, edited, new)
    assert "vllm/m.py, hunk 2" in caught.value.where
    shown = "\n".join(caught.value.details)
    assert "- x19 = 19" in shown
    assert "+ x19 = nineteen" in shown
    assert "  x20 = 20" in shown
    line = new.splitlines().index("x17 = 17") + 1
    assert f"from line {line}" in shown
    assert rebase.fork.leftovers() == []


def test_the_control_is_real(rebase):
    """git by itself does edit the wrong function, with 3-way as well: what the tests guard from."""
    edited = in_second(ONE, "if item.ready:", "if item.ready and item.mine:")
    rewritten = in_second(ONE, BLOCK, "    return list(filter(ready, items))\n")
    rebase.refused("vllm/m.py", ONE, edited, rewritten, context=3)
    assert rebase.plain_git()[0] == 0
    rebase.new.reset()
    patch = subprocess.run(
        ["git", "apply", "-"], cwd=rebase.new.folder, input=rebase.data, check=False,
        capture_output=True,
    )  # fmt: skip
    assert patch.returncode == 0
    text = (rebase.new.folder / "vllm/m.py").read_text()
    assert "item.mine" in text.partition("def second")[0]
