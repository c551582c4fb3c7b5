"""What a series leans on: found changed from the syntax tree alone, before anything is run."""

from __future__ import annotations

import pytest

from builder import contracts
from builder.contracts import Contract
from builder.errors import ContractError
from tests.rebase.moving import ENGINE, NEW, OLD, edit

PATH, BASE = "vllm/engine.py", "vllm/base.py"
HOOK = ("    engine.open(name)\n", "    engine.open(name)\n    engine.hook(name)\n")
BACKEND = '''\
"""Backends."""

import abc

if True:
    ORDER = ["one", "two"]


class Backend(abc.ABC):
    supports_a: bool = False

    @property
    def name(self) -> str:
        return "x"

    @abc.abstractmethod
    def forward(self, q, *, scale=1.0):
        """Forward."""


def priorities(major):
    if major == 12:
        return ["one"]
    return ["two"]
'''
FILE = f"""\
# Ours.

[[contract]]
patch = 1
path = "{BASE}"
name = "Backend"
why = "our backend is one"

[[contract]]
patch = 1
path = "{BASE}"
name = "priorities"
why = "we stand last"
body = true

[[contract]]
patch = 1
path = "{BASE}"
name = "ORDER"
why = "a list"
"""
CHANGES = {
    "an attribute gained": (("    supports_a: bool = False\n",
                             "    supports_a: bool = False\n    masked_available: bool = False\n"),
                            "+ masked_available: bool = False"),
    "another default": (("supports_a: bool = False", "supports_a: bool = True"),
                        "+ supports_a: bool = True"),
    "another base": (("Backend(abc.ABC)", "Backend(Base, abc.ABC)"), "+ class Backend(Base, abc.ABC)"),
    "an argument gained": (("scale=1.0)", "scale=1.0, lse=None)"),
                           "+ @abc.abstractmethod def forward(self, q, *, scale=1.0, lse=None)"),
    "a decorator lost": (("    @property\n", ""), "+ def name(self) -> str"),
    "a list in a function": (('return ["one"]', 'return ["one", "three"]'),
                             "+     return ['one', 'three']"),
    "a list below an if": (('ORDER = ["one", "two"]', 'ORDER = ["one"]'), "+ ORDER = ['one']"),
    "renamed": (("class Backend", "class NewBackend"), "Backend (patch 0001: our backend is one) is gone"),
}  # fmt: skip


@pytest.fixture
def case(moving):
    def make(new):
        made = moving(
            {PATH: ENGINE, BASE: BACKEND}, {PATH: ENGINE, BASE: new},
            ("hook", {PATH: edit(ENGINE, HOOK)}),
        )  # fmt: skip
        (made.fork.folder(OLD) / contracts.NAME).write_text(FILE)
        made.fork.run("contracts", "--tag", OLD, "--write")
        return made

    return make


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found_with_what_it_is(case, change):
    pair, words = CHANGES[change]
    made = case(edit(BACKEND, pair))
    said = made.fork.run("contracts", "--tag", OLD, "--on", NEW, code=32).stderr
    assert words in said
    assert f"rebase --from {OLD} --onto {NEW}" in said
    assert "--write" not in said  # nothing of the series' own release has changed
    made.fork.run("contracts", "--tag", OLD)  # its own release is as it was


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_rebase_is_advised_with_the_pin_that_it_wants(case, is_pinned):
    made = case(edit(BACKEND, CHANGES["an attribute gained"][0]))
    series = made.fork.series(OLD)
    known = contracts.read_contracts(series)
    broken = contracts.breaches(known, lambda path: made.new[path].encode())
    with pytest.raises(ContractError) as caught:
        contracts.require_kept(broken, (), series, NEW, is_pinned=is_pinned)
    follow = f"python -m builder rebase --from {OLD} --onto {NEW}"
    pin = "" if is_pinned else f"python -m builder pin {NEW} && "
    assert caught.value.next_step.endswith(f": {pin}{follow}")


def test_a_release_that_has_a_series_gets_no_rebase(case):
    """It would be refused: what is there is looked at, and takes patches one by one."""
    made = case(edit(BACKEND, CHANGES["an attribute gained"][0]))
    asked = ("contracts", "--tag", OLD, "--on", NEW)
    assert "rebase" in made.fork.run(*asked, code=32).stderr  # the control: an empty one takes it
    made.begin()
    said = made.fork.run(*asked, code=32).stderr
    assert "rebase" not in said
    assert made.fork.advised(f"python -m builder contracts --tag {NEW};") in said
    assert made.fork.advised(f"python -m builder backport 1 --from {OLD} --to {NEW}") in said
    said = made.fork.run(*asked, "--write", code=2).stderr
    assert "rebase" not in said
    assert f"--tag {NEW} --write" in said.replace("\n", " ")
    # What it says can be done.
    made.begin(code=31)
    made.fork.run("contracts", "--tag", NEW, code=32)
    made.fork.run("backport", "1", "--from", OLD, "--to", NEW)
    made.fork.run("contracts", "--tag", NEW, "--write")
    made.fork.run("contracts", "--tag", NEW)


def test_the_series_own_release_by_name_is_its_own(case):
    made = case(BACKEND)
    made.fork.run("contracts", "--tag", OLD, "--on", OLD, "--write")
    made.fork.run("contracts", "--tag", OLD, "--on", OLD)
    path = made.fork.folder(OLD) / contracts.NAME
    path.write_text(path.read_text().replace("supports_a", "supports_b"))
    said = made.fork.run("contracts", "--tag", OLD, "--on", OLD, code=32).stderr
    assert f"contracts --tag {OLD} --write" in said


def test_another_releases_definitions_are_not_written(case):
    """They would stand beside a series that was made for its own release."""
    made = case(edit(BACKEND, CHANGES["an attribute gained"][0]))
    before = made.patches()
    said = made.fork.run("contracts", "--tag", OLD, "--on", NEW, "--write", code=2).stderr
    assert "rebase --from" in said
    assert made.patches() == before


def test_what_does_not_matter_is_not_found(case):
    quiet = edit(
        BACKEND,
        ('        return "x"\n', '        return "y"\n'),
        ('"""Forward."""', '"""Another text."""\n\n    # a comment'),
        ("import abc\n", "import abc\nimport os\n"),
    )
    said = case(quiet).fork.run("contracts", "--tag", OLD, "--on", NEW).stdout
    assert "3 definitions" in said


def test_the_rebase_says_so_and_the_new_series_keeps_asking(case):
    pair, words = CHANGES["an attribute gained"]
    made = case(edit(BACKEND, pair))
    said = made.begin().stdout
    assert words in said
    assert made.fork.advised(f"python -m builder contracts --tag {NEW}") in said
    assert words in made.report
    assert "Backend changed" in made.fork.run("upstream", "--tag", OLD, "--onto", NEW).stdout
    file = made.fork.folder(NEW) / contracts.NAME
    assert file.read_bytes() == (made.fork.folder(OLD) / contracts.NAME).read_bytes()
    said = made.fork.run("contracts", "--tag", NEW, code=32).stderr
    assert f"contracts --tag {NEW} --write" in said
    made.fork.run("contracts", "--tag", NEW, "--write")
    made.fork.run("contracts", "--tag", NEW)
    assert file.read_text().startswith("# Ours.\n")  # comments stay


def test_the_contracts_of_a_dropped_patch_go_with_it(moving):
    """Whoever accepts what is there now would be told of a definition that nobody leans on."""
    taken = edit(ENGINE, HOOK)
    made = moving(
        {PATH: ENGINE, BASE: BACKEND},
        {PATH: taken, BASE: edit(BACKEND, CHANGES["renamed"][0])},
        ("hook", {PATH: taken}),
        ("common ours", {"vllm/ours.py": "a = 1\n"}),
    )
    of_second = f'\n[[contract]]\npatch = 2\npath = "{PATH}"\nname = "serve"\nwhy = "ours"\n'
    (made.fork.folder(OLD) / contracts.NAME).write_text(FILE + of_second)
    made.fork.run("contracts", "--tag", OLD, "--write")
    said = made.begin("--drop", "1").stdout
    assert "Backend" not in said
    file = made.fork.folder(NEW) / contracts.NAME
    text = file.read_text()
    assert text.startswith("# Ours.\n")
    assert [it.patch for it in contracts.read_contracts(made.fork.series(NEW))] == [2]
    made.fork.run("contracts", "--tag", NEW, "--write")


def test_a_definition_that_is_gone_cannot_be_accepted(case):
    made = case(edit(BACKEND, CHANGES["renamed"][0]))
    made.begin()
    before = made.patches()
    said = made.fork.run("contracts", "--tag", NEW, "--write", code=32).stderr
    assert "Backend" in said
    assert made.patches() == before


@pytest.mark.parametrize("text", ["contract = 1\n", "[[contract]]\npatch = 1\n", "[[contract\n"])
def test_a_file_that_is_none(case, text):
    made = case(BACKEND)
    (made.fork.folder(OLD) / contracts.NAME).write_text(text)
    assert contracts.NAME in made.fork.run("contracts", "--tag", OLD, code=32).stderr


def test_never_written_down():
    empty = Contract(1, BASE, "Backend", "it is new", body=False, holds=())
    (breach,) = contracts.breaches([empty], {BASE: BACKEND.encode()}.get)
    assert breach.lines() == [
        f"{BASE}: Backend (patch 0001: it is new): what it is was never written down"
    ]
