"""The lines that publishing prints, run as printed, from each kind of index."""

from __future__ import annotations

import shlex
import sys
import zipfile
from pathlib import Path

import pytest

from builder import package_index
from builder.index import publish
from tests.index.conftest import Environment, served
from tests.index.wheels import write_wheel

from .conftest import as_user
from .release import ARM, VERSION, X86, sha256

KINDS = ("directory", "pypiserver", "devpi", "devpi-mirror")


@pytest.fixture
def public(tmp_path):
    """A public index with the one dependency; served, since devpi mirrors no folder."""
    index = tmp_path / "public"
    publish(index, write_wheel(tmp_path, "1.5", {"a_dependency.py": ""}, name="a-dependency"))
    with served(index) as server:
        yield f"{server.url}/staging/simple/"


def private(kind, request, tmp_path, public):
    """Return an index of that kind, and who may upload there."""
    if kind == "directory":
        return tmp_path / "private index", {}
    if kind == "pypiserver":
        return request.getfixturevalue("pypiserver"), as_user()
    devpi, team = request.getfixturevalue("devpi"), request.getfixturevalue("team")
    bases = []
    if kind == "devpi-mirror":
        # Without the option devpi fetches the names of all projects that the public index has.
        devpi.index(team, "public", type="mirror", mirror_url=public, bases=None, volatile=True,
                    mirror_no_project_list=True)  # fmt: skip
        bases = [f"{team[0]}/public"]
    return devpi.index(team, "stable-with-all", bases=bases), as_user(*team)


@pytest.mark.parametrize("kind", KINDS)
def test_the_lines_run_as_printed(request, release, tool, tmp_path, environment, public, kind):
    index, who = private(kind, request, tmp_path, public)
    wheel = release.wheel(requires=["a-dependency>=1"])
    report = release.report(wheel)
    channel = ["--channel", "stable-with-all"] if kind.startswith("devpi") else []
    if channel:  # the index's name is a channel, which the policy has to define
        policy = release.root / "ci" / "policy.toml"
        policy.write_text(policy.read_text().replace("stable-sm120", "stable-with-all")
                          .replace("==12.*", ">=9.0").replace('"test_a.py::*"]', '"test_b.py::*"]'))  # fmt: skip
        report = release.report(wheel)
    arguments = ("publish", wheel, "--report", report, "--index", index, *channel)
    done = tool.json(*arguments, **who, PIP_INDEX_URL=public)
    pip, uv = done["install"]
    assert ("--extra-index-url" in pip) == (kind != "devpi-mirror")
    assert ("--index " in uv) == (kind != "devpi-mirror")
    for line, again in ((pip, "--force-reinstall"), (uv, "--reinstall")):
        environment.run(*shlex.split(line, comments=True), again)
        assert environment.version() == VERSION
        assert environment.version("a-dependency") == "1.5"


@pytest.mark.parametrize("kind", ["directory", "pypiserver"])
def test_installers_pick_by_platform(request, release, tool, environment, tmp_path, kind):
    """Both architectures on one page: x86-64 and DGX Spark each get their own."""
    index, who = private(kind, request, tmp_path, None)
    wheels = {tag: release.wheel(tag=tag) for tag in (X86, ARM)}
    for wheel in wheels.values():
        tool.run("publish", wheel, "--report", release.report(wheel), "--index", index, **who)
    url = f"{index}simple/" if who else (index / "simple").as_uri()
    for tag, wheel in wheels.items():
        environment.pip(
            "download", "--no-deps", "--only-binary=:all:", "--platform", tag.rsplit("-", 1)[1],
            "--python-version", "3.12", "--index-url", url, "--dest", tmp_path / tag, "vllm-glm5",
        )  # fmt: skip
        assert [sha256(p) for p in (tmp_path / tag).iterdir()] == [sha256(wheel)]


@pytest.fixture(scope="session")
def bare_environment(empty_environment):
    return Environment(empty_environment)


@pytest.mark.resolve
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["directory", "pypiserver", "devpi"])
def test_all_real_dependencies_resolve(
    request, release, tool, tmp_path, bare_environment, official_wheel, kind
):
    """The real wheel's requirements, from the real public index; nothing is installed.

    Not through a mirror of devpi: it asks the public index for each page within the installer's
    request, which takes minutes the first time. The mirror's lines run above.
    """
    settings = package_index.pip_settings()
    public = settings.urls[0]
    index, who = private(kind, request, tmp_path, public)
    with zipfile.ZipFile(official_wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    requires = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    assert len(requires) > 50
    wheel = release.wheel(requires=[each for each in requires if "extra ==" not in each])
    if kind == "devpi":
        index = index.replace("stable-with-all", "staging")
        arguments = ("publish", wheel, "--index", index)
    else:
        arguments = ("publish", wheel, "--report", release.report(wheel), "--index", index)
    network = {"PIP_CERT": settings.ca_bundle} if settings.ca_bundle else {}
    pip, uv = tool.json(*arguments, **who, PIP_INDEX_URL=public)["install"]
    uv_tls = {"UV_SYSTEM_CERTS": "1", "SSL_CERT_FILE": settings.ca_bundle or ""}
    said = bare_environment.run(
        *shlex.split(uv, comments=True), "--dry-run", **{k: v for k, v in uv_tls.items() if v}
    )
    assert "+ torch==" in said.stderr
    if kind == "directory":  # the other kinds differ for pip in nothing but the page's look
        said = bare_environment.run(*shlex.split(pip, comments=True), "--dry-run", **network)
        assert "torch-" in said.stdout.rpartition("Would install")[2]
    assert not list(Path(bare_environment.site).glob("torch*")), sys.executable
