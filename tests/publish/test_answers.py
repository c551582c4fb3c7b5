"""What a server may answer to an upload, and what may happen to the wheel meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
import subprocess
import time
import zipfile
from unittest import mock

import pytest
import requests

from builder import unit, uploading

from . import servers
from .conftest import as_user
from .release import BIG, sha256
from .strange import strange


@pytest.fixture
def tested(release):
    wheel = release.wheel()
    return wheel, ("publish", wheel, "--report", release.report(wheel), "--index")


def other_bytes(wheel, other):
    """In the middle of what is not sent yet, so that its beginning and its end are ours."""
    at = wheel.stat().st_size * 3 // 4
    with wheel.open("r+b") as file:
        file.seek(at)
        file.write(bytes(byte ^ 1 for byte in wheel.read_bytes()[at : at + 1000]))


def another_wheel(wheel, other):
    shutil.copyfile(other, wheel)


def more_bytes(wheel, other):
    with wheel.open("ab") as file:
        file.write(b"more" * 100_000)


def fewer_bytes(wheel, other):
    os.truncate(wheel, wheel.stat().st_size * 3 // 4)


@contextlib.contextmanager
def changed_halfway(change, wheel, other):
    """Change the file when half of it has left; gives whether that was so."""
    from requests_toolbelt import MultipartEncoderMonitor

    read, done = MultipartEncoderMonitor.read, []

    def reads(self, size=-1):
        if not done and self.bytes_read > self.len // 2:
            change(wheel, other)
            done.append(change)
        return read(self, size)

    with mock.patch.object(MultipartEncoderMonitor, "read", reads):
        yield done


@pytest.mark.parametrize("change", [other_bytes, another_wheel, more_bytes, fewer_bytes])
def test_a_wheel_that_changes_while_it_is_sent(release, tool, server, tmp_path, change):
    """A build that ends just now, say: the server has what the report is about, or nothing."""
    url, simple, who = server
    page = f"{simple}vllm-glm5/"
    wheel = release.wheel(files=BIG)
    publish = ("publish", wheel, "--report", release.report(wheel), "--index", url)
    other = release.wheel(folder="other", files=BIG | {"vllm/__init__.py": "untested"})
    kept = shutil.copyfile(wheel, tmp_path / "kept")
    with changed_halfway(change, wheel, other) as done:
        failed = tool.run(*publish, code=16, **who)
    assert done, "the control: it was changed on its way"
    assert "changed while it was published" in failed.error
    time.sleep(0.5)
    assert wheel.name not in requests.get(page, timeout=10).text
    shutil.copyfile(kept, wheel)
    assert tool.json(*publish, **who)["files"][0] == {
        "name": wheel.name, "sha256": sha256(kept), "already_there": False,
    }  # fmt: skip
    assert sha256(kept) in requests.get(page, timeout=10).text


@pytest.mark.parametrize("change", [other_bytes, another_wheel, more_bytes, fewer_bytes])
def test_a_server_that_keeps_what_is_cut_gets_no_whole_wheel(release, tool, tmp_path, change):
    wheel = release.wheel(files=BIG)
    other = release.wheel(folder="other", files=BIG | {"vllm/__init__.py": "untested"})
    folder = tmp_path / "pypiserver"
    with servers.pypiserver(folder, software="wsgiref") as url:
        publish = ("publish", wheel, "--report", release.report(wheel), "--index", url)
        with changed_halfway(change, wheel, other):
            failed = tool.run(*publish, code=16, **as_user())
        assert f"delete {wheel.name} on the server" in failed.error
        time.sleep(0.5)
        kept = folder / "packages" / wheel.name
        assert kept.stat().st_size, "the control: it keeps something"
        assert not zipfile.is_zipfile(kept)


def test_a_wheel_that_changed_before_it_is_sent(release, tool, tested, monkeypatch):
    wheel, publish = tested
    gather = unit.gather

    def late(*arguments):
        gathered = gather(*arguments)
        more_bytes(wheel, None)
        return gathered

    monkeypatch.setattr("builder.publish.gather", late)
    with strange(200) as server:
        failed = tool.run(*publish, server.url, code=16, **as_user())
    assert "changed while it was published" in failed.error
    assert server.wheels == 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (400, "the server answers 400"),
        (413, "let the server take larger files"),
        (500, "the server answers 500"),
        (503, "the server answers 503"),
        ("half", "the upload broke off"),
        (200, "took the file and does not list it"),  # a page to sign in at
    ],
)
def test_an_upload_that_fails_is_sent_once(tool, tested, answer, said):
    with strange(answer) as server:
        failed = tool.run(*tested[1], server.url, code=42, **as_user())
    assert said in failed.error
    assert "next: " in failed.error
    assert servers.PASSWORD not in failed.error
    assert server.wheels == 1


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_gets_no_credentials(tool, tested, status):
    with strange(200) as elsewhere, strange(status, elsewhere.url) as server:
        failed = tool.run(*tested[1], server.url, code=42, **as_user())
    assert f"--index {elsewhere.url}" in failed.error
    assert elsewhere.requests == []
    assert all(authorization for _, authorization in server.requests), "the control"


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("text/html", '<meta name="pypi:repository-version" content="2.0">'),
        ("application/vnd.pypi.simple.v1+json", '{"files": 7}'),
    ],
)
def test_a_page_that_cannot_be_read(tool, tested, kind, page):
    with strange(200, page=(200, kind, page)) as server:
        failed = tool.run(*tested[1], server.url, code=5, **as_user())
    assert "not a page of PEP 503 or 691" in failed.error
    assert server.wheels == 0


def test_a_hash_in_capitals_is_the_same_hash(tool, tested):
    wheel, publish = tested
    link = '<a href="/{0}#sha256={1}">{0}</a>'
    digest = sha256(wheel)

    def page(shown):
        return 200, "text/html", link.format(wheel.name, shown)

    with strange(200, page=page(digest.upper())) as server:
        done = tool.json(*publish, server.url, **as_user())
        assert done["files"][0]["already_there"]
        server.page = page(digest.upper()[::-1])  # the control
        tool.run(*publish, server.url, code=17, **as_user())
    assert server.wheels == 0


def test_a_redirect_to_what_is_no_url(tool, tested):
    with strange(200, "http://[no-url", page=(302, "text/html", "")) as server:
        failed = tool.run(*tested[1], server.url, code=5, **as_user())
    assert "gives no answer" in failed.error


def test_a_server_that_never_answers(tool, tested, monkeypatch):
    monkeypatch.setattr(uploading, "ANSWER_TIMEOUT", 1)
    with strange("silence") as server:
        failed = tool.run(*tested[1], server.url, code=42, **as_user())
    assert "ReadTimeout" in failed.error


def test_a_certificate_that_nobody_trusts(tool, tested, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key,
         "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with strange(400, context=context) as server:
        refused = tool.run(*tested[1], server.url, code=5, **as_user())
        assert "CERTIFICATE_VERIFY_FAILED" in refused.error
        assert "TWINE_CERT" in refused.error
        assert server.requests == []
        trusting = as_user() | {"TWINE_CERT": str(certificate)}
        tool.run(*tested[1], server.url, code=42, **trusting)
    assert server.wheels == 1


def test_a_password_beyond_latin_1(tool, tested, devpi):
    owner = devpi.user(next(devpi.names), "pä€s5-ключ")
    stable = devpi.index(owner, "stable")
    wheel, publish = tested
    done = tool.json(*publish, stable, **as_user(*owner))
    assert done["files"][0]["sha256"] == sha256(wheel)
    refused = tool.run(*publish, stable, code=40, **as_user(owner[0], "pä€s5-клю"))
    assert "€" not in refused.error
