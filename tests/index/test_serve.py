"""The server: negotiation, ranges, what it refuses to give out, and how it ends."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest

from builder.errors import BuilderError
from builder.index import publish
from builder.serve import HTML_TYPE, JSON_TYPE, byte_range, make_server, negotiate
from tests.build.killing import hear_interrupts

from .conftest import ROOT, isolated_variables, served
from .wheels import write_wheel

PLAIN = "text/html"
OFFERED = [JSON_TYPE, HTML_TYPE, PLAIN]
PIP = f"{JSON_TYPE}, {HTML_TYPE}; q=0.1, text/html; q=0.01"


@pytest.fixture
def published(tmp_path, wheel):
    (tmp_path / "secret.txt").write_text("secret")
    return publish(tmp_path / "index", wheel, beside={f"{wheel.name}.provenance.json": b"{}"}).path


@pytest.fixture
def server(published):
    with served(published.parents[3]) as running:
        yield running


def ask(server, path, method="GET", **headers):
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, PLAIN),
        ("", PLAIN),
        ("*/*", PLAIN),
        ("text/*", PLAIN),
        ("application/*", JSON_TYPE),
        (PIP, JSON_TYPE),
        (JSON_TYPE, JSON_TYPE),
        (HTML_TYPE, HTML_TYPE),
        ("application/vnd.pypi.simple.latest+json", JSON_TYPE),
        (f"{JSON_TYPE};q=0.2, {HTML_TYPE};q=0.9", HTML_TYPE),
        (f"{JSON_TYPE};q=0, */*", PLAIN),
        (f"{JSON_TYPE};q=0", None),
        (f"{JSON_TYPE}; q=0.5, */*; q=0.1", JSON_TYPE),
        (f"*/*, {JSON_TYPE}", JSON_TYPE),
        (f"{JSON_TYPE};q=nonsense, text/html;q=0.1", PLAIN),
        (f"{JSON_TYPE};q=nan", PLAIN),
        (f"{JSON_TYPE};q=nan, image/png", None),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", PLAIN),
        (f"{JSON_TYPE.upper()}", JSON_TYPE),
        ("application/vnd.pypi.simple.v2+json", None),
        ("image/png", None),
    ],
)
def test_negotiation(accept, kind):
    assert negotiate(accept, OFFERED) == kind


@pytest.mark.parametrize("path", ["/staging/simple/", "/staging/simple/vllm-glm5/"])
def test_pages(server, path):
    html, html_text = ask(server, path, Accept=PLAIN)
    assert html.headers["Content-Type"] == PLAIN
    assert html_text.startswith(b"<!DOCTYPE html>")
    page, text = ask(server, path, Accept=PIP)
    assert page.headers["Content-Type"] == JSON_TYPE
    assert json.loads(text)["meta"] == {"api-version": "1.1"}
    versioned, versioned_text = ask(server, path, Accept=HTML_TYPE)
    assert versioned.headers["Content-Type"] == HTML_TYPE
    assert versioned_text == html_text
    for response in (html, page, versioned):
        assert response.headers["Vary"] == "Accept"
    assert html.headers["ETag"] != page.headers["ETag"]
    refused, _ = ask(server, path, Accept="image/png")
    assert refused.status == 406


def test_an_unchanged_page_is_not_sent_again(server, published, tmp_path):
    path = "/staging/simple/vllm-glm5/"
    first, _ = ask(server, path)
    again, body = ask(server, path, If_None_Match=first.headers["ETag"])
    assert (again.status, body) == (304, b"")
    again, body = ask(server, path, If_None_Match="*")  # any version is known: RFC 9110, 13.1.2
    assert (again.status, body) == (304, b"")
    assert ask(server, path, If_None_Match='"*"')[0].status == 200
    publish(published.parents[3], write_wheel(tmp_path, "0.20.2+glm5.2"))
    changed, body = ask(server, path, If_None_Match=first.headers["ETag"])
    assert changed.status == 200
    assert b"%2Bglm5.2-" in body


def test_head(server, published):
    path = f"/staging/simple/vllm-glm5/{published.name}"
    response, body = ask(server, path, "HEAD")
    assert (response.status, body) == (200, b"")
    assert int(response.headers["Content-Length"]) == published.stat().st_size
    assert response.headers["Accept-Ranges"] == "bytes"


@pytest.mark.parametrize("path", ["{0}", "{0}.metadata", "{0}.provenance.json", "index.html"])
def test_files(server, published, path):
    name = path.format(published.name)
    response, body = ask(server, f"/staging/simple/vllm-glm5/{name.replace('+', '%2B')}")
    assert response.status == 200
    assert body == published.with_name(name).read_bytes()


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=10-", (10, None)),
        ("bytes=-16", (-16, None)),
        ("bytes=5-99999999", (5, None)),
        ("bytes=-99999999", (0, None)),
    ],
)
def test_ranges(server, published, asked, span):
    data = published.read_bytes()
    expected = data[slice(*span)]
    for path in (published.name, published.name.replace("+", "%2B")):
        response, body = ask(server, f"/staging/simple/vllm-glm5/{path}", Range=asked)
        assert response.status == 206
        assert body == expected
        start = data.index(expected)
        last = start + len(expected) - 1
        assert response.headers["Content-Range"] == f"bytes {start}-{last}/{len(data)}"


@pytest.mark.parametrize(
    "asked", ["bytes=0-1,5-6", "items=0-1", "bytes=9-3", "bytes=-", "bytes=x-"]
)
def test_ranges_that_mean_everything(server, published, asked):
    response, body = ask(server, f"/staging/simple/vllm-glm5/{published.name}", Range=asked)
    assert response.status == 200
    assert body == published.read_bytes()


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0"])
def test_ranges_that_are_not_there(server, published, asked):
    response, _ = ask(server, f"/staging/simple/vllm-glm5/{published.name}", Range=asked)
    assert response.status == 416
    assert response.headers["Content-Range"] == f"bytes */{published.stat().st_size}"


def test_a_range_of_another_file_is_not_sent(server, published):
    path = f"/staging/simple/vllm-glm5/{published.name}"
    tag = ask(server, path, "HEAD")[0].headers["ETag"]
    assert ask(server, path, Range="bytes=0-3", If_Range=tag)[0].status == 206
    assert ask(server, path, Range="bytes=0-3", If_Range='"other"')[0].status == 200


def test_ranges_of_an_empty_file():
    assert byte_range("bytes=0-", 0) == range(0)
    assert byte_range("", 0) is None


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/secret.txt",
        "/../secret.txt",
        "/staging/simple/../../../secret.txt",
        "/staging/simple/vllm-glm5/../../../../secret.txt",
        "/staging/simple/%2e%2e/%2e%2e/%2e%2e/secret.txt",
        "/staging/simple/vllm-glm5/..%2f..%2f..%2f..%2fsecret.txt",
        "/staging/simple/vllm-glm5/..%5c..%5csecret.txt",
        "/staging/simple/vllm-glm5/%00",
        "/staging/simple//etc/passwd",
        "//etc/passwd",
        "/staging/simple/vllm-glm5/link.txt",
        "/staging/simple/linked/",
        "/staging/simple/linked/secret.txt",
        "/staging/simple/vllm-glm5/.vllm-glm5-tmp-x",
        "/.publish.lock",
        "/staging/",
        "/simple/",
        "/staging/simple/absent/",
        "/staging/simple/vllm-glm5/absent.whl",
        "/staging/simple/vllm-glm5/folder/",
        "/staging/simple/vllm-glm5/folder",
        "/staging/simple/vllm-glm5/index.html/",
        "/staging/simple/index.html/x",
    ],
)
def test_what_it_does_not_give_out(server, published, tmp_path, path):
    (published.parent / "link.txt").symlink_to(tmp_path / "secret.txt")
    (published.parents[1] / "linked").symlink_to(tmp_path)
    (published.parent / ".vllm-glm5-tmp-x").write_text("secret")
    (published.parent / "folder").mkdir()
    response, body = ask(server, path)
    assert response.status == 404
    assert b"secret" not in body
    assert response.headers["Location"] is None


@pytest.mark.parametrize("name", ["vllm-glm5", "VLLM_GLM5/", "vllm.glm5"])
def test_a_project_under_another_spelling(server, name):
    response, _ = ask(server, f"/staging/simple/{name}")
    assert response.status == 301
    assert response.headers["Location"] == "/staging/simple/vllm-glm5/"


def test_a_redirect_stays_here(server):
    """The path ``//host/...`` as a Location would be another host."""
    for path in ("//elsewhere.invalid/staging/simple", "///staging/simple", "/\\x/staging/simple"):
        location = ask(server, path)[0].headers["Location"]
        assert location in {None, "/staging/simple/"}


def test_the_prefix_is_required(published):
    with served(published.parents[3], "/glm5/") as server:
        assert server.url.endswith("/glm5")
        assert ask(server, "/glm5/staging/simple/")[0].status == 200
        moved, _ = ask(server, "/glm5/staging/simple")
        assert moved.headers["Location"] == "/glm5/staging/simple/"
        for path in ("/staging/simple/", "/glm5", "/glm5staging/simple/", "/glm5/"):
            assert ask(server, path)[0].status == 404


def test_a_request_with_a_body_is_not_taken_for_two(server):
    hidden = b"GET /staging/simple/ HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"GET /absent HTTP/1.1\r\nHost: x\r\nContent-Length: {len(hidden)}\r\n\r\n".encode()
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(head + hidden)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass  # it closed without reading the body
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert b"200 OK" not in answer


def test_a_connection_serves_many_requests(server):
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    connection.connect()
    socket_ = connection.sock
    for path in ("/absent", "/staging/simple/", "/staging/simple/absent/", "/staging/simple/"):
        connection.request("GET", path)
        connection.getresponse().read()
        assert connection.sock is socket_, "a refusal must not cost a new connection"
    connection.close()


def test_it_refuses_uploads(server):
    assert ask(server, "/staging/simple/", "POST")[0].status == 501
    assert ask(server, "/staging/simple/", "DELETE")[0].status == 501


def test_a_slow_client_keeps_no_other_waiting(server, published):
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port)) as slow:
        slow.sendall(b"GET /staging/simple/ HTTP/1.1\r\n")
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(server, "/staging/simple/")[0].status))
            for _ in range(16)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [200] * 16


def test_loopback_unless_told(published):
    process, url, _ = start(published.parents[3])
    with process:
        process.terminate()
    assert urlsplit(url).hostname == "127.0.0.1"


def test_an_address_in_use(published):
    index = published.parents[3]
    with make_server(index, "127.0.0.1", 0) as server:
        with pytest.raises(BuilderError, match="cannot listen") as caught:
            make_server(index, "127.0.0.1", server.server_address[1])
        assert "--port" in str(caught.value)


def test_no_such_index(tmp_path):
    with pytest.raises(BuilderError, match="no such index"):
        make_server(tmp_path / "absent", "127.0.0.1", 0)


def start(index, *options):
    process = subprocess.Popen(
        [sys.executable, "-m", "builder", "serve", "--index", index, "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=isolated_variables(index.parent) | {"PIP_INDEX_URL": "https://public.invalid/simple/"},
        preexec_fn=hear_interrupts,  # noqa: PLW1509
    )  # fmt: skip
    first = process.stdout.readline()
    return process, re.search(r"http://\S+", first)[0], first


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command(published, number):
    """It prints lines that name the running server, and ends in order on a signal."""
    process, url, _ = start(published.parents[3], "--prefix", "/glm5")
    with process:
        lines = [process.stdout.readline().strip() for _ in range(3)]
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
        for path in (parts.path, "/glm5/staging/simple/vllm-glm5/"):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True), "what it prints is there"
        process.send_signal(number)  # while a connection is open
        assert process.wait(10) == 0
        connection.close()
        assert process.stderr.read() == ""
    private, public = url, "https://public.invalid/simple/"
    assert url.endswith("/glm5/staging/simple/")
    wanted = "install vllm-glm5==0.20.2+glm5.1"
    assert lines == [
        "staging:",
        f"pip {wanted} --index-url {private} --extra-index-url {public}",
        f"uv pip {wanted} --index {private} --default-index {public}",
    ]


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_installers_use_json_and_metadata(environment, published, tool):
    """With no HTML page to fall back on, and dependencies read without the wheel."""
    (published.parent / "index.html").unlink()
    with served(published.parents[3]) as server:
        url = f"{server.url}/staging/simple/"
        environment.install_with(tool, url, "vllm-glm5")
    assert environment.version() == "0.20.2+glm5.1"
