"""`upstream`: what is newer than the newest pin, and how the series fares there, in three forms."""

from __future__ import annotations

import html.parser
import json
import shutil

import pytest

from tests.build.package_server import PackageServer
from tests.rebase.moving import ENGINE, NEW, OLD, edit
from tests.series.fork import write_sdist

PATH = "vllm/engine.py"
TAKEN = ("    engine.open(name)\n", "    engine.open_all(name)\n")
HOOK = ("    engine.open(name)\n", "    engine.open(name)\n    engine.hook(name)\n")
FACTS = {
    "pyproject.toml": "[project]\nname = 'vllm'\nrequires-python = '>=3.10'\n",
    "vllm/_version.py": "__commit_id__ = commit_id = 'g0123456789'\n",
}
WHEEL = "vllm-{}-cp38-abi3-manylinux1_x86_64.whl"


@pytest.fixture
def case(moving):
    text = "<b>a & b</b>"
    return moving(
        {PATH: ENGINE}, {PATH: ENGINE},
        ("hook", {PATH: edit(ENGINE, HOOK, ("    size = 1\n", f"    size = '{text}'\n"))}),
        ("file", {"vllm/new.py": "a = 1\n"}),
    )  # fmt: skip


@pytest.fixture
def server(case, tmp_path):
    """An index with three newer releases: one of them a pre-release, the last one conflicting."""
    files = {}
    for version, text in {
        "1.4.0": ENGINE, "1.10.0": edit(ENGINE, TAKEN, ("    size = 1\n", "    size = 2\n")),
        "1.11.0rc1": ENGINE, "1.0.0": ENGINE,
    }.items():  # fmt: skip
        sdist = tmp_path / f"vllm-{version}.tar.gz"
        write_sdist(sdist, {"vllm/__init__.py": "", PATH: text} | FACTS, version)
        files |= {sdist.name: sdist.read_bytes(), WHEEL.format(version): b"wheel"}
    with PackageServer({"vllm": files}) as server:
        yield server


def test_what_is_newer_and_how_the_series_fares(case, server, tmp_path):
    before = case.patches()
    page = tmp_path / "page.html"
    process = case.fork.run(
        "upstream", "--tag", OLD, "--json", "--html", page, "--markdown", tmp_path / "table.md",
        PIP_INDEX_URL=server.url,
    )  # fmt: skip
    found = json.loads(process.stdout)
    states = {
        release["tag"]: [patch["state"] for patch in release["patches"]]
        for release in found["releases"]
    }
    # newer than the newest pin, by version and not by text; no pre-release
    assert states == {"v1.4.0": ["clean", "clean"], "v1.10.0": ["conflict", "clean"]}
    assert list(states) == ["v1.4.0", "v1.10.0"]
    hook = found["releases"][1]["patches"][0]
    assert hook["upstream"]["extent"] == "none"
    assert "engine.open_all" in hook["files"][0]["conflicts"][0]
    # nothing of the project has changed, and no wheel was fetched
    assert case.patches() == before
    assert not (case.fork.project.pins / "v1.4.0.toml").exists()
    assert server.bytes_sent(WHEEL.format("1.4.0")) == 0
    text = page.read_text()
    assert "<b>a &" not in text  # what patches hold is text, not markup
    assert "&lt;b&gt;a &amp; b" in text
    html.parser.HTMLParser().feed(text)
    assert "http" not in text  # nothing is fetched from elsewhere
    table = (tmp_path / "table.md").read_text()
    assert "| v1.10.0 | conflict | clean |" in table
    command = next(line for line in table.splitlines() if line.startswith("Made by"))
    assert f"python -m builder upstream --tag {OLD} --since {NEW}" in command


def test_a_second_time_without_the_index(case, server):
    case.fork.run("upstream", "--tag", OLD, "--onto", "v1.4.0", PIP_INDEX_URL=server.url)
    said = case.fork.run("upstream", "--tag", OLD, "--onto", "v1.4.0").stdout
    assert said.splitlines()[1].startswith("v1.4.0  clean      clean")
    assert case.fork.run("upstream", "--tag", OLD, code=5).stderr.count("next:") == 1


def test_what_is_yanked_is_none_to_follow(case, server):
    server.yanked = {name for name in server.files["vllm"] if "-1.10.0" in name}
    said = case.fork.run("upstream", "--tag", OLD, "--json", PIP_INDEX_URL=server.url).stdout
    assert [release["tag"] for release in json.loads(said)["releases"]] == ["v1.4.0"]
    assert "yanked" in case.fork.run(
        "upstream", "--tag", OLD, "--onto", "v1.10.0", code=18, PIP_INDEX_URL=server.url
    ).stderr  # fmt: skip


def test_the_next_step_is_for_a_release_without_a_series(case, server):
    """Who has followed the newest one already is not told to do it again."""
    newest = case.fork.folder(OLD).with_name("v1.10.0")

    def last_line():
        said = case.fork.run(
            "upstream", "--tag", OLD, "--since", OLD, PIP_INDEX_URL=server.url
        ).stdout
        return said.splitlines()[-1]

    step = case.fork.advised("next: python -m builder pin ")
    assert last_line().startswith(f"{step}v1.10.0 && ")
    shutil.copytree(case.fork.folder(OLD), newest)
    assert last_line().startswith(f"{step}v1.4.0 && ")
    shutil.copytree(newest, newest.with_name("v1.4.0"))
    assert not last_line().startswith("next:")


def test_one_that_cannot_be_had_keeps_none_back(case, server, tmp_path):
    """On the day of a release its wheels are not there yet; one may be written in a new way."""
    del server.files["vllm"][WHEEL.format("1.4.0")]
    page, table = tmp_path / "page.html", tmp_path / "table.md"
    said = case.fork.run(
        "upstream", "--tag", OLD, "--html", page, "--markdown", table, PIP_INDEX_URL=server.url
    ).stdout
    words = "v1.4.0 was not tried: vllm 1.4.0: the release has 1 sdists and wheels for no machine"
    assert all(words in text for text in (said, page.read_text(), table.read_text()))
    assert "v1.10.0  conflict   clean" in said
    assert "!: it applies" not in said  # no import of it fails
    process = case.fork.run("upstream", "--tag", OLD, "--json", PIP_INDEX_URL=server.url)
    found = json.loads(process.stdout)
    assert [release["tag"] for release in found["releases"]] == ["v1.10.0"]
    assert [(one["tag"], one["exit_code"]) for one in found["untried"]] == [("v1.4.0", 18)]
    # but who asks for that one gets the error, and so does who gets nothing
    for words in (("--onto", "v1.10.0", "--onto", "v1.4.0"), ("--onto", "v1.4.0")):
        case.fork.run("upstream", "--tag", OLD, *words, code=18, PIP_INDEX_URL=server.url)
    del server.files["vllm"][WHEEL.format("1.10.0")]
    shutil.rmtree(case.fork.cache.root / "releases")
    case.fork.run("upstream", "--tag", OLD, code=18, PIP_INDEX_URL=server.url)


def test_since_what_is_no_release(case, server):
    said = case.fork.run("upstream", "--since", "main", code=3, PIP_INDEX_URL=server.url).stderr
    assert "'main' is no release" in said


def test_nothing_is_newer(case, server):
    said = case.fork.run(
        "upstream", "--tag", OLD, "--since", "v1.10.0", PIP_INDEX_URL=server.url
    ).stdout
    # of the series it says no more than that: there are releases between the two
    assert "upstream has no release newer than v1.10.0; " in said
    again = f"upstream --tag {OLD} --since {OLD}"
    assert again in said
    assert "v1.10.0  conflict" in case.fork.run(*again.split(), PIP_INDEX_URL=server.url).stdout


def test_nothing_is_newer_than_the_series_itself(case, server):
    for tag in [name for name in server.files["vllm"] if "1.10.0" in name or "1.4.0" in name]:
        del server.files["vllm"][tag]
    said = case.fork.run("upstream", "--tag", OLD, "--since", OLD, PIP_INDEX_URL=server.url).stdout
    assert said == f"upstream has no release newer than {OLD}\n"
    # an answer that needs no source: nothing is fetched, imported or applied for it
    assert not case.fork.cache.repository.exists()


def test_a_release_that_does_not_exist(case, server):
    assert "9.9.9" in case.fork.run(
        "upstream", "--tag", OLD, "--onto", "v9.9.9", code=5, PIP_INDEX_URL=server.url
    ).stderr  # fmt: skip


def test_a_table_wider_than_the_terminal_comes_in_parts(moving):
    """Eight patches fill 100 columns; each word is in one of the parts, below its number."""
    from builder.trial_report import as_text

    patches = [(f"add {n}", {f"vllm/new{n}.py": f"a = {n}\n"}) for n in range(1, 9)]
    case = moving({PATH: ENGINE}, {PATH: ENGINE}, *patches)
    tried = case.try_on()
    whole, parts = (as_text(OLD, tried, n).split("\n0001-")[0].splitlines() for n in (None, 80))
    assert max(map(len, whole)) > 80, "the control"
    assert max(map(len, parts)) <= 80
    heads = [line.split() for line in parts if line.startswith("   ")]
    assert [number for head in heads for number in head] == [f"000{n}" for n in range(1, 9)]
    assert " ".join(parts).split().count("clean") == 8
    assert [line for line in parts if " s" in line] == [parts[-1]]
