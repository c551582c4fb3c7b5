"""The directory index: what reaches its stable channel, and by which commands nothing does."""

from __future__ import annotations

import hashlib
import json

import pytest

from builder.alias import write_alias
from builder.gpu_report import Outcome
from builder.index import channels, list_wheels
from tests.gate.reports import RTX, TESTS, edited
from tests.index.checking import listed

from .release import ARM, FAILING, VERSION, X86, sha256


@pytest.fixture
def index(tmp_path):
    return tmp_path / "index"


def names(index, channel="stable"):
    return [wheel.path.name for wheel in list_wheels(index, channel)]


def test_a_tested_wheel_is_published_with_what_belongs_to_it(release, tool, index, environment):
    wheel = release.wheel()
    report = release.report(wheel)
    done = tool.json("publish", wheel, "--report", report, "--index", index)
    assert done["files"] == [{"name": wheel.name, "sha256": sha256(wheel), "already_there": False}]
    assert (done["channel"], done["kind"], done["notes"]) == ("stable", "directory", [])
    folder = index / "simple" / "vllm-glm5"
    beside = {
        "gpu-report.json": report,
        "gpu-report.json.sig": report.with_name(f"{report.name}.sig"),
        "provenance.json": wheel.with_name(f"{wheel.name}.provenance.json"),
    }
    for end, source in beside.items():
        assert (folder / f"{wheel.name}.{end}").read_bytes() == source.read_bytes()
    assert listed(index / "simple") == {wheel.name}
    environment.install_with("pip", (index / "simple").as_uri(), "vllm-glm5")
    assert environment.version() == VERSION


def test_the_same_again_is_no_change(release, tool, index):
    wheel = release.wheel()
    arguments = ("publish", wheel, "--report", release.report(wheel), "--index", index.as_uri())
    tool.run(*arguments)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in index.rglob("*") if p.is_file()}
    assert tool.json(*arguments)["files"][0]["already_there"]
    before.pop(index / ".publish.lock", None)
    assert all((p.stat().st_mtime_ns, p.read_bytes()) == was for p, was in before.items())


def test_other_bytes_are_refused(release, tool, index):
    wheel = release.wheel()
    tool.run("publish", wheel, "--report", release.report(wheel), "--index", index)
    other = release.wheel(folder="other", files={"vllm/__init__.py": "changed"})
    report = release.report(other)
    refused = tool.run("publish", other, "--report", report, "--index", index, code=17)
    assert sha256(other) in refused.error
    assert [w.sha256 for w in list_wheels(index, "stable")] == [sha256(wheel)]


def refusals(release, wheel):
    """Reports that let nothing in, and the exit code that each is refused with."""
    failing = release.report(wheel, tests=FAILING, name="failing.json")
    made_up = release.report(wheel, tests=FAILING, name="edited.json")
    edited(made_up, lambda d: d["predicate"]["vllm-glm5"]["tests"][0].update(outcome="passed"))
    other = release.wheel("0.20.2+glm5.9")
    return {
        "none": ([], 23),
        "failing": (["--report", failing], 23),
        "edited": (["--report", made_up], 24),
        "unsigned": (["--report", release.report(wheel, sign=False, name="unsigned.json")], 24),
        "about another wheel": (["--report", release.report(other)], 23),
        "absent": (["--report", wheel.with_name("no.json")], 23),
        "two that do not": (["--report", failing, "--report", made_up], 23),
    }


def test_nothing_untested_reaches_stable_by_any_command(release, tool, index):
    wheel = release.wheel()
    reports = refusals(release, wheel)
    tool.run("publish", wheel, "--index", index, "--channel", "staging")
    for why, (options, code) in reports.items():
        tool.run("publish", wheel, *options, "--index", index, code=code)
        tool.run("promote", VERSION, *options, "--index", index, code=code)
        assert channels(index) == ("staging",), why
    # Neither by another name for the channel, nor as one that asks for nothing.
    for name, code in (("stable-sm120", 23), ("simple", 25), ("test", 25), ("../index/simple", 25)):
        tool.run("publish", wheel, "--index", index, "--channel", name, code=code)
        tool.run("promote", VERSION, "--index", index, "--to", name, code=code)
    assert channels(index) == ("staging",)
    # Nor by a later, rightful publication of something else.
    good = release.wheel("0.20.2+glm5.2")
    tool.run("publish", good, "--report", release.report(good), "--index", index)
    assert names(index) == [good.name]


def test_a_card_that_the_channel_does_not_take(release, tool, index):
    wheel = release.wheel()
    arguments = ("publish", wheel, "--index", index, "--channel", "stable-sm120", "--report")
    refused = tool.run(*arguments, release.report(wheel), code=23)
    assert "9.0" in refused.error
    both = tuple(test for test in TESTS if test.outcome is Outcome.PASSED)
    tool.run(*arguments, release.report(wheel, tests=both, gpus=(RTX,)))
    assert names(index, "stable-sm120") == [wheel.name]


@pytest.mark.parametrize(
    "location", ["", " ", "htps://wheels.invalid/x", "ftp://wheels.invalid/x", "https:///x",
                 "file://wheels.invalid/x", "htps://me:s3cret@wheels.invalid/x", "http:x",
                 "http://[::1/"]
)  # fmt: skip
def test_an_index_that_is_none(release, tool, tmp_path, monkeypatch, location):
    """In CI the variable may be missing: what is published into the work folder is nowhere."""
    wheel = release.wheel()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    options = ("--report", release.report(wheel), "--index", location)
    for command in (("publish", wheel), ("promote", VERSION)):
        refused = tool.run(*command, *options, code=41)
        assert "neither a folder nor the URL" in refused.error
        assert "s3cret" not in refused.error
    tool.run("yank", VERSION, "--reason", "x", "--index", location, code=41)
    tool.run("--tag", "v0.20.2", "--index", "https://wheels.invalid/x", code=2)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("channel", ["../x", "simple", "A B", ""])
def test_a_channel_that_is_none(release, tool, index, channel):
    wheel = release.wheel()
    report = release.report(wheel)
    tool.run("publish", wheel, "--report", report, "--index", index)
    promote = ("promote", VERSION, "--report", report, "--index", index)
    for command in ((*promote, "--from", channel), (*promote, "--from", "stable", "--to", channel),
                    ("yank", VERSION, "--reason", "x", "--channel", channel, "--index", index),
                    ("publish", wheel, "--report", report, "--channel", channel, "--index", index)):  # fmt: skip
        if command[0] == "publish" and not channel:
            continue  # as without the option
        tool.run(*command, code=25)
    assert channels(index) == ("stable",)


def test_the_url_of_a_folder(release, tool, index):
    wheel = release.wheel()
    tool.run("publish", wheel, "--report", release.report(wheel), "--index", index.as_uri())
    assert names(index) == [wheel.name]


def test_a_pass_does_not_outweigh_a_failure(release, tool, index):
    wheel = release.wheel()
    passing = release.report(wheel)
    failing = release.report(wheel, tests=FAILING, name="failing.json", sign=False)
    for given in ((passing, failing), (failing, passing)):
        options = [word for report in given for word in ("--report", report)]
        refused = tool.run("publish", wheel, *options, "--index", index, code=23)
        assert "test_a.py::test_one" in refused.error
    assert names(index) == []
    # Control: failures of another wheel, such as the other machine's, are that one's.
    other = release.wheel(folder="other", files={"vllm/__init__.py": "other"})
    failing = release.report(other, tests=FAILING)
    tool.run("publish", wheel, "--report", failing, "--report", passing, "--index", index)
    assert names(index) == [wheel.name]


def test_a_tested_wheel_under_another_machines_name(release, tool, index):
    """The same bytes: pip on aarch64 would take what was built for, and tested on, x86_64."""
    wheel = release.wheel(tag=X86)
    report = release.report(wheel)
    renamed = wheel.rename(wheel.with_name(wheel.name.replace("x86_64", "aarch64")))
    refused = tool.run("publish", renamed, "--report", report, "--index", index, code=23)
    assert "under another file name" in refused.error
    tool.run("publish", renamed, "--index", index, "--channel", "staging")
    tool.run("promote", VERSION, "--report", report, "--index", index, code=23)
    assert channels(index) == ("staging",)


def test_the_wheel_that_is_copied_is_the_one_that_was_tested(release, index, monkeypatch):
    """Somebody exchanges the file after the gate has read it."""
    from datetime import UTC, datetime

    from builder import publish
    from builder.errors import AuditError

    wheel = release.wheel()
    report = release.report(wheel)
    approve = publish.approve

    def exchanged(*arguments):
        verdict = approve(*arguments)
        release.wheel(files={"vllm/__init__.py": "untested"})
        wheel.with_name(f"{wheel.name}.provenance.json").unlink()
        return verdict

    monkeypatch.setattr(publish, "approve", exchanged)
    request = publish.Request(wheel, str(index), (report,))
    with pytest.raises(AuditError, match="changed while"):
        publish.publish(request, release.project, datetime.now(UTC))
    assert names(index) == []
    assert not list(index.rglob("*.whl"))


def test_promote(release, tool, index, environment):
    wheel = release.wheel()
    tool.run("publish", wheel, "--index", index, "--channel", "staging")
    done = tool.json("promote", VERSION, "--report", release.report(wheel), "--index", index)
    assert done["files"] == [{"name": wheel.name, "sha256": sha256(wheel), "already_there": False}]
    assert names(index) == names(index, "staging") == [wheel.name]
    beside = index / "simple" / "vllm-glm5" / f"{wheel.name}.provenance.json"
    assert json.loads(beside.read_text())["subject"][0]["digest"]["sha256"] == sha256(wheel)
    environment.install_with("uv", (index / "simple").as_uri(), "vllm-glm5")
    assert environment.version() == VERSION


def test_promote_takes_all_machines_or_none(release, tool, index):
    wheels = [release.wheel(tag=tag) for tag in (X86, ARM)]
    for wheel in wheels:
        tool.run("publish", wheel, "--index", index, "--channel", "staging")
    reports = [release.report(wheel) for wheel in wheels]
    tool.run("promote", VERSION, "--report", reports[0], "--index", index, code=23)
    assert names(index) == []
    tool.run("promote", wheels[0].name, "--report", reports[0], "--index", index)
    assert names(index) == [wheels[0].name]
    both = [option for report in reports for option in ("--report", report)]
    done = tool.json("promote", VERSION, *both, "--index", index)
    assert {f["name"]: f["already_there"] for f in done["files"]} == {
        wheels[0].name: True,
        wheels[1].name: False,
    }


def test_promote_says_what_there_is(release, tool, index):
    wheel = release.wheel()
    tool.run("publish", wheel, "--index", index, "--channel", "staging")
    report = release.report(wheel)
    missing = tool.run("promote", "9.9", "--report", report, "--index", index, code=5)
    assert VERSION in missing.error


def test_the_alias_goes_with_its_wheel(release, tool, index, environment):
    wheel = release.wheel()
    alias = write_alias(VERSION, wheel.parent)
    done = tool.json("publish", wheel, "--index", index, "--channel", "staging")
    assert [f["name"] for f in done["files"]] == [alias.name, wheel.name]
    report = release.report(wheel)
    done = tool.json("promote", VERSION, "--index", index, "--report", report)
    assert [f["sha256"] for f in done["files"]] == [sha256(alias), sha256(wheel)]
    environment.install_with("pip", (index / "simple").as_uri(), "vllm")
    assert environment.version() == environment.version("vllm") == VERSION


def test_an_alias_that_carries_something_is_refused(release, tool, index):
    """No report is about it: only the one file that this tool writes goes along."""
    from tests.index.wheels import write_wheel

    wheel = release.wheel()
    write_wheel(wheel.parent, VERSION, {"sitecustomize.py": ""}, name="vllm")
    report = release.report(wheel)
    tool.run("publish", wheel, "--report", report, "--index", index, code=16)
    assert channels(index) == ()


def test_both_or_none(release, tool, index):
    """The alias is refused: the wheel is not there either."""
    other = release.wheel(name="vllm", files={"x.py": ""}, folder="other")
    tool.run("publish", other, "--index", index, "--channel", "staging")
    wheel = release.wheel()
    write_alias(VERSION, wheel.parent)
    tool.run("publish", wheel, "--index", index, "--channel", "staging", code=17)
    assert names(index, "staging") == [other.name]
    assert not list(index.rglob("vllm_glm5-*"))


def test_provenance_of_another_wheel_is_refused(release, tool, index):
    wheel = release.wheel()
    digest = {"sha256": hashlib.sha256().hexdigest()}
    statement = wheel.with_name(f"{wheel.name}.provenance.json")
    statement.write_text(json.dumps({"subject": [{"name": wheel.name, "digest": digest}]}))
    report = release.report(wheel)
    tool.run("publish", wheel, "--report", report, "--index", index, code=16)
    statement.unlink()
    done = tool.json("publish", wheel, "--report", report, "--index", index)
    assert "provenance" in done["notes"][0]
