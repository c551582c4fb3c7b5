"""What upstream has of a patch: all, half, nothing; and that half of one never goes by unseen."""

from __future__ import annotations

import pytest

from builder.try_series import State
from builder.upstreamed import Extent, probe_holds
from tests.rebase.moving import ENGINE, NEW, OLD, edit

PATH, OTHER = "vllm/engine.py", "vllm/other.py"
HOOK = ("    engine.open(name)\n", "    engine.open(name)\n    engine.hook(name)\n")
LOAD = ("        part.check()\n", "        part.check()\n        part.load_more()\n")
BOTH = edit(ENGINE, HOOK, LOAD)
PROBE = f'path {PATH} contains "prepared"'


def test_taken_verbatim(moving):
    elsewhere = ("    size = 1\n", "    size = 3\n")
    case = moving({PATH: ENGINE}, {PATH: edit(BOTH, elsewhere)}, ("both", {PATH: BOTH}))
    trial = case.trial()
    assert (trial.state, trial.verdict.extent) == (State.UPSTREAMED, Extent.FULL)
    assert trial.verdict.there == (f"{PATH}, hunk 1", f"{PATH}, hunk 2")


def test_taken_with_other_white_space_and_context(moving):
    """What patch-id finds and reverse application does not."""
    spaced = ("    engine.open(name)\n", "    engine.open(name)\n    engine.hook( name )\n")
    context = ("        request.answer()\n", "        request.answer(now=True)\n")
    patch = ("hook", {PATH: edit(ENGINE, HOOK)})
    trial = moving({PATH: ENGINE}, {PATH: edit(ENGINE, spaced, context)}, patch).trial()
    assert trial.state is State.UPSTREAMED


def test_taken_a_few_lines_further_down(moving):
    """Strict application succeeds and would do the same thing twice."""
    new = edit(ENGINE, ("        request.answer()\n    engine.close()\n",
                        "        request.answer()\n    engine.hook(name)\n    engine.close()\n"))  # fmt: skip
    case = moving({PATH: ENGINE}, {PATH: new}, ("hook", {PATH: edit(ENGINE, HOOK)}))
    status, read = case.git_am(threeway=False)
    assert (status, read(PATH).count(b"engine.hook(name)")) == (0, 2)
    assert case.trial().state is State.UPSTREAMED


def test_the_same_line_in_another_function_is_not_the_fix(moving):
    new = edit(
        ENGINE, ("        self.size = 2\n", "        self.size = 2\n    engine.hook(name)\n")
    )
    trial = moving({PATH: ENGINE}, {PATH: new}, ("hook", {PATH: edit(ENGINE, HOOK)})).trial()
    assert trial.verdict.extent is Extent.NONE


def test_written_in_other_words(moving):
    new = edit(ENGINE, ("    engine.open(name)\n", "    engine.open(name, prepared=True)\n"))
    patch = ("hook", {PATH: edit(ENGINE, HOOK)}, PROBE)
    trial = moving({PATH: ENGINE}, {PATH: new}, patch).trial()
    assert trial.state is State.UPSTREAMED
    assert "its probe holds" in trial.reason


def test_a_probe_is_about_upstream_not_about_our_own_patches(moving):
    """An earlier patch of the series writes the text that a later one's probe looks for."""
    first = edit(ENGINE, ("    size = 1\n", "    size = 1\n    prepared = 2\n"))
    case = moving(
        {PATH: ENGINE}, {PATH: ENGINE},
        ("first", {PATH: first}), ("second", {PATH: edit(first, HOOK)}, PROBE),
    )  # fmt: skip
    assert [t.state for t in case.trials()] == [State.CLEAN, State.CLEAN]


def test_a_probe_that_held_before_proves_nothing(moving):
    patch = ("hook", {PATH: edit(ENGINE, HOOK)}, f'path {PATH} contains "engine"')
    trial = moving({PATH: ENGINE}, {PATH: ENGINE}, patch).trial()
    assert trial.state is State.CLEAN
    assert "held on the old release too" in trial.verdict.reason


@pytest.mark.parametrize(
    ("probe", "files", "holds"),
    [
        ('path a.py contains "x y"', {"a.py": b"1 x y 2"}, True),
        ('path a.py contains "x y"', {"a.py": b"1"}, False),
        ('path a.py contains "x y"', {}, None),
        ('path a.py lacks "x"', {"a.py": b"y"}, True),
        ('path a.py lacks "x"', {"a.py": b"x"}, False),
        ('path a.py lacks "x"', {}, None),  # the code may stand elsewhere now
        ("path a.py exists", {"a.py": b""}, True),
        ("path a.py exists", {}, False),
        ("path a.py missing", {}, True),
        ("never [ours]", {}, None),
    ],
)
def test_probes(probe, files, holds):
    assert probe_holds(probe, files.get) is holds


OPEN = "    engine.open(name)\n"
BEFORE = (OPEN, "    engine.hook(name)\n" + OPEN)
AROUND = (OPEN, "    engine.hook(name)\n" + OPEN + "    engine.hook_again(name)\n")
# what the patch makes of the files, and what upstream made of them
HALVES = {
    "one hunk of two": ({PATH: BOTH}, {PATH: edit(ENGINE, HOOK)}),
    "one file of two": (
        {PATH: edit(ENGINE, HOOK), OTHER: "a = 1\nb = 2\n"},
        {PATH: edit(ENGINE, HOOK), OTHER: "a = 1\n"},
    ),
    "one line of two in a hunk": ({PATH: edit(ENGINE, AROUND)}, {PATH: edit(ENGINE, BEFORE)}),
}


@pytest.mark.parametrize("half", HALVES)
def test_half_of_it_is_a_conflict(moving, half):
    """git am --3way commits the other half and returns 0."""
    patched, taken = HALVES[half]
    case = moving({PATH: ENGINE, OTHER: "a = 1\n"}, {OTHER: "a = 1\n"} | taken, ("half", patched))
    status, read = case.git_am(threeway=True)
    assert status == 0
    assert all(read(path).decode() == text for path, text in patched.items())
    trial = case.trial()
    assert trial.state in (State.CONFLICT, State.MISPLACED)
    assert "upstream has 1 of its 2 hunks" in trial.reason or "made 1 of the 2" in trial.reason
    before = case.patches()
    said = case.begin(code=30).stderr
    assert trial.reason.split(":")[0] in said
    case.rebase("--continue", code=31)  # not without somebody's work
    assert case.patches() == before


FURTHER_DOWN = ("        request.answer()\n    engine.close()\n",
                "        request.answer()\n    engine.hook(name)\n    engine.close()\n")  # fmt: skip


@pytest.mark.parametrize("kept", [True, False])
def test_half_of_it_elsewhere_in_the_function_takes_a_persons_word(moving, kept):
    """Every hunk applies, and one would do twice what upstream does."""
    case = moving({PATH: ENGINE}, {PATH: edit(ENGINE, FURTHER_DOWN)}, ("both", {PATH: BOTH}))
    status, read = case.git_am(threeway=False)
    assert (status, read(PATH).count(b"engine.hook(name)")) == (0, 2)
    said = case.begin(code=30).stderr
    assert "upstream has 1 of its 2 hunks" in said
    assert "would be there twice" in said
    assert "is resolved" not in case.rebase("--status").stdout
    case.rebase("--continue", code=31)
    mine = BOTH if kept else edit(ENGINE, LOAD)
    case.user.write({PATH: edit(mine, FURTHER_DOWN)})
    case.user.git("add", PATH)
    case.rebase("--continue")
    assert case.result(PATH) == edit(mine, FURTHER_DOWN)


@pytest.mark.parametrize(
    ("new", "probe"),
    [
        (edit(ENGINE, FURTHER_DOWN), "never [it is our own]"),
        (edit(ENGINE, ("        self.size = 2\n", "        self.prepared = 2\n")), PROBE),
    ],
    ids=["its lines, elsewhere", "its probe"],
)
def test_upstreamed_and_yet_it_applies(moving, new, probe):
    """Neither kept nor dropped unless somebody says so; the author's probe is such a word."""
    patch = ("hook", {PATH: edit(ENGINE, HOOK)}, probe)
    case = moving({PATH: ENGINE}, {PATH: new}, patch)
    said = case.begin(code=30).stderr
    assert "yet it applies" in said
    assert "is resolved" not in case.rebase("--status").stdout
    case.rebase("--continue", code=31)
    if probe == PROBE:
        case.rebase("--continue", "--auto-drop")
        assert case.fork.series(NEW).entries == ()
        return
    case.rebase("--continue", "--auto-drop", code=31)
    case.user.git("add", "--all")
    case.rebase("--continue", "--auto-drop")
    assert case.result(PATH) == edit(new, HOOK)


def test_what_somebody_staged_is_not_dropped_by_the_way(moving):
    """--auto-drop is about all the others; this patch was looked at."""
    new = edit(ENGINE, ("        self.size = 2\n", "        self.prepared = 2\n"))
    hooked = edit(ENGINE, HOOK)
    other = edit(hooked, ("        self.size = 0\n", "        self.size = -1\n"))
    case = moving({PATH: ENGINE}, {PATH: new}, ("hook", {PATH: hooked}, PROBE),
                  ("other", {PATH: other}, PROBE))  # fmt: skip
    case.begin(code=30)
    case.user.git("add", "--all")
    case.rebase("--continue", "--auto-drop")
    assert [entry.line for entry in case.fork.series(NEW).entries] == ["0001-hook.patch"]
    assert case.result(PATH) == edit(new, HOOK)


def test_only_its_test_is_not_upstream(moving):
    changes = {PATH: edit(ENGINE, HOOK), "tests/test_hook.py": "def test_hook():\n    pass\n"}
    trial = moving({PATH: ENGINE}, {PATH: edit(ENGINE, HOOK)}, ("hook", changes)).trial()
    assert trial.state is State.UPSTREAMED
    assert "tests/test_hook.py" in trial.reason


@pytest.mark.parametrize("word", ["nothing", "--drop", "--auto-drop", "--continue --drop"])
def test_dropped_only_with_the_maintainers_word(moving, word):
    other = edit(ENGINE, ("        self.size = 0\n", "        self.size = -1\n"))
    case = moving(
        {PATH: ENGINE, OTHER: ENGINE}, {PATH: edit(ENGINE, HOOK), OTHER: ENGINE},
        ("hook", {PATH: edit(ENGINE, HOOK)}), ("other", {OTHER: other}),
    )  # fmt: skip
    before = case.patches()
    if word in ("nothing", "--continue --drop"):
        said = case.begin(code=30).stderr
        assert "upstream has every hunk" in said
        assert "--continue --drop 0001" in said
        assert case.patches() == before
        if word == "nothing":
            case.rebase("--continue", code=31)
            assert case.patches() == before
            return
        case.rebase("--continue", "--drop", "1")
    else:
        case.begin(*(["--drop", "0001"] if word == "--drop" else [word]))
    assert [entry.line for entry in case.fork.series(NEW).entries] == ["0002-other.patch"]
    assert "| 0001-hook.patch | dropped |" in case.report
    assert case.result(OTHER) == other
    assert [e.line for e in case.fork.series(OLD).entries] == list(case.data)
