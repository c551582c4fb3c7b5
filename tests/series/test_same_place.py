"""A place that looks like the one the patch means, and is another: equal lines, methods, sections.

Everywhere the control is what plain git does (it edits the wrong place and reports success), and a
release in which only lines above were added: there the hunk moves and is taken.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builder import scope
from builder.errors import MisplacedHunkError, PatchConflictError


def lines(indent, count=9):
    return "".join(f"{indent}s{n} = {n};\n" for n in range(count))


def with_new_line(text, mark="s4 = 4;\n", new="NEW = 1;\n"):
    """Insert a line behind the first one that ends like the mark."""
    at = text.index(mark)
    indent = text[:at].rpartition("\n")[2]
    return text[: at + len(mark)] + indent + new + text[at + len(mark) :]


def is_refused(rebase, path, old, new, *, above, said, knows_old=True):
    """Refused on ``new``, where git takes it; taken where the old file has lines ``above``."""
    edited = with_new_line(old)
    assert said in rebase.refused(path, old, edited, new, knows_old=knows_old)
    status, text = rebase.plain_git()
    assert (status, b"NEW" in text) == (0, True)
    if knows_old:
        once = "t5 = 5".join(old.rsplit("s5 = 5", 1)) if old.count("s5 = 5") > 1 else old
        edited = with_new_line(once)
        assert rebase(path, once, edited, above + once) == (above + edited).encode()
        assert [offset for _, offset, _ in rebase.moved] == [above.count("\n")]


B4, B8 = lines("    "), lines("        ")
LOAD = f"    def load(p):\n{B8}        return e\n"
OTHER_LOAD = "    def load(p):\n        return None\n"
TABLE = "".join(f"    's{n}': {n},\n" for n in range(9))
TWICE = {
    "one of two definitions": (
        f"import sys\nif CUDA:\n{LOAD}elif ROCM:\n{LOAD}x = 1\n",
        f"import sys\nif ROCM:\n{LOAD}elif XPU:\n{OTHER_LOAD}x = 1\n",
        "belongs to load (1 of 2) under `if CUDA`",
    ),
    "the only such body, in the other definition": (
        f"import sys\nif CUDA:\n{LOAD}elif ROCM:\n{OTHER_LOAD}x = 1\n",
        f"import sys\nif ROCM:\n{LOAD}else:\n{OTHER_LOAD}x = 1\n",
        "stand in load (1 of 2) under `if ROCM`",
    ),
    "one of two loops": (
        f"def f(y):\n    for x in y:\n{B8}    mid()\n    for z in y:\n{B8}    return 1\n",
        f"def f(y):\n    mid()\n    for z in y:\n{B8}    return 1\n",
        "more than once (at 5 and 16)",
    ),
    "one of two branches": (
        f"def f(x):\n    if CUDA:\n{B8}    elif ROCM:\n{B8}    return\n",
        f"def f(x):\n    if CUDA:\n        pass\n    elif ROCM:\n{B8}    return\n",
        "belongs under `if CUDA`, and stands under `if ROCM`",
    ),
}


@pytest.mark.parametrize("case", TWICE)
def test_lines_that_stood_twice_and_stand_once(rebase, case):
    old, new, said = TWICE[case]
    is_refused(rebase, "vllm/m.py", old, new, above="import os\n", said=said)


def test_one_of_two_tables(rebase):
    old = f"ONE = {{\n{TABLE}}}\nTWO = {{\n{TABLE}}}\n"
    edited = with_new_line(old, "'s4': 4,\n", "'new': 1,\n")
    new = f"ONE = {{}}\nTWO = {{\n{TABLE}}}\n"
    assert "more than once" in rebase.refused("vllm/m.py", old, edited, new)
    assert rebase.plain_git()[0] == 0
    with pytest.raises(MisplacedHunkError, match="at 2 places"):
        rebase("vllm/m.py", old, edited, "import os\n" + old)
    assert rebase("vllm/m.py", old, edited, old + "x = 1\n") == f"{edited}x = 1\n".encode()


def test_the_same_lines_in_another_function_do_not_hinder(rebase):
    """They stood twice before; upstream changed those of the function that the patch leaves."""
    old = f"def one():\n{B4}    return 1\n\n\ndef two():\n{B4}    return 2\n"
    head, name, tail = old.partition("def two")
    edited = head + name + with_new_line(tail)
    head = head.replace("s4 = 4;", "s4 = 40;\n    t = 0;")
    assert (
        rebase("vllm/m.py", old, edited, head + name + tail)
        == (head + name + with_new_line(tail)).encode()
    )
    assert rebase.moved == [(1, 1, "two")]


def method(name):
    return f"  void {name}() {{\n{B4}  }}\n"


def kernel(name):
    return f"template <typename T>\n__global__ void {name}(\n    T* a,\n    int b)\n{{\n{B4}}}\n"


def rust(name):
    return f"    fn {name}<'a>(&'a self) -> char {{\n{B8}        '{{'\n    }}\n"


CONFUSING = 'const char* s = "}"; // }\n/* } */ char c = \'}\';\nauto r = R"x(}})x";\n'
EITHER = "namespace vllm {\n#ifdef A\n  void f(int a) {\n#else\n  void f(long a) {\n#endif\n  }\n"
BRACES = {
    "methods": (
        "vllm/a.h",
        f"class Foo {{\n public:\n{method('first')}{method('second')}}};\n",
        f"class Foo {{\n public:\n  void first() {{}}\n{method('second')}}};\n",
        ("class Foo { void first() {", "class Foo { void second() {"),
    ),
    "classes": (
        "vllm/a.hpp",
        f"class Foo {{\n{method('run')}}};\nclass Bar {{\n  int x;\n}};\n",
        f"class Foo {{\n  int x;\n}};\nclass Bar {{\n{method('run')}}};\n",
        ("class Foo { void run() {", "class Bar { void run() {"),
    ),
    "functions in a namespace": (
        "csrc/a.cu",
        f"namespace vllm {{\n{method('first')}{method('second')}}}\n",
        f"namespace vllm {{\n  void first() {{}}\n{method('second')}}}\n",
        ("namespace vllm { void first() {", "namespace vllm { void second() {"),
    ),
    "namespaces": (
        "csrc/a.cpp",
        f"namespace a {{\n{method('run')}}}\nnamespace b {{\n}}\n",
        f"namespace a {{\n}}\nnamespace b {{\n{method('run')}}}\n",
        ("namespace a { void run() {", "namespace b { void run() {"),
    ),
    "kernels with the brace on its own line": (
        "csrc/a.cu",
        kernel("first") + kernel("second"),
        "int x;\n" + kernel("second"),
        ("__global__ void first( T* a, int b) {", "__global__ void second( T* a, int b) {"),
    ),
    "braces that are none": (
        "csrc/a.cu",
        f"namespace vllm {{\n{CONFUSING}{method('first')}{CONFUSING}{method('second')}}}\n",
        f"namespace vllm {{\n{CONFUSING}{CONFUSING}{method('second')}}}\n",
        ("namespace vllm { void first() {", "namespace vllm { void second() {"),
    ),
    "branches of the preprocessor": (
        "csrc/a.cu",
        f"{EITHER}{method('first')}{method('second')}}}\n",
        f"{EITHER}  void first() {{}}\n{method('second')}}}\n",
        ("namespace vllm { void first() {", "namespace vllm { void second() {"),
    ),
    "Rust": (
        "rust/a.rs",
        f"impl A {{\n{rust('first')}{rust('second')}}}\n",
        f"impl A {{\n{rust('second')}}}\n",
        ("impl A { fn first<'a>(&'a self) -> char {", "impl A { fn second<'a>(&'a self) -> char {"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("knows_old", [True, False])
@pytest.mark.parametrize("case", BRACES)
def test_a_hunk_does_not_move_into_another_method(rebase, case, knows_old):
    path, old, new, (meant, now) = BRACES[case]
    said = f"belongs to {meant}" if knows_old and "kernels" not in case else ""
    is_refused(rebase, path, old, new, above="int y;\n", said=said, knows_old=knows_old)
    if said:
        assert f"stand in {now}" in rebase.refused(path, old, with_new_line(old), new)


def test_one_of_two_blocks_of_the_preprocessor(rebase):
    old = f"void f() {{\n#ifdef A\n{B4}#else\n{B4}#endif\n}}\n"
    new = f"void f() {{\n#ifdef A\n#else\n{B4}#endif\n}}\n"
    is_refused(rebase, "csrc/a.cu", old, new, above="int y;\n", said="more than once")


def test_the_brace_reader_leaves_control_flow_out():
    text = (
        "int f(int a) {\n  for (int i = 0; i < a; ++i) {\n    if (i) {\n      g();\n    } else {\n"
        "      h();\n    }\n  }\n  auto l = [&](int b) {\n    k();\n  };\n}\n"
    )
    found = [scope.scope_at("csrc/a.cu", text.splitlines(keepends=True), n) for n in range(12)]
    assert found[3] == found[5] == found[7] == "int f(int a) {"
    assert found[9] == "int f(int a) { auto l = [&](int b) {"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="{}()\"'/*\\#if else\nR;:a", max_size=80))
@example('R"(' * 20)
@example("'" * 30 + "{")
@example("#else\n#endif\n}{\n")
def test_any_text_has_definitions_or_none(text):
    assert scope.definitions("a.cu", [text]) is None or scope.definitions("a.cu", [""]) == ()


A_AND_B = f"class A:\n    x = 1\n    y = 2\n\n    def go(self):\n{B8}\n\nclass B:\n    x = 3\n"
GONE_TO_B = f"class A:\n    x = 1\n    y = 2\n\n\nclass B:\n    x = 3\n\n    def go(self):\n{B8}"


@pytest.mark.parametrize("knows_old", [True, False])
def test_a_method_that_moved_to_another_class(rebase, knows_old):
    """The heading says `def go(self):` before and after, and no more."""
    said = "belongs to A.go" if knows_old else "stand in B.go"
    is_refused(
        rebase, "vllm/m.py", A_AND_B, GONE_TO_B, above="import os\n", said=said, knows_old=knows_old
    )
    if not knows_old:
        text = rebase.refused(
            "vllm/m.py", A_AND_B, with_new_line(A_AND_B), GONE_TO_B, knows_old=False
        )
        assert "series --tag" in text


def test_what_is_told_without_the_old_file(rebase):
    """A function, a method of the only class, and a hunk that shows the class line itself."""
    only = f"class A:\n    x = 1\n    y = 2\n\n    def go(self):\n{B8}"
    top = f"class A:\n    x = 1\n\n\ndef go():\n{B4}\n\nclass B:\n    x = 2\n"
    shown = (
        "class Z:\n    def zed(self):\n        return 0\n\n\n"
        "class A:\n    def go(self):\n        s4 = 4;\n        return 1\n"
    )
    for old in (only, top, shown):
        edited = with_new_line(old)
        assert rebase("vllm/m.py", old, edited, f"import os\n{old}", knows_old=False) == (
            f"import os\n{edited}".encode()
        )


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("vllm/m.py", "def %s%s(a):\n"),
        ("vllm/m.py", "class %s%s:\n"),
        ("csrc/a.cu", "void %s%s(int a) {\n"),
    ],
)
def test_a_name_that_git_cuts(rebase, path, line):
    """Of a heading 80 bytes are left: two long names look alike."""
    above, end = ("int x;\n", "}\n") if path.endswith(".cu") else ("x = 1\n", "")
    old, new = (f"{line % ('f' * 90, name)}{B4}{end}" for name in ("_one", "_two"))
    said = rebase.refused(path, old, with_new_line(old), above + new, knows_old=False)
    assert "no more than the beginning of" in said
    assert rebase.plain_git()[0] == 0
    short = old.replace("f" * 90, "f" * 40)
    edited = with_new_line(short)
    assert rebase(path, short, edited, above + short, knows_old=False) == (above + edited).encode()


def test_a_method_at_its_stated_line_needs_no_old_file(rebase):
    edited = with_new_line(A_AND_B)
    result = rebase("vllm/m.py", A_AND_B, edited, A_AND_B + "    y = 4\n", knows_old=False)
    assert result == (edited + "    y = 4\n").encode()


def section(kind, name):
    return {
        "cmake": f"function({name})\n{B4}endfunction()\n",
        "toml": f"[{name}]\n{lines('')}",
        "js": f"function {name}() {{\n{B4}}}\n",
        "sh": f"{name}() {{\n{B4}}}\n",
        "json": f'"{name}": {{\n{B4}}},\n',
    }[kind]


@pytest.mark.parametrize("knows_old", [True, False])
@pytest.mark.parametrize("kind", ["cmake", "toml", "js", "sh", "json"])
def test_another_section_of_a_file_that_nobody_reads(rebase, kind, knows_old):
    old = section(kind, "one") + section(kind, "two")
    new = section(kind, "one").partition("\n")[0] + "\n" + section(kind, "two")
    said = "are not those that were there" if knows_old else "is not known here"
    path = f"vllm/a.{kind}"
    above = "".join(f"# {n}\n" for n in range(3))
    edited = with_new_line(old)
    assert said in rebase.refused(path, old, edited, new, knows_old=knows_old)
    assert rebase.plain_git()[0] == 0
    once = section(kind, "one") + section(kind, "two").replace("s5", "t5")
    edited = with_new_line(once)
    if knows_old:
        assert rebase(path, once, edited, above + once) == (above + edited).encode()
        assert rebase.moved == [(1, 3, "")]
    else:
        for changed in (above + once, once + above):
            assert said in rebase.refused(path, once, edited, changed, knows_old=False)
        assert rebase(path, once, edited, once, knows_old=False) == edited.encode()


def test_another_section_at_the_stated_line(rebase):
    """By chance the lines stand just where the patch says, in the other section."""
    old = section("toml", "one") + "# a\n# b\n" + section("toml", "two")
    edited = with_new_line(old)
    new = "[two]\n" + lines("")
    said = rebase.refused("vllm/a.toml", old, edited, new)
    assert "are not those that were there" in said
    assert rebase.plain_git()[0] == 0
    far = old + "".join(f"# {n}\n" for n in range(20))
    at_the_end = with_new_line(far, "# 15\n", "# new\n")
    result = rebase("vllm/a.toml", far, at_the_end, far.replace("s0 = 0", "s0 = 1", 1))
    assert result == at_the_end.replace("s0 = 0", "s0 = 1", 1).encode()


def test_a_stub_is_read_like_python(rebase):
    old = f"def one(a):\n{B4}    return x\ndef two(a):\n{B4}    return x\n"
    new = f"def one(a): ...\ndef two(a):\n{B4}    return x\n"
    said = "belongs to one, but its lines now stand in two"
    with pytest.raises(PatchConflictError):
        rebase("vllm/a.pyi", old, with_new_line(old), old.replace("s4", "t4"))
    assert said in rebase.refused("vllm/a.pyi", old, with_new_line(old), new)
    assert rebase.plain_git()[0] == 0
