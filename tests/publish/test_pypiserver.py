"""A real pypiserver: uploads, refusals, and what it cannot do."""

from __future__ import annotations

import pytest

from builder.alias import write_alias

from . import servers
from .conftest import as_user
from .release import ARM, VERSION, X86, sha256


def packages(tmp_path):
    return {p.name: sha256(p) for p in (tmp_path / "pypiserver" / "packages").iterdir()}


@pytest.fixture
def tested(release):
    wheel = release.wheel()
    return wheel, ("publish", wheel, "--report", release.report(wheel), "--index")


def test_publish(tested, tool, pypiserver, tmp_path, environment):
    wheel, publish = tested
    done = tool.json(*publish, pypiserver, **as_user())
    assert done["kind"] == "pypiserver"
    assert done["files"] == [{"name": wheel.name, "sha256": sha256(wheel), "already_there": False}]
    assert packages(tmp_path) == {wheel.name: sha256(wheel)}
    notes = "\n".join(done["notes"])
    for missing in ("PEP 740", "provenance.json", "PEP 658", "requires-python"):
        assert missing in notes
    for installer in ("pip", "uv"):
        environment.install_with(installer, f"{pypiserver}simple/", "--reinstall" if installer
                                 == "uv" else "--force-reinstall", "vllm-glm5")  # fmt: skip
        assert environment.version() == VERSION
    again = tool.json(*publish, f"{pypiserver}simple/", **as_user())
    assert again["files"][0]["already_there"]


def test_other_bytes_are_refused(tested, release, tool, pypiserver, tmp_path):
    wheel, publish = tested
    tool.run(*publish, pypiserver, **as_user())
    before = packages(tmp_path)
    other = release.wheel(folder="other", files={"vllm/__init__.py": "changed"})
    report = release.report(other)
    arguments = ("publish", other, "--report", report, "--index", pypiserver)
    refused = tool.run(*arguments, code=17, **as_user())
    assert sha256(other) in refused.error
    assert sha256(wheel) in refused.error
    # Another file name is no way around it: an installer could take either.
    renamed = release.wheel(folder="renamed", tag=X86)
    report = release.report(renamed)
    tool.run("publish", renamed, "--report", report, "--index", pypiserver, code=17, **as_user())
    assert packages(tmp_path) == before


def test_no_report(tested, tool, pypiserver, tmp_path):
    wheel, _ = tested
    tool.run("publish", wheel, "--index", pypiserver, code=23, **as_user())
    for channel in ("staging", "nightly"):  # nightly's policy asks for no signature
        arguments = ("publish", wheel, "--index", pypiserver, "--channel", channel)
        tool.run(*arguments, code=41, **as_user())
    assert packages(tmp_path) == {}


@pytest.mark.parametrize(
    "who", [{}, as_user(password="wr0ng-secret"), as_user("nobody")], ids=["none", "wrong", "other"]
)
def test_who_may_not(tested, tool, pypiserver, tmp_path, who):
    _, publish = tested
    refused = tool.run(*publish, pypiserver, code=40, **who)
    assert "asked as" in refused.error
    assert "wr0ng-secret" not in refused.error + refused.output
    assert packages(tmp_path) == {}


def test_a_server_that_takes_no_uploads(tested, tool, tmp_path):
    _, publish = tested
    with servers.pypiserver(tmp_path / "pypiserver", passwords=False) as url:
        tool.run(*publish, url, code=40, **as_user())
    assert packages(tmp_path) == {}


def test_pages_behind_a_password(tested, tool, tmp_path):
    _, publish = tested
    with servers.pypiserver(tmp_path / "pypiserver", "-a", "list,download,update") as url:
        tool.run(*publish, url, **as_user())
        assert tool.json(*publish, url, **as_user())["files"][0]["already_there"]
        tool.run(*publish, url, code=40)


def test_what_the_public_index_has_does_not_count(tested, tool, tmp_path, release):
    """pypiserver sends those who ask for what it lacks elsewhere: no answer about itself."""
    wheel, publish = tested
    write_alias(VERSION, wheel.parent)
    elsewhere = release.wheel(folder="elsewhere", files={"vllm/__init__.py": "another"})
    with servers.pypiserver(tmp_path / "public") as public:
        tool.run("publish", elsewhere, "--report", release.report(elsewhere), "--index", public,
                 **as_user())  # fmt: skip
        with servers.pypiserver(tmp_path / "pypiserver", fallback=f"{public}simple") as url:
            tool.run(*publish, url, **as_user())
    assert len(packages(tmp_path)) == 2


def test_both_architectures_on_one_page(release, tool, pypiserver, environment, tmp_path):
    wheels = [release.wheel(tag=tag) for tag in (X86, ARM)]
    for wheel in wheels:
        report = release.report(wheel)
        tool.run("publish", wheel, "--report", report, "--index", pypiserver, **as_user())
    for tag, wheel in zip((X86, ARM), wheels, strict=True):
        environment.pip(
            "download", "--no-deps", "--only-binary=:all:", "--platform", tag.rsplit("-", 1)[1],
            "--python-version", "3.12", "--index-url", f"{pypiserver}simple/",
            "--dest", tmp_path / tag, "vllm-glm5",
        )  # fmt: skip
        assert {p.name: sha256(p) for p in (tmp_path / tag).iterdir()} == {
            wheel.name: sha256(wheel)
        }


def test_what_it_cannot_do_is_refused(tested, tool, pypiserver, release):
    wheel, publish = tested
    report = release.report(wheel)
    tool.run(*publish, pypiserver, "--require-metadata", code=41, **as_user())
    tool.run(*publish, pypiserver, **as_user())
    yanked = tool.run("yank", VERSION, "--index", pypiserver, "--reason", "x", code=41)
    assert "pypiserver cannot yank" in yanked.error
    promoted = tool.run("promote", VERSION, "--index", pypiserver, "--report", report, code=41)
    assert "publish" in promoted.error


def test_no_server(tested, tool):
    _, publish = tested
    for host in (f"127.0.0.1:{servers.free_port()}", "127.0.0.1:x", "a b", "a" * 300):
        refused = tool.run(*publish, f"http://{host}/", code=5, **as_user())
        assert "check the URL" in refused.error


def test_a_served_directory_index(tested, tool, tmp_path):
    from tests.index.conftest import served

    (tmp_path / "index").mkdir()
    with served(tmp_path / "index") as server:
        refused = tool.run(*tested[1], server.url, code=41)
    assert "FOLDER" in refused.error


def test_the_public_index_is_refused(tested, tool):
    from twine.utils import DEFAULT_REPOSITORY

    assert "local versions" in tool.run(*tested[1], DEFAULT_REPOSITORY, code=41).error
