"""A real devpi server: stages as channels, rights, and the push between them."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tarfile
from collections import Counter

import pytest
import requests

from builder import remote_index
from builder.alias import write_alias
from builder.connection import Connection

from . import servers
from .conftest import as_user
from .release import ARM, FAILING, VERSION, X86, sha256


@pytest.fixture
def staging(devpi, team):
    return f"{devpi.url}{team[0]}/staging/"


@pytest.fixture
def stable(devpi, team):
    return f"{devpi.url}{team[0]}/stable/"


def listed(index, project="vllm-glm5"):
    answer = requests.get(
        f"{index}+simple/{project}/", timeout=30,
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )  # fmt: skip
    files = answer.json()["files"] if answer.ok else []
    return {file["filename"]: file["hashes"]["sha256"] for file in files}


def test_publish(release, tool, stable, team, environment):
    wheel = release.wheel()
    publish = ("publish", wheel, "--report", release.report(wheel), "--index", stable)
    done = tool.json(*publish, "--require-metadata", **as_user(*team))
    assert (done["kind"], done["channel"]) == ("devpi", "stable")
    assert listed(stable) == {wheel.name: sha256(wheel)}
    assert "PEP 740" in done["notes"][0]
    assert not any("PEP 658" in note or "requires-python" in note for note in done["notes"])
    for installer, force in (("pip", "--force-reinstall"), ("uv", "--reinstall")):
        environment.install_with(installer, f"{stable}+simple/", force, "vllm-glm5")
        assert environment.version() == VERSION
    assert tool.json(*publish, **as_user(*team))["files"][0]["already_there"]


def test_a_stage_is_the_channel_of_its_name(release, tool, staging, stable, team, devpi):
    wheel = release.wheel()
    assert tool.json("publish", wheel, "--index", staging, **as_user(*team))["channel"] == "staging"
    tool.run("publish", wheel, "--index", stable, code=23, **as_user(*team))
    for index, channel in ((stable, "staging"), (staging, "stable"), (stable, "stable-sm120")):
        arguments = ("publish", wheel, "--index", index, "--channel", channel)
        tool.run(*arguments, code=41, **as_user(*team))
    sm120 = devpi.index(team, "stable-sm120")
    report = release.report(wheel)  # from another card
    tool.run("publish", wheel, "--report", report, "--index", sm120, code=23, **as_user(*team))
    # A name that says nothing is released to users like stable.
    main = devpi.index(team, "main")
    tool.run("publish", wheel, "--index", main, code=23, **as_user(*team))
    done = tool.json("publish", wheel, "--report", report, "--index", main, **as_user(*team))
    assert done["channel"] == "stable"
    assert listed(sm120) == listed(stable) == {}


def test_other_bytes_are_refused(release, tool, staging, team):
    wheel = release.wheel()
    tool.run("publish", wheel, "--index", staging, **as_user(*team))
    other = release.wheel(folder="other", files={"vllm/__init__.py": "changed"})
    tool.run("publish", other, "--index", staging, code=17, **as_user(*team))
    assert listed(staging) == {wheel.name: sha256(wheel)}


def test_who_may_not(release, tool, staging, team, devpi):
    wheel = release.wheel()
    publish = ("publish", wheel, "--index", staging)
    for who in ({}, as_user(team[0], "wr0ng-secret"), as_user(*devpi.reader)):
        refused = tool.run(*publish, code=40, **who)
        assert "asked as" in refused.error
        assert "wr0ng-secret" not in refused.error
    assert listed(staging) == {}
    tool.run("publish", wheel, "--index", f"{devpi.url}{team[0]}/absent/", code=5, **as_user(*team))
    tool.run("publish", wheel, "--index", devpi.url, code=5, **as_user(*team))


def test_promote_is_a_push(release, tool, staging, stable, team, environment):
    wheel = release.wheel()
    alias = write_alias(VERSION, wheel.parent)
    tool.run("publish", wheel, "--index", staging, **as_user(*team))
    failing = release.report(wheel, tests=FAILING, name="failing.json")
    promote = ("promote", VERSION, "--index", staging, "--to", "stable")
    tool.run(*promote, "--report", failing, code=23, **as_user(*team))
    tool.run(*promote, code=23, **as_user(*team))
    assert listed(stable) == listed(stable, "vllm") == {}
    report = release.report(wheel)
    done = tool.json(*promote, "--report", report, **as_user(*team))
    assert [file["name"] for file in done["files"]] == [alias.name, wheel.name]
    assert listed(stable) == {wheel.name: sha256(wheel)}
    assert listed(stable, "vllm") == {alias.name: sha256(alias)}
    environment.install_with("pip", f"{stable}+simple/", "vllm")
    assert environment.version() == environment.version("vllm") == VERSION
    again = tool.json(*promote, "--report", report, **as_user(*team))
    assert all(file["already_there"] for file in again["files"])


def test_promote_asks_no_page_twice_for_one_answer(
    release, tool, staging, stable, team, monkeypatch
):
    """Once what there is to take; and what the target has, before and after."""
    wheel = release.wheel()
    write_alias(VERSION, wheel.parent)
    tool.run("publish", wheel, "--index", staging, **as_user(*team))
    asked, ask = Counter(), Connection.ask

    def counted(self, method, url, **options):
        asked[url] += 1
        return ask(self, method, url, **options)

    monkeypatch.setattr(Connection, "ask", counted)
    promote = ("promote", VERSION, "--index", staging, "--report", release.report(wheel))
    tool.run(*promote, **as_user(*team))
    pages = {url: times for url, times in asked.items() if "+simple" in url}
    assert pages == {
        f"{index}+simple/{project}/": times
        for index, times in ((staging, 1), (stable, 2))
        for project in ("vllm", "vllm-glm5")
    }
    assert listed(stable) == {wheel.name: sha256(wheel)}


def test_promote_takes_all_files_of_a_version(release, tool, staging, stable, team):
    """devpi's push does: so each of them needs its report."""
    wheels = [release.wheel(tag=tag) for tag in (X86, ARM)]
    reports = [release.report(wheel) for wheel in wheels]
    tool.run("publish", wheels[0], "--index", staging, **as_user(*team))
    promote = ("promote", VERSION, "--index", staging, "--report", reports[0])
    tool.run(*promote, **as_user(*team))
    tool.run("publish", wheels[1], "--index", staging, **as_user(*team))
    tool.run(*promote, code=23, **as_user(*team))
    by_name = ("promote", wheels[0].name, "--index", staging, "--report", reports[0])
    tool.run(*by_name, code=41, **as_user(*team))
    assert listed(stable) == {wheels[0].name: sha256(wheels[0])}
    done = tool.json(*promote, "--report", reports[1], **as_user(*team))
    assert {f["name"]: f["already_there"] for f in done["files"]} == {
        wheels[0].name: True,
        wheels[1].name: False,
    }
    assert listed(stable) == {wheel.name: sha256(wheel) for wheel in wheels}


def test_promote_to_another_team(release, tool, staging, team, devpi):
    """The right to upload there counts, not the one here."""
    wheel = release.wheel()
    tool.run("publish", wheel, "--index", staging, **as_user(*team))
    other = devpi.user(next(devpi.names))
    target = devpi.index(other, "stable")
    report = release.report(wheel)
    promote = ("promote", VERSION, "--index", staging, "--report", report, "--to")
    tool.run(*promote, f"{other[0]}/stable", code=40, **as_user(*team))
    assert listed(target) == {}
    tool.run(*promote, f"{other[0]}/stable", **as_user(*other))
    assert listed(target) == {wheel.name: sha256(wheel)}
    tool.run(*promote, f"{other[0]}/absent", code=5, **as_user(*other))


def test_a_volatile_index_holds_nothing_released(release, tool, team, devpi, staging):
    wheel = release.wheel()
    report = release.report(wheel)
    volatile = devpi.index(team, "stable2", volatile=True)
    refused = tool.run("publish", wheel, "--report", report, "--index", volatile, "--channel",
                       "stable2", code=41, **as_user(*team))  # fmt: skip
    assert "volatile=False" in refused.error
    tool.run("publish", wheel, "--index", staging, **as_user(*team))
    promote = ("promote", VERSION, "--index", staging, "--report", report)
    tool.run(*promote, "--to", "stable2", code=41, **as_user(*team))
    assert listed(volatile) == {}


def test_yank_is_refused(tool, stable):
    refused = tool.run("yank", VERSION, "--index", stable, "--reason", "x", code=41)
    assert "devpi cannot yank" in refused.error


def test_what_a_base_has_does_not_count(release, tool, team, devpi, stable):
    """An index lists what it inherits; only its own files are in the way."""
    wheel = release.wheel()
    report = release.report(wheel)
    tool.run("publish", wheel, "--report", report, "--index", stable, **as_user(*team))
    derived = devpi.index(team, "derived", bases=[f"{team[0]}/stable"])
    assert listed(derived) == {wheel.name: sha256(wheel)}
    done = tool.json("publish", wheel, "--report", report, "--index", derived, **as_user(*team))
    assert not done["files"][0]["already_there"]


def client(devpi, team, tmp_path, line):
    """Run a line for devpi's own client, logged in."""
    state = ["--clientdir", str(tmp_path / "client")]
    login = ["login", team[0], "--password", team[1]]
    for words in (["use", devpi.url], login, [*shlex.split(line)[1:], "-y"]):
        done = subprocess.run(
            [sys.executable, "-m", "devpi", *words, *state], capture_output=True, text=True,
            check=False, env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""},
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def next_line(refused):
    return refused.error.rpartition("next: ")[2].partition(", then")[0].strip()


def upload_sdist(index, who, tmp_path, version=VERSION):
    """Somebody's own upload, of what installers build and run where no wheel fits."""
    name = f"vllm_glm5-{version}"
    core = f"Metadata-Version: 2.1\nName: vllm-glm5\nVersion: {version}\n".encode()
    with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as archive:
        for path, data in (("PKG-INFO", core), ("setup.py", b"print('untested')")):
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    subprocess.run(
        [sys.executable, "-m", "twine", "upload", "--repository-url", index, archive.name],
        check=True, capture_output=True, env={**os.environ, **as_user(*who)},
    )  # fmt: skip


def test_nothing_untested_is_pushed_along(release, tool, staging, stable, team, devpi, tmp_path):
    wheel = release.wheel()
    tool.run("publish", wheel, "--index", staging, **as_user(*team))
    upload_sdist(staging, team, tmp_path)
    promote = ("promote", VERSION, "--index", staging, "--report", release.report(wheel))
    refused = tool.run(*promote, code=41, **as_user(*team))
    assert f"vllm_glm5-{VERSION}.tar.gz" in refused.error
    assert listed(stable) == {}
    client(devpi, team, tmp_path, next_line(refused))
    upload_sdist(staging, team, tmp_path, "0.20.2+glm5.2")  # a push takes one version alone
    tool.run(*promote, **as_user(*team))
    assert listed(stable) == {wheel.name: sha256(wheel)}


def test_what_comes_in_between_is_told(release, tool, staging, stable, team, tmp_path, monkeypatch):
    wheel = release.wheel()
    tool.run("publish", wheel, "--index", staging, **as_user(*team))
    push = remote_index.push

    def quicker(*arguments):
        upload_sdist(staging, team, tmp_path)
        push(*arguments)

    monkeypatch.setattr(remote_index, "push", quicker)
    promote = ("promote", VERSION, "--index", staging, "--report", release.report(wheel))
    failed = tool.run(*promote, code=42, **as_user(*team))
    assert f"vllm_glm5-{VERSION}.tar.gz  which no report is about" in failed.error
    assert f"{wheel.name}  which" not in failed.error


def test_a_stable_index_that_inherits_staging(release, tool, team, devpi, staging, tmp_path):
    """Its users would get all that is staged."""
    wheel = release.wheel()
    tool.run("publish", wheel, "--index", staging, **as_user(*team))
    other = release.wheel("0.20.2+glm5.2")
    publish = ("publish", other, "--report", release.report(other), "--index")
    promote = ("promote", VERSION, "--index", staging, "--report", release.report(wheel))
    devpi.index(team, "between", bases=[f"{team[0]}/staging"])
    main = devpi.index(team, "main", bases=[f"{team[0]}/staging", f"{team[0]}/between"])
    assert listed(main) == {wheel.name: sha256(wheel)}, "the control"
    refused = tool.run(*publish, main, code=41, **as_user(*team))
    assert "inherits" in refused.error
    tool.run(*promote, "--to", "main", code=41, **as_user(*team))
    client(devpi, team, tmp_path, next_line(refused))
    tool.run(*publish, main, code=41, **as_user(*team))  # by way of the one between
    client(devpi, team, tmp_path, f"devpi index {team[0]}/main bases=")
    tool.run(*publish, main, **as_user(*team))
    assert listed(main) == {other.name: sha256(other)}


def test_the_passwords_are_in_no_log(release, tool, team, devpi, stable):
    wheel = release.wheel()
    report = release.report(wheel)
    tool.run("publish", wheel, "--report", report, "--index", stable, **as_user(*team))
    assert servers.PASSWORD not in devpi.log.read_text()
