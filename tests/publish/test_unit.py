"""A wheel and the alias that it requires are one unit: in each kind of index, and after any kill."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess

import pytest

from builder import index_journal
from builder.alias import alias_name, write_alias
from builder.index import Entry, list_wheels, publish, publish_together, set_yanked
from tests.index.checking import listed
from tests.index.wheels import write_wheel

from . import servers
from .conftest import as_user
from .forking import Forks
from .release import ARM, VERSION, X86, sha256

NEXT = "0.20.2+glm5.2"
NOISE = random.Random(8).randbytes(8 << 20)


def requiring(release, version=VERSION, **options):
    """Return a wheel that requires its alias; none lies beside it."""
    return release.wheel(version, requires=[f"vllm=={version}"], **options)


def names(index, channel="stable"):
    return {wheel.path.name for wheel in list_wheels(index, channel)}


@pytest.fixture
def index(tmp_path):
    return tmp_path / "index"


@pytest.fixture
def alias_bytes(tmp_path):
    (tmp_path / "expected").mkdir()
    return sha256(write_alias(VERSION, tmp_path / "expected"))


def test_the_alias_is_made_where_nobody_kept_it(release, tool, index, alias_bytes):
    """CI's jobs hand wheels on, and somebody may hand on the wheel alone."""
    wheel = requiring(release)
    report = release.report(wheel)
    done = tool.json("publish", wheel, "--report", report, "--index", index)
    assert [file["name"] for file in done["files"]] == [alias_name(VERSION), wheel.name]
    assert done["files"][0]["sha256"] == alias_bytes
    assert listed(index / "simple") == {alias_name(VERSION), wheel.name}
    assert not wheel.with_name(alias_name(VERSION)).exists()
    again = tool.json("publish", wheel, "--report", report, "--index", index)
    assert all(file["already_there"] for file in again["files"])


def test_a_wheel_without_the_requirement_gets_none(release, tool, index):
    """The control of the test above."""
    wheel = release.wheel()
    tool.run("publish", wheel, "--report", release.report(wheel), "--index", index)
    assert names(index) == {wheel.name}


@pytest.mark.parametrize("kind", ["pypiserver", "devpi"])
def test_on_servers(request, release, tool, kind, alias_bytes):
    if kind == "pypiserver":
        url, who = request.getfixturevalue("pypiserver"), as_user()
    else:
        devpi, team = request.getfixturevalue("devpi"), request.getfixturevalue("team")
        url, who = f"{devpi.url}{team[0]}/stable/", as_user(*team)
    wheel = requiring(release)
    done = tool.json("publish", wheel, "--report", release.report(wheel), "--index", url, **who)
    assert [(f["name"], f["sha256"]) for f in done["files"]] == [
        (alias_name(VERSION), alias_bytes),
        (wheel.name, sha256(wheel)),
    ]
    assert all(f"vllm=={VERSION}" in line for line in done["install"])


def test_promotion_of_both_machines(release, tool, index):
    """One alias for both; where staging has lost it, it is made again."""
    wheels = [requiring(release, tag=tag) for tag in (X86, ARM)]
    for wheel in wheels:
        tool.run("publish", wheel, "--index", index, "--channel", "staging")
    shutil.rmtree(index / "staging" / "simple" / "vllm")
    reports = [option for w in wheels for option in ("--report", release.report(w))]
    done = tool.json("promote", VERSION, *reports, "--index", index)
    assert [f["name"] for f in done["files"]] == [
        alias_name(VERSION), *sorted(w.name for w in wheels),
    ]  # fmt: skip
    assert listed(index / "simple") == {alias_name(VERSION), *(w.name for w in wheels)}
    assert all(f"vllm=={VERSION}" in line for line in done["install"])


def test_devpi_refuses_to_promote_half_of_it(release, tool, devpi, team):
    """What others uploaded by hand: the wheel alone."""
    wheel = requiring(release)
    staging = f"{devpi.url}{team[0]}/staging/"
    subprocess.run(
        [servers.TOOLS / "twine", "upload", "--non-interactive", "--disable-progress-bar",
         "--repository-url", staging, "-u", team[0], "-p", team[1], wheel],
        check=True, capture_output=True,
    )  # fmt: skip
    promote = ("promote", VERSION, "--index", staging, "--report", release.report(wheel))
    who = as_user(*team)
    refused = tool.run(*promote, code=5, **who)
    assert "requires its alias" in refused.error
    assert "publish" in refused.error
    tool.run("publish", wheel, "--index", staging, **who)
    done = tool.json(*promote, **who)
    assert {f["name"] for f in done["files"]} == {alias_name(VERSION), wheel.name}


def test_a_yank_takes_both(release, tool, index):
    wheel = requiring(release)
    tool.run("publish", wheel, "--report", release.report(wheel), "--index", index)
    tool.run("yank", VERSION, "--index", index, "--reason", "wrong")
    assert {w.yanked for w in list_wheels(index, "stable")} == {"wrong"}


# Killed publishers.


def both_or_neither(index, channel, version=NEXT):
    """What a page lists is whole; a listed wheel has its alias; return if both are listed."""
    folder = index / ("simple" if channel == "stable" else f"{channel}/simple")
    found = {name for name in listed(folder) if version in name}
    wheels = {name for name in found if name.startswith("vllm_glm5")}
    assert not wheels or alias_name(version) in found, found
    return bool(wheels)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ["publish", "promote"])
def test_killed_at_any_moment(release, tool, index, command):
    """Thirty deaths. At no moment a wheel is listed without its alias; the next publisher, of
    something else, leaves both or neither; the same command again ends as if nothing had been."""
    first, other = requiring(release), release.wheel("0.20.2+glm5.9")
    wheel = requiring(release, NEXT, files={"vllm/__init__.py": "", "vllm/x.so": NOISE})
    report = release.report(wheel)
    tool.run("publish", first, "--report", release.report(first), "--index", index)
    tool.run("publish", other, "--index", index, "--channel", "staging")
    if command == "promote":
        tool.run("publish", wheel, "--index", index, "--channel", "staging")
    run = (command, NEXT if command == "promote" else wheel, "--report", report, "--index", index)
    somebody_else = (
        "promote",
        "0.20.2+glm5.9",
        "--report",
        release.report(other),
        "--index",
        index,
    )
    kept = index.with_name("before")
    shutil.copytree(index, kept)
    clock = random.Random(9)
    deaths, cut, outcomes = 0, 0, set()
    with Forks(tool) as forks:
        span = forks.span(run)
        for round_ in range(30):
            shutil.rmtree(index)
            shutil.copytree(kept, index)
            # By the clock, most die while the signature is verified: let others get further.
            journal = index / ".publish.json"
            when, after = (journal, clock.uniform(0, 0.1)) if round_ % 3 else (None, None)
            after = clock.uniform(0, span.seconds) if after is None else after
            ((code, text),) = forks.run(run, kill_after=after, kill_when=when)
            assert code in {0, -signal.SIGKILL}, text
            deaths += code == -signal.SIGKILL
            cut += journal.exists()
            seen = both_or_neither(index, "stable")
            forks.finish(somebody_else)
            after_all = both_or_neither(index, "stable")
            assert after_all or not seen
            alias_listed = alias_name(NEXT) in names(index)
            assert alias_listed == after_all
            assert not journal.exists()
            outcomes.add(after_all)
            span.of(lambda: forks.finish(run))
            assert both_or_neither(index, "stable")
            assert not list(index.rglob(".vllm-glm5-tmp-*"))
    assert deaths >= 15
    assert cut >= 5, "some died between the first and the last of its steps"
    assert outcomes == {True, False}


class Died(BaseException):
    """In place of the SIGKILL: nothing that runs at an exception runs after one."""


STEPS = ("builder.atomic.replacing", "builder.index_journal.write_pages", "pathlib.Path.unlink")


def die_at(monkeypatch, number):
    """Die before, or behind, the ``number``-th step that changes something on the disk."""
    import contextlib
    import pathlib

    from builder import atomic

    moments = iter(range(1000))

    def moment():
        if next(moments) >= number:
            raise Died

    replacing, write_pages, unlink = (
        atomic.replacing, index_journal.write_pages, pathlib.Path.unlink
    )  # fmt: skip

    @contextlib.contextmanager
    def dying_replacing(path, *arguments):
        moment()
        with replacing(path, *arguments) as file:
            yield file
        moment()

    def dying_pages(folder):
        moment()
        write_pages(folder)
        moment()

    def dying_unlink(path, *arguments, **options):
        moment()
        unlink(path, *arguments, **options)
        moment()

    monkeypatch.setattr(atomic, "replacing", dying_replacing)
    monkeypatch.setattr(index_journal, "write_pages", dying_pages)
    monkeypatch.setattr(pathlib.Path, "unlink", dying_unlink)


@pytest.mark.parametrize("what", ["publish", "yank"])
def test_killed_beside_each_step(tmp_path, what, monkeypatch):
    """No moment is missed: before and after everything that changes the index."""
    alias = write_alias(NEXT, tmp_path)
    wheel = write_wheel(tmp_path, NEXT, requires=[f"vllm=={NEXT}"])
    other = write_wheel(tmp_path, "0.20.2+glm5.9")
    deaths, outcomes = 0, set()
    for number in range(200):
        index = tmp_path / f"index{number}"
        unit = (Entry(alias), Entry(wheel, {f"{wheel.name}.provenance.json": b"{}"}))
        if what == "yank":
            publish_together(index, unit, channel="staging")
        died = False
        with monkeypatch.context() as patch:
            die_at(patch, number)
            try:
                if what == "publish":
                    publish_together(index, unit, channel="staging")
                else:
                    set_yanked(index, "staging", list_wheels(index, "staging"), "wrong")
            except Died:
                died = True
        if not died:
            break
        deaths += 1
        if what == "publish":
            both_or_neither(index, "staging")
        publish(index, other)
        found = {w for w in list_wheels(index, "staging") if w.version == NEXT}
        outcomes.add((len(found), len({w.yanked for w in found})))
        assert not (index / ".publish.json").exists()
        publish_together(index, unit, channel="staging")
        assert both_or_neither(index, "staging")
    assert deaths > 8
    assert not died
    assert outcomes == ({(0, 0), (2, 1)} if what == "publish" else {(2, 1)})


def test_a_journal_that_is_none_is_named(tmp_path, wheel_of_tests):
    index = tmp_path / "index"
    index.mkdir()
    (index / ".publish.json").write_text("[]")
    from builder.errors import BuilderError

    with pytest.raises(BuilderError, match="not what a publisher writes down"):
        publish(index, wheel_of_tests)


@pytest.fixture
def wheel_of_tests(tmp_path):
    return write_wheel(tmp_path, VERSION)
