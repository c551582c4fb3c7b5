"""Random files and random edits: each comes through byte for byte, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from builder import placement
from builder.errors import MisplacedHunkError, PatchConflictError
from tests.series.fork import DATE, TAG, Developer, Fork

LINE = st.sampled_from([
    "", "x = 1", "    x = 1", "    y = 2", "def f():", "class C:", "    def g(self):", "\r", "a\r",
    "\x0c", "b\x85c", "d\re", "- x", "+ x", "\\ x", "--- a/x", "+++ b/x", "@@ -1 +1 @@", "ü", "\t",
    "diff --git a/x b/x", "index 1..2", "From me Mon Jan  1 00:00:00 2024", "-- ", "--", "---",
    "GIT binary patch", "old mode 100644", "deleted file mode 120000", "copy from x",
])  # fmt: skip


def text_of(lines, ends):
    return "\n".join(lines) + ("\n" if ends and lines else "")


@st.composite
def file_and_edit(draw):
    """A file, and the same file with up to four places changed."""
    lines = draw(st.lists(LINE, max_size=24))
    edited = list(lines)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(edited)))
        edited[at : at + draw(st.integers(0, 3))] = draw(st.lists(LINE, max_size=3))
    return text_of(lines, draw(st.booleans())), text_of(edited, draw(st.booleans()))


PROPERTY_SETTINGS = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.fixture(scope="module")
def bench(folder):
    """A fork and a developer who take new files for each example."""
    folder /= "property"
    developer = Developer.new(folder / "developer", {"vllm/__init__.py": ""})
    return developer, Fork.new(folder / "fork", {"vllm/__init__.py": ""})


def pair_of_trees(pairs):
    """Name the files; leave out those that the edit does not change."""
    named = {f"vllm/m{n:02}.py": pair for n, pair in enumerate(pairs) if pair[0] != pair[1]}
    return (
        {path: old for path, (old, _) in named.items()} | {"vllm/__init__.py": "x = 1\n"},
        {path: new for path, (_, new) in named.items()} | {"vllm/__init__.py": "x = 2\n"},
    )


@PROPERTY_SETTINGS
@given(pairs=st.lists(file_and_edit(), min_size=10, max_size=14))
@example(pairs=[("--- a\n", "+++ b\n"), ("-- a\nx\n", "x\n++ b"), ("\r", "\r\n"), ("", "\r")])
def test_any_edit_comes_through_byte_for_byte(bench, pairs):
    """Random files, random edits -> git format-patch -> applied: the edited bytes.

    apply itself refuses where its own placement gives another blob than git's.
    """
    old, edited = pair_of_trees(pairs)
    developer, fork = bench
    developer.reset()
    developer.commit(old, "old\n")
    data = developer.patch(edited, GIT_AUTHOR_DATE=DATE)
    fork.release(old, TAG)
    applied = fork.apply_one(data)
    for path, text in edited.items():
        assert fork.blob(applied, path) == text.encode(), path
    assert applied.patches[0].moved == ()


@PROPERTY_SETTINGS
@given(
    pairs=st.lists(file_and_edit(), min_size=10, max_size=14),
    above=st.lists(LINE, min_size=1, max_size=3),
    below=st.lists(LINE, max_size=2),
    knows_old=st.booleans(),
)
def test_a_file_that_grew_is_refused_or_patched_right(bench, pairs, above, below, knows_old):
    """The new release has lines more at the top and the end; a wrong place is never taken."""
    old, edited = pair_of_trees([(a, b) for a, b in pairs if a.endswith("\n") and b.endswith("\n")])
    developer, fork = bench
    developer.reset()
    developer.commit(old, "old\n")
    data = developer.patch(edited, GIT_AUTHOR_DATE=DATE)
    fork.put({"0001-x.patch": data})
    top, end = text_of(above, ends=True), text_of(below, ends=True)
    (patch,) = fork.patches()
    for change in patch.changes:
        before = old[change.path].encode()
        try:
            _, result = placement.place(
                patch.name, change, (top + old[change.path] + end).encode(),
                before if knows_old else None, same_blob=False,
            )  # fmt: skip
        except (MisplacedHunkError, PatchConflictError):
            continue
        assert result == (top + edited[change.path] + end).encode()
