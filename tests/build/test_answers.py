"""A package index that answers nonsense, or never ends: one error that names it, nothing kept."""

from __future__ import annotations

import hashlib
import json

import pytest

from builder import fetch, package_index
from builder.errors import HashMismatchError, PackageIndexError
from tests.publish.nonsense import (
    NESTED,
    SIMPLE,
    broken,
    endless,
    make_impatient,
    nonsense,
    said,
)

SDIST = "vllm-9.1.0.tar.gz"
DATA = b"the sdist" * 10_000
SHA256 = hashlib.sha256(DATA).hexdigest()
PAGE = "GET /simple/vllm/"
FILE, HEAD = f"GET /files/{SDIST}", f"HEAD /files/{SDIST}"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(package_index, "ATTEMPTS", 2)
    with nonsense() as server:
        server.answers = {
            PAGE: page(),
            FILE: said(DATA, kind="application/gzip"),
            HEAD: said(b"", **{"Content-Length": str(len(DATA))}),
        }
        yield server


@pytest.fixture
def settings(server):
    return package_index.IndexSettings((f"{server.root}simple",), None, 5.0)


@pytest.fixture
def impatient(monkeypatch):
    make_impatient(monkeypatch)


def page(**changed):
    file = {"filename": SDIST, "url": f"/files/{SDIST}", "hashes": {"sha256": SHA256}} | changed
    return said(
        {"meta": {"api-version": "1.1"}, "name": "vllm", "versions": [], "files": [file]},
        kind=SIMPLE,
    )


def files(settings):
    return package_index.release_files("vllm", "9.1.0", settings)


def fails(call, words, where, error=PackageIndexError):
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert words in str(raised.value)
    assert where in str(raised.value)
    assert raised.value.next_step


def test_the_control(settings, tmp_path):
    [file] = files(settings)
    assert (file.name, file.sha256) == (SDIST, SHA256)
    assert package_index.project_versions("vllm", settings) == ["9.1.0"]
    assert package_index.content_length(file, settings) == len(DATA)
    path = tmp_path / SDIST
    assert fetch.download(file, path, settings, sha256=SHA256, size=None) == SHA256
    assert path.read_bytes() == DATA


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said([], kind=SIMPLE), "not a page"),
        (said({"files": 7}, kind=SIMPLE), "not a page"),
        (said(b"<html>", kind=SIMPLE), "not a page"),
        (said(b"\xff\xfe\xfa", kind=SIMPLE), "not a page"),
        (said(NESTED, kind=SIMPLE), "not a page"),
        (said(b"<![nonsense>", kind="text/html"), "not a page"),
        (said(b"%PDF", kind="application/pdf"), "not a page"),
        (
            said(b'<meta name="pypi:repository-version" content="9.0">', kind="text/html"),
            "not a page",
        ),
        (page(filename=7), "not a page"),
        (page(hashes=[SHA256]), "not a page"),
        (page(hashes={"sha256": "../../x"}), "as the sha256"),
        (page(size=-1), "-1 bytes"),
        (said(b"", 302, Location="/simple/vllm/"), "TooManyRedirects"),
        (said(b"", 302, Location="http://[no-url/"), "gives no answer"),
        (broken, "gives no answer"),
        (said(b"x", 503, **{"Retry-After": "nonsense"}), "gives no answer"),
    ],
)
def test_a_page_that_is_none(server, settings, answer, words):
    server.answers[PAGE] = answer
    fails(lambda: files(settings), words, f"{server.root}simple")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless(), "does not end: no page has 1 MiB"),
        (endless(piece=b" ", pause=0.02), "is stuck"),
        (endless(status=302, Location="/"), "does not end"),
        (endless(status=503), "RetryError"),
        (endless("text/html"), "does not end"),
    ],
    ids=["large", "slow", "redirect", "unavailable", "html"],
)
def test_a_page_without_an_end(server, settings, impatient, answer, words):
    server.answers[PAGE] = answer
    fails(lambda: package_index.project_versions("vllm", settings), words, f"{server.root}simple")


def test_an_index_that_asks_for_a_day(server, settings, monkeypatch):
    """It may ask for a wait, which ends."""
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    server.answers[PAGE] = said(b"", 503, **{"Retry-After": "86400"})
    fails(lambda: files(settings), "RetryError", server.root)
    assert waits == [package_index.RETRY_AFTER]
    waits.clear()
    server.answers[PAGE] = said(b"", 503, **{"Retry-After": "7"})  # the control
    fails(lambda: files(settings), "RetryError", server.root)
    assert waits == [7]


def test_credentials_are_in_no_message(server):
    url = f"{server.root}simple".replace("http://", "http://me:s3cret@")
    settings = package_index.IndexSettings((url,), None, 5.0)
    for answer in (said([], kind=SIMPLE), page(size=-1), said(b"%PDF", kind="application/pdf")):
        server.answers[PAGE] = answer
        with pytest.raises(PackageIndexError) as raised:
            files(settings)
        assert "s3cret" not in json.dumps(raised.value.as_dict())


@pytest.mark.parametrize("length", ["many", "-7", ""])
def test_a_length_that_is_none(server, settings, length):
    [file] = files(settings)
    server.answers[HEAD] = said(b"", **{"Content-Length": length})
    fails(lambda: package_index.content_length(file, settings), "", file.url)


@pytest.mark.parametrize("known", [True, False], ids=["pinned", "not pinned"])
def test_a_file_without_an_end(server, settings, impatient, tmp_path, known):
    [file] = files(settings)
    server.answers[FILE] = endless("application/gzip")
    path = tmp_path / SDIST
    size = len(DATA) if known else None
    error, words = (HashMismatchError, SHA256) if known else (PackageIndexError, "does not end")
    fails(
        lambda: fetch.download(file, path, settings, sha256=SHA256, size=size),
        words,
        SDIST,
        error=error,
    )
    assert not path.exists()
    server.answers[FILE] = said(DATA)  # the control: what is there of it harms nobody
    fetch.download(file, path, settings, sha256=SHA256, size=size)
    assert path.read_bytes() == DATA


def test_a_file_that_hardly_comes(server, settings, impatient, tmp_path):
    [file] = files(settings)
    server.answers[FILE] = endless("application/gzip", b"x", 0.02)
    fails(
        lambda: fetch.download(file, tmp_path / SDIST, settings, sha256=SHA256, size=len(DATA)),
        "is stuck",
        file.url,
    )


def test_a_rest_that_begins_elsewhere(server, settings, tmp_path):
    [file] = files(settings)
    path = tmp_path / SDIST

    def download():
        return fetch.download(file, path, settings, sha256=SHA256, size=len(DATA))

    part = tmp_path / f"{SDIST}.part"
    part.write_bytes(DATA[:100])
    server.answers[FILE] = said(DATA[100:], 206, **{"Content-Range": f"bytes {10**30}-*/*"})
    fails(download, "asked for the bytes from 100 on", file.url)
    assert part.read_bytes() == DATA[:100]
    server.answers[FILE] = said(DATA[100:], 206, **{"Content-Range": "bytes 100-*/*"})
    assert download() == SHA256  # the control


def test_a_file_whose_url_is_none(server, settings, tmp_path):
    for url in ("file:///etc/passwd", "http://[no-url/"):
        file = package_index.ReleaseFile(SDIST, url, SHA256, None, None)
        fails(
            lambda file=file: fetch.download(file, tmp_path / SDIST, settings, sha256=None, size=1),
            "gives no answer",
            url,
        )
