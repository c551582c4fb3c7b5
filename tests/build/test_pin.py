"""`pin`: a release described by hash, from any package index, without telling its credentials."""

from __future__ import annotations

import hashlib
import os
import tomllib

import pytest

from builder import credentials, package_index, pip_configuration
from tests.build import madeup
from tests.build.package_server import Fault


def pinned(user, tag=madeup.TAG):
    return tomllib.loads((user.project / "upstream" / f"{tag}.toml").read_text())


@pytest.mark.parametrize("json_pages", [False, True], ids=["html", "json"])
def test_pin_describes_the_release(make_user, upstream, index, json_pages):
    user = make_user(project=index_less_project(make_user))
    index.json_pages = json_pages
    user.ok("pin", madeup.TAG)
    pin = pinned(user)
    assert pin["version"] == "9.1.0"
    assert pin["commit"] == upstream.commit()[:9]
    assert pin["cuda"] == "13.0"
    assert pin["torch"] == "==2.11.0"
    assert pin["requires-python"] == ">=3.10,<3.15"
    assert pin["sdist"]["sha256"] == hashlib.sha256(upstream.sdist).hexdigest()
    for arch in ("x86_64", "aarch64"):
        wheel = upstream.official(arch)
        assert pin["wheels"][arch]["sha256"] == hashlib.sha256(wheel).hexdigest()
        assert pin["wheels"][arch]["size"] == len(wheel)
    assert pin["wheels"]["x86_64"]["file"].startswith("vllm-9.1.0-10-cp38")  # 10 > 2
    # Only the sdist was needed, and the same bytes of the pin come out again.
    assert {item.name for item in index.served} == {"vllm-9.1.0.tar.gz"}
    before = (user.project / "upstream" / "v9.1.0.toml").read_bytes()
    assert "unchanged" in user.ok("pin", madeup.TAG).stdout
    assert (user.project / "upstream" / "v9.1.0.toml").read_bytes() == before
    assert len(index.served) == 1


def index_less_project(make_user):
    """A project without any pin."""
    project = make_user().project
    for path in (project / "upstream").iterdir():
        path.unlink()
    return project


def test_changed_files_need_force(user, index):
    name = next(n for n in index.files["vllm"] if n.startswith("vllm-9.1.0-10-"))
    index.files["vllm"][name] = index.files["vllm"][name] + b" and more"
    path = user.project / "upstream" / "v9.1.0.toml"
    before = path.read_bytes()
    said = user.fails(18, "pin", madeup.TAG)
    assert hashlib.sha256(index.files["vllm"][name]).hexdigest() in said
    assert path.read_bytes() == before
    user.ok("pin", madeup.TAG, "--force")
    assert pinned(user)["wheels"]["x86_64"]["size"] == len(index.files["vllm"][name])


def test_a_pin_that_was_damaged_is_refused_and_repaired(user):
    path = user.project / "upstream" / "v9.1.0.toml"
    good = path.read_bytes()
    for bad in (b"", b"\xff\xfe", good.replace(b"sha256", b"sha512")):
        path.write_bytes(bad)
        assert str(path) in user.fails(18, "--tag", madeup.TAG)
    user.fails(18, "pin", madeup.TAG)
    user.ok("pin", madeup.TAG, "--force")
    assert path.read_bytes() == good


@pytest.mark.parametrize(
    ("tag", "code", "words"),
    [
        ("v9.9.9", 5, "no index has vllm 9.9.9"),
        ("v9.3.0", 18, "no machine"),
        ("v9.4.0", 18, "0 sdists"),
        ("9.1.0", 18, "python -m builder pin v9.1.0\n"),
        ("v9.1", 18, "python -m builder pin v9.1.0\n"),  # the same version to an index
        ("v9.1.0.0", 18, "python -m builder pin v9.1.0\n"),
        ("v09.1.0", 18, "python -m builder pin v9.1.0\n"),
        ("vnext", 18, "v0.20.2"),
        ("v9.1.0/../x", 18, "v0.20.2"),
    ],
)
def test_what_cannot_be_pinned(user, tag, code, words):
    assert user.advised(words) in user.fails(code, "pin", tag)
    assert [p.name for p in (user.project / "upstream").iterdir()] == ["v9.1.0.toml"]


@pytest.mark.parametrize("json_pages", [False, True], ids=["html", "json"])
def test_what_upstream_yanked_is_not_pinned(user, index, json_pages):
    """pip does not take such a file either; a pin that was made before goes on working."""
    index.json_pages = json_pages
    path = user.project / "upstream" / "v9.1.0.toml"
    before = path.read_bytes()
    build = next(n for n in index.files["vllm"] if n.startswith("vllm-9.1.0-10-"))
    index.yanked = {build}
    said = user.fails(18, "pin", madeup.TAG)
    assert build in said
    user.ok("pin", madeup.TAG, "--force")
    assert not pinned(user)["wheels"]["x86_64"]["file"].startswith("vllm-9.1.0-10-")
    path.write_bytes(before)
    index.yanked = {name for name in index.files["vllm"] if name.startswith("vllm-9.1.0")}
    assert "yanked" in user.fails(18, "pin", madeup.TAG)
    assert path.read_bytes() == before
    user.ok("--tag", madeup.TAG)


def test_an_index_without_hashes_is_refused(user, index):
    index.with_hashes = False
    assert "no sha256" in user.fails(18, "pin", madeup.TAG)


@pytest.mark.parametrize("content", ["foreign", "no commit", "not an archive"])
def test_an_sdist_that_is_not_upstreams(user, index, content, upstream):
    name = "vllm-9.1.0.tar.gz"
    if content == "not an archive":
        index.files["vllm"][name] = b"<html>captive portal</html>"
    elif content == "foreign":
        index.files["vllm"][name] = madeup.sdist_from({"setup.py": b""})
    else:
        index.files["vllm"][name] = madeup.sdist_from(
            {"pyproject.toml": b"[project]\nname = 'vllm'\n", "vllm/_version.py": b"version = 1\n"}
        )
    assert name in user.fails(18, "pin", madeup.TAG)


def test_a_damaged_download_is_not_pinned(user, upstream):
    user.ok("pin", madeup.TAG)
    (cached,) = (user.cache / "downloads").glob("*/vllm-9.1.0.tar.gz")
    cached.write_bytes(upstream.sdist[:1000])
    user.ok("pin", madeup.TAG)
    assert cached.read_bytes() == upstream.sdist


@pytest.mark.parametrize(
    ("way", "absolute"), [("url", True), ("netrc", False)], ids=["url", "netrc"]
)
def test_credentials_are_used_and_never_printed(make_user, index, way, absolute):
    index.credentials = "somebody:s3cr%t/p@ss"
    index.absolute_links = absolute
    user = make_user()
    if way == "url":
        user.extra["PIP_INDEX_URL"] = f"http://somebody:s3cr%25t%2Fp%40ss@{index.host}/simple/"
    else:
        netrc = user.home / ".netrc"
        netrc.write_text("machine 127.0.0.1 login somebody password s3cr%t/p@ss\n")
        netrc.chmod(0o600)
    outputs = [user.ok("pin", madeup.TAG), user.ok("--tag", user.tag, "--no-stage", "--json")]
    # Errors name the index: with the file gone, with wrong credentials, with nobody there.
    name = "vllm-9.1.0-2-cp38-abi3-manylinux_2_35_aarch64.whl"
    index.faults[name] = [Fault(status=404)]
    outputs.append(user.run("--tag", user.tag, "--arch", "aarch64"))
    assert outputs[-1].returncode == 5
    index.page_status = 403
    outputs.append(user.run("--tag", user.tag, "--arch", "aarch64"))
    index.page_status, index.credentials = None, "somebody:else"
    outputs.append(user.run("--tag", user.tag, "--arch", "aarch64"))
    assert outputs[-1].returncode == outputs[-2].returncode == 5
    assert "401" in outputs[-1].stderr
    for text in [o.stdout + o.stderr for o in outputs]:
        assert "s3cr" not in text
        assert "somebody:" not in text
    for path in [*user.project.rglob("*.toml"), *user.home.rglob("*.json")]:
        assert "s3cr" not in path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "https://user:pass@host/simple/",
        "401 Client Error: Unauthorized for url: https://user:pass@host/simple/vllm/",
        "HTTPSConnectionPool(host='host'): 'https://user:p@ss@host/x' and http://pass@host/y",
    ],
)
def test_redacted_takes_credentials_out_of_any_text(text):
    assert "pass" not in credentials.redacted(text)
    assert "ss@" not in credentials.redacted(text)
    assert "host" in credentials.redacted(text)


def test_pips_environment_outranks_its_files(make_user, index, tmp_path, monkeypatch):
    """Whatever order this pip lists them in: it has changed between versions."""
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = http://127.0.0.1:9/global/\ntimeout = 7\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    for name in [n for n in os.environ if n.startswith("PIP_") and n != "PIP_CONFIG_FILE"]:
        monkeypatch.delenv(name)
    assert package_index.pip_settings.__wrapped__().urls[0] == "http://127.0.0.1:9/global/"
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    settings = package_index.pip_settings.__wrapped__()
    assert (settings.urls[0], settings.timeout) == (index.url, 7)

    class Listed:
        returncode = 0
        stdout = f":env:.index-url='{index.url}'\nglobal.index-url='http://127.0.0.1:9/global/'\n"

    monkeypatch.setattr(
        pip_configuration.subprocess, "run", lambda *_, **__: Listed
    )  # pip 23's order
    assert package_index.pip_settings.__wrapped__().urls == (index.url,)


def test_the_extra_index_is_asked_where_the_first_lacks_the_project(user, index):
    url = index.url
    user.index_url = f"http://{index.host}/simple/nothing-here/"
    user.extra["PIP_EXTRA_INDEX_URL"] = url
    assert user.build()["mode"] == "repack"


def test_an_index_on_disk_alone_is_said_to_be_of_no_use(user):
    user.index_url = "file:///srv/simple/"
    assert "file:///srv/simple/" in user.fails(5, "--tag", user.tag)
