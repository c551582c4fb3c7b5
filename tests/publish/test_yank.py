"""Yanking: real installers leave the version alone, unless it is pinned."""

from __future__ import annotations

import json

import pytest

from builder.alias import write_alias
from builder.index import list_wheels
from tests.index.checking import Links

from .release import ARM, VERSION, X86

NEXT = "0.20.2+glm5.2"


@pytest.fixture
def index(tmp_path):
    return tmp_path / "index"


@pytest.fixture
def released(release, tool, index):
    def run(*wheels):
        for wheel in wheels:
            tool.run("publish", wheel, "--report", release.report(wheel), "--index", index)

    return run


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_yank(release, released, tool, index, environment, installer):
    released(release.wheel(), release.wheel(NEXT))
    url = (index / "simple").as_uri()
    done = tool.run("yank", NEXT, "--index", index, "--reason", "wrong at top-k > 2048")
    assert "yanked: wrong at" in done.output
    environment.install_with(installer, url, "vllm-glm5")
    assert environment.version() == VERSION
    environment.install_with(installer, url, f"vllm-glm5=={NEXT}")
    assert environment.version() == NEXT
    environment.install_with(installer, url, f"vllm-glm5=={VERSION}")
    tool.run("yank", NEXT, "--index", index, "--undo")
    environment.install_with(installer, url, "--upgrade", "vllm-glm5")
    assert environment.version() == NEXT


def test_the_pages_say_why(release, released, tool, index):
    wheel = release.wheel()
    released(wheel)
    tool.run("yank", wheel.name, "--index", index, "--reason", 'wrong at "top-k" > 2048')
    folder = index / "simple" / "vllm-glm5"
    (link,) = Links((folder / "index.html").read_text()).found
    (file,) = json.loads((folder / "index.v1_json").read_text())["files"]
    assert link["data-yanked"] == file["yanked"] == 'wrong at "top-k" > 2048'
    # It outlasts what others do to the same page.
    released(release.wheel(NEXT), wheel)
    assert [w.yanked is None for w in list_wheels(index, "stable")] == [False, True]


def test_the_alias_is_yanked_with_the_last_of_its_wheels(release, released, tool, index):
    wheels = [release.wheel(tag=tag) for tag in (X86, ARM)]
    write_alias(VERSION, wheels[0].parent)
    released(*wheels)

    def yanked():
        return {w.path.name for w in list_wheels(index, "stable") if w.yanked is not None}

    tool.run("yank", wheels[0].name, "--index", index, "--reason", "wrong")
    assert yanked() == {wheels[0].name}
    tool.run("yank", wheels[1].name, "--index", index, "--reason", "wrong")
    assert len(yanked()) == 3
    tool.run("yank", wheels[1].name, "--index", index, "--undo")
    assert yanked() == {wheels[0].name}


def test_the_alias_of_a_wheel_that_comes_after_a_yank(release, released, tool, index):
    """What is wrong with one machine's wheel is not always wrong with the other's."""
    first, second = (release.wheel(tag=tag) for tag in (X86, ARM))
    alias = write_alias(VERSION, first.parent)
    released(first)

    def yanked():
        return {w.path.name for w in list_wheels(index, "stable") if w.yanked is not None}

    tool.run("yank", VERSION, "--index", index, "--reason", "wrong")
    released(first)  # nothing new: nothing is offered again
    assert yanked() == {alias.name, first.name}
    released(second)
    assert yanked() == {first.name}
    released(first, second)
    assert yanked() == {first.name}


def test_a_reason_in_another_encoding_stops_nobody(release, released, tool, index):
    """What a Latin-1 terminal sends as a letter is none in UTF-8."""
    released(release.wheel())
    done = tool.run("yank", VERSION, "--index", index, "--reason", "caf\udce9")
    assert "yanked: caf?" in done.output
    (wheel,) = list_wheels(index, "stable")
    assert wheel.yanked == "caf?"
    released(release.wheel(NEXT))  # the next publisher has nothing to finish first
    done = tool.run("yank", VERSION, "--index", index, "--reason", "café")
    assert list_wheels(index, "stable")[0].yanked == "café"


def test_yank_needs_a_reason_and_a_wheel(release, released, tool, index):
    released(release.wheel())
    tool.run("yank", VERSION, "--index", index, code=2)
    tool.run("yank", VERSION, "--index", index, "--reason", " ", code=2)
    refused = tool.run("yank", "9.9", "--index", index, "--reason", "x", code=5)
    assert f"it has  {VERSION}" in refused.error
    assert "another channel" not in refused.error  # no other one has anything


@pytest.mark.parametrize("command", ["yank", "promote"])
def test_who_names_the_wrong_channel_is_told_the_right_one(release, tool, index, command):
    tool.run("publish", release.wheel(), "--index", index, "--channel", "staging")
    wrong = {
        "yank": ["--reason", "x"],  # of stable, which has nothing yet
        "promote": ["--from", "stable-sm120", "--to", "stable"],
    }[command]
    said = tool.run(command, VERSION, "--index", index, *wrong, code=5).error
    assert f"staging has  {VERSION}" in said
    assert "or name another channel" in said


@pytest.mark.parametrize("command", ["yank", "promote"])
def test_a_folder_that_is_no_index_is_said_to_be_none(tool, tmp_path, command):
    arguments = {"yank": ["--reason", "x"], "promote": ["--from", "staging", "--to", "stable"]}
    said = tool.run(command, VERSION, "--index", tmp_path / "indx", *arguments[command], code=5)
    assert "no directory index there" in said.error
    assert not (tmp_path / "indx").exists()
