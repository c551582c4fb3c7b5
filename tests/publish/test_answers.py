"""What a server may answer to an upload, and what may happen to the wheel meanwhile."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from unittest import mock

import pytest
import requests

from builder import connection

from . import servers
from .conftest import as_user
from .release import sha256
from .strange import strange


@pytest.fixture
def tested(release):
    wheel = release.wheel()
    return wheel, ("publish", wheel, "--report", release.report(wheel), "--index")


@pytest.mark.parametrize("kind", ["pypiserver", "devpi"])
def test_a_wheel_that_is_exchanged_while_it_is_sent(request, release, tool, tested, kind):
    """A build that ends just now, say: what travels is what the report is about."""
    from twine.repository import Repository

    if kind == "devpi":
        devpi, team = request.getfixturevalue("devpi"), request.getfixturevalue("team")
        url, who = f"{devpi.url}{team[0]}/stable/", as_user(*team)
        simple = f"{url}+simple/vllm-glm5/"
    else:
        url, who = request.getfixturevalue("pypiserver"), as_user()
        simple = f"{url}simple/vllm-glm5/"
    wheel, publish = tested
    approved = sha256(wheel)
    other = release.wheel(folder="other", files={"vllm/__init__.py": "untested"})
    upload = Repository.upload

    def exchanged(self, *arguments, **options):
        shutil.copyfile(other, wheel)
        return upload(self, *arguments, **options)

    with mock.patch.object(Repository, "upload", exchanged):
        done = tool.json(*publish, url, **who)
    assert sha256(wheel) == sha256(other) != approved, "the control: it was exchanged"
    assert done["files"][0]["sha256"] == approved
    page = requests.get(simple, timeout=10).text
    assert approved in page
    assert sha256(other) not in page


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


def test_a_server_that_never_answers(tool, tested, monkeypatch):
    monkeypatch.setattr(connection, "UPLOAD_TIMEOUT", 1)
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
