"""The directory index, with the real installers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from builder.errors import AuditError, PolicyError, VersionExistsError
from builder.index import Published, channels, list_wheels, publish

from .checking import Links, listed, sha256
from .conftest import served
from .wheels import write_alias, write_wheel


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("way", ["file", "http", "sub-path"])
def test_it_installs(environment, wheel, tmp_path, tool, way):
    index = tmp_path / "a folder with spaces" / "index"
    publish(index, wheel)
    if way == "file":
        url = (index / "staging" / "simple").as_uri()
        environment.install_with(tool, url, "vllm-glm5==0.20.2+glm5.1")
    else:
        with served(index, "" if way == "http" else "/a/sub path") as server:
            url = f"{server.url}/staging/simple/"
            environment.install_with(tool, url, "vllm-glm5==0.20.2+glm5.1")
    assert environment.version() == "0.20.2+glm5.1"


def test_any_web_server_can_serve_it(environment, wheel, tmp_path):
    """The library's plain server, below a sub-path: no negotiation, html alone."""
    publish(tmp_path / "root" / "sub" / "index", wheel, channel="stable", approved=sha256(wheel))
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=tmp_path / "root", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as server:  # fmt: skip
        port = server.stdout.readline().split(" port ")[1].split()[0]
        url = f"http://127.0.0.1:{port}/sub/index/simple/"
        try:
            environment.install_with("pip", url, "vllm-glm5")
            environment.pip("uninstall", "-y", "vllm-glm5")
            environment.install_with("uv", url, "vllm-glm5")
        finally:
            server.terminate()
    assert environment.version() == "0.20.2+glm5.1"


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_it_moves(environment, wheel, tmp_path, tool):
    publish(tmp_path / "here", wheel)
    shutil.move(tmp_path / "here", tmp_path / "there")
    url = (tmp_path / "there" / "staging" / "simple").as_uri()
    environment.install_with(tool, url, "vllm-glm5")


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize(
    ("requirement", "picked"),
    [
        ("vllm-glm5==0.20.2", "0.20.2+glm5.10"),
        ("vllm-glm5", "0.20.2+glm5.10"),
        ("vllm-glm5==0.20.2+glm5.2", "0.20.2+glm5.2"),
        ("vllm-glm5<0.20", "0.19.1+glm5.3"),
    ],
)
def test_versions(environment, tmp_path, tool, requirement, picked):
    for version in ("0.20.2+glm5.10", "0.20.2+glm5.2", "0.19.1+glm5.3"):
        publish(tmp_path / "index", write_wheel(tmp_path / "built", version))
    url = (tmp_path / "index" / "staging" / "simple").as_uri()
    environment.install_with(tool, url, requirement)
    assert environment.version() == picked


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_another_python_is_refused_by_the_page(environment, tmp_path, tool):
    """Requires-Python is escaped in the page and obeyed by installers."""
    publish(
        tmp_path / "index",
        write_wheel(tmp_path / "built", "0.21.0+glm5.1", requires_python=">=3.99,<4"),
    )
    publish(tmp_path / "index", write_wheel(tmp_path / "built", "0.20.2+glm5.1"))
    page = tmp_path / "index" / "staging" / "simple" / "vllm-glm5" / "index.html"
    assert 'data-requires-python="&gt;=3.99,&lt;4"' in page.read_text()
    environment.install_with(tool, page.parent.parent.as_uri(), "vllm-glm5")
    assert environment.version() == "0.20.2+glm5.1"


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_changed_wheel_is_refused(environment, wheel, tmp_path, tool):
    """The control of the tests above: the hash in the page is really compared."""
    published = publish(tmp_path / "index", wheel)
    published.path.write_bytes(write_wheel(tmp_path / "x", "0.20.2+glm5.1", {}).read_bytes())
    url = published.path.parent.parent.as_uri()
    refused = environment.install_with(tool, url, "vllm-glm5", check=False)
    assert refused.returncode
    assert "hash" in (refused.stdout + refused.stderr).lower()


def test_pages(wheel, tmp_path):
    index = tmp_path / "index"
    published = publish(index, wheel)
    folder = index / "staging" / "simple" / "vllm-glm5"
    assert published == Published("staging", folder / wheel.name, already_there=False)
    (link,) = Links((folder / "index.html").read_text()).found
    assert link["href"] == (
        f"vllm_glm5-0.20.2%2Bglm5.1-py3-none-any.whl#sha256={sha256(wheel)}"
    )  # fmt: skip
    assert link["data-core-metadata"] == link["data-dist-info-metadata"]
    core = folder / f"{wheel.name}.metadata"
    assert core.read_text().startswith("Metadata-Version: 2.1\nName: vllm-glm5\n")
    assert link["data-core-metadata"] == f"sha256={sha256(core)}"
    page = json.loads((folder / "index.v1_json").read_text())
    assert page["meta"] == {"api-version": "1.1"}
    assert page["versions"] == ["0.20.2+glm5.1"]
    assert "dist-info-metadata" not in page["files"][0], "old versions of pip fail on it"
    root = Links((folder.parent / "index.html").read_text()).found
    assert root == [{"href": "vllm-glm5/"}]
    assert listed(folder.parent) == {wheel.name}


def test_the_project_name_is_normalised(tmp_path):
    wheel = write_wheel(tmp_path, "1.0", {"a.py": ""}, name="Some.Odd_Name")
    assert publish(tmp_path / "index", wheel).path.parent.name == "some-odd-name"


def test_the_listing_check_can_fail(wheel, tmp_path):
    """The control of every test that calls ``listed``."""
    path = publish(tmp_path / "index", wheel).path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AssertionError):
        listed(path.parent.parent)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        listed(path.parent.parent)


def test_channels_are_apart(tmp_path):
    index = tmp_path / "index"
    staged = write_wheel(tmp_path, "0.20.2+glm5.2")
    released = write_wheel(tmp_path, "0.20.2+glm5.1")
    publish(index, staged)
    publish(index, released, channel="stable", approved=sha256(released))
    assert channels(index) == ("stable", "staging")
    assert listed(index / "simple") == {released.name}
    assert listed(index / "staging" / "simple") == {staged.name}
    assert [w.version for w in list_wheels(index, "stable")] == ["0.20.2+glm5.1"]
    assert list_wheels(index, "nightly") == ()


@pytest.mark.parametrize("name", ["simple", "../x", "", ".hidden", "a/b", "UPPER"])
def test_channel_names(wheel, tmp_path, name):
    with pytest.raises(PolicyError, match="channel"):
        publish(tmp_path / "index", wheel, channel=name, approved=sha256(wheel))


def test_wheels_are_listed_by_version(tmp_path):
    for version in ("0.20.2+glm5.10", "0.20.2+glm5.9", "0.21.0+glm5.1"):
        publish(tmp_path / "index", write_wheel(tmp_path, version))
    wheels = list_wheels(tmp_path / "index", "staging")
    assert [w.version for w in wheels] == ["0.20.2+glm5.9", "0.20.2+glm5.10", "0.21.0+glm5.1"]
    assert all(w.sha256 == sha256(w.path) for w in wheels)


def contents(index):
    return {
        p.relative_to(index): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in index.rglob("*")
        if p.is_file() and not p.name.endswith(".lock")
    }


def test_the_same_bytes_change_nothing(wheel, tmp_path):
    index = tmp_path / "index"
    beside = {f"{wheel.name}.provenance.json": b"{}"}
    publish(index, wheel, beside=beside)
    before = contents(index)
    assert publish(index, wheel, beside=beside).already_there
    assert contents(index) == before
    name = f"{wheel.name}.provenance.json"
    assert (index / "staging" / "simple" / "vllm-glm5" / name).read_bytes() == b"{}"


def test_other_bytes_are_refused(wheel, tmp_path):
    index = tmp_path / "index"
    publish(index, wheel)
    before = contents(index)
    other = write_wheel(tmp_path / "other", "0.20.2+glm5.1", {"vllm/__init__.py": "changed"})
    for channel in ("staging", "stable"):
        with pytest.raises(VersionExistsError) as caught:
            publish(index, other, channel=channel, approved=sha256(other))
        assert sha256(wheel) in str(caught.value)
        assert sha256(other) in str(caught.value)
        assert caught.value.exit_code == 17
    assert contents(index) == before


def test_a_wheel_that_changes_under_our_hands(wheel, tmp_path, monkeypatch):
    """It was compared with what another channel holds, and had other bytes when it was copied."""
    index = tmp_path / "index"
    held = sha256(publish(index, wheel, channel="stable", approved=sha256(wheel)).path)
    other = write_wheel(tmp_path / "other", "0.20.2+glm5.1", {"vllm/__init__.py": "changed"})
    monkeypatch.setattr("builder.index.sha256_of", lambda _: held)
    with pytest.raises(AuditError, match="changed while"):
        publish(index, other)
    assert list_wheels(index, "staging") == ()
    assert not list(index.glob("staging/simple/**/*.whl"))


def test_one_wheel_for_a_version_and_machine(tmp_path):
    """Another file name is no way around it; another machine is none at all."""
    index = tmp_path / "index"
    tag = "cp38-abi3-manylinux_2_{}_{}"
    publish(index, write_wheel(tmp_path, "0.20.2+glm5.1", tag=tag.format(35, "x86_64")))
    for other in (tag.format(31, "x86_64"), "py3-none-any"):
        with pytest.raises(VersionExistsError):
            publish(index, write_wheel(tmp_path, "0.20.2+glm5.1", tag=other))
    arm = write_wheel(tmp_path, "0.20.2+glm5.1", tag=tag.format(35, "aarch64"))
    assert not publish(index, arm).already_there
    assert len(listed(index / "staging" / "simple")) == 2


def test_a_released_wheel_keeps_its_bytes_in_another_channel(wheel, tmp_path):
    index = tmp_path / "index"
    staged = publish(index, wheel).path
    assert not publish(index, staged, channel="stable", approved=sha256(staged)).already_there
    assert listed(index / "simple") == listed(index / "staging" / "simple") == {wheel.name}


def test_what_is_no_wheel_is_refused(wheel, tmp_path):
    index = tmp_path / "index"
    cut = tmp_path / "cut" / wheel.name
    cut.parent.mkdir()
    cut.write_bytes(wheel.read_bytes()[:200])
    renamed = tmp_path / "vllm_glm5-0.20.2+glm5.9-py3-none-any.whl"
    shutil.copy(wheel, renamed)
    named_otherwise = tmp_path / "not-a-wheel.whl"
    shutil.copy(wheel, named_otherwise)
    for bad in (cut, renamed, named_otherwise):
        with pytest.raises(AuditError):
            publish(index, bad)
    assert list_wheels(index, "staging") == ()
    assert not [p for p in index.rglob("*") if p.is_file() and not p.name.endswith(".lock")]


@pytest.mark.parametrize("name", ["x.json", "{0}", "{0}.metadata", "{0}./../x", "index.html"])
def test_names_beside(wheel, tmp_path, name):
    with pytest.raises(ValueError, match="beside"):
        publish(tmp_path / "index", wheel, beside={name.format(wheel.name): b""})


def test_a_lost_page_comes_back(wheel, tmp_path):
    index = tmp_path / "index"
    folder = publish(index, wheel).path.parent
    (folder / "index.html").unlink()
    (folder / "index.v1_json").write_text('{"files": [{}]}')
    (folder / f"{wheel.name}.metadata").unlink()
    assert publish(index, wheel).already_there
    assert listed(folder.parent) == {wheel.name}


def test_the_alias_stands_beside_it(environment, wheel, tmp_path):
    publish(tmp_path / "index", write_alias(tmp_path, "0.20.2+glm5.1"))
    publish(tmp_path / "index", wheel)
    url = (tmp_path / "index" / "staging" / "simple").as_uri()
    environment.install_with("pip", url, "vllm")
    assert environment.version("vllm-glm5") == environment.version("vllm") == "0.20.2+glm5.1"
