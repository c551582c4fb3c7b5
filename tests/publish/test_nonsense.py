"""A server that answers nonsense, or never ends, is one error that says so; nothing is sent to it."""

from __future__ import annotations

import dataclasses

import pytest

from builder import answers, connection

from .conftest import as_user
from .nonsense import NESTED, SIMPLE, broken, endless, make_impatient, nonsense, said
from .release import sha256

DEVPI = {"X-Devpi-Server-Version": "6.17.0"}
HTML = b"<html><body>Sign in to the proxy</body></html>"
PAGE = "GET /+simple/vllm-glm5/"


@pytest.fixture
def server():
    with nonsense() as server:
        yield server


@pytest.fixture
def publish(release, tool, server):
    """Publish to it; gives the wheel, and how."""
    wheel = release.wheel()

    def take(body):
        assert sha256(wheel).encode() in body
        server.files[wheel.name] = sha256(wheel)

    server.take = take
    command = ("publish", wheel, "--report", release.report(wheel), "--index", server.url)
    return wheel, lambda code=0: tool.run(*command, code=code, **as_user())


@pytest.fixture
def impatient(monkeypatch):
    make_impatient(monkeypatch)


def failed_well(failed, url, words):
    assert "Traceback" not in failed.error
    assert words in failed.error
    assert url in failed.error
    assert "next: " in failed.error


def test_the_control(publish, server):
    wheel, run = publish
    assert wheel.name in run().output
    assert server.uploads == 1
    assert "was there" in run().output
    assert server.uploads == 1


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("GET /+api", said(HTML, kind="text/html", **DEVPI)),
        ("GET /+api", said([1, 2], **DEVPI)),
        ("GET /+api", said({"result": [1]}, **DEVPI)),
        ("GET /+api", said({"result": None}, **DEVPI)),
        ("GET /+api", said({"result": {"pypisubmit": ""}}, **DEVPI)),
        ("GET /+api", said({"result": {"pypisubmit": "", "simpleindex": 7, "index": 7}}, **DEVPI)),
        ("GET /+api", said(b'{"result": "\xff\xfe\xfa"}', **DEVPI)),
        ("GET /+api", said(NESTED, **DEVPI)),
        ("GET /", said(HTML, kind="text/html", **DEVPI)),
        ("GET /", said("text", **DEVPI)),
        ("GET /", said({"result": {"volatile": 0}}, **DEVPI)),
        ("GET /", said({"result": {"volatile": False, "acl_upload": 7}}, **DEVPI)),
        ("GET /", said({"result": {"volatile": False, "acl_upload": [{"a": 1}]}}, **DEVPI)),
        ("GET /", said({"result": {"volatile": False, "bases": 7}}, **DEVPI)),
        ("GET /", said({"result": {"volatile": False, "bases": "root/pypi"}}, **DEVPI)),
    ],
)
def test_devpi_of_another_shape(publish, server, path, answer):
    server.answers[path] = answer
    failed = publish[1](5)
    failed_well(failed, server.url, "devpi's" if "devpi's" in failed.error else "not the JSON")
    assert server.uploads == 0


def test_a_status_of_who_asks_that_is_none(publish, server):
    server.answers["GET /+api"] = said(server.api(authstatus=7), **DEVPI)
    failed_well(publish[1](5), server.url, "'authstatus' is a int, not a list")
    assert server.uploads == 0


@pytest.mark.parametrize("base", [said(HTML, kind="text/html"), said({"result": 7}), said({}, 400)])
def test_what_is_inherited_is_not_guessed(publish, server, base):
    """It decides whether all that is staged is released."""
    server.answers["GET /"] = said(server.settings(bases=["team/base"]), **DEVPI)
    server.answers["GET /team/base"] = base
    failed_well(publish[1](5), f"{server.root}team/base", "not ")
    assert server.uploads == 0
    server.answers["GET /team/base"] = said({}, 404)  # the control: it was deleted since
    publish[1]()


def test_bases_without_an_end(publish, server):
    server.answers["GET /"] = said(server.settings(bases=["team/0"]), **DEVPI)
    for n in range(200):
        answer = said(server.settings(bases=[f"team/{n + 1}"]))
        server.answers[f"GET /team/{n}"] = answer
    failed_well(publish[1](5), server.root, "inherits more than 100")
    server.answers["GET /team/50"] = said(server.settings(bases=["team/0"]))  # the control: it ends
    publish[1]()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said(HTML, kind=SIMPLE), "not a page"),
        (said([], kind=SIMPLE), "not a page"),
        (said({"files": {}}, kind=SIMPLE), "not a page"),
        (said(b"\xff\xfe\xfa", kind=SIMPLE), "not a page"),
        (said(NESTED, kind=SIMPLE), "not a page"),
        (said(b"%PDF", kind="application/pdf"), "not a page"),
        (said(b"<![nonsense>", kind="text/html"), "not a page"),
        (said(b'<a href="http://[">x</a>', kind="text/html"), "not a page"),
        (said(HTML, kind="text/html", **{"Content-Encoding": "gzip"}), "ContentDecodingError"),
        (said(HTML, 429, kind="text/html"), "answers 429"),
        (said(HTML, 400, kind="text/html"), "answers 400"),
        (said(b"", 302, Location="/team/stable/+simple/vllm-glm5/"), "redirects"),
        (said(b'<a href="x">vllm_glm5-7.whl</a>', kind="text/html"), "no file name of a wheel"),
        (broken, "gives no answer"),
    ],
)
def test_a_page_that_is_none(publish, server, answer, words):
    server.answers[PAGE] = answer
    failed_well(publish[1](5), f"{server.url}+simple/vllm-glm5/", words)
    assert server.uploads == 0
    del server.answers[PAGE]  # the control
    publish[1]()


@pytest.mark.parametrize("shown", ["nonsense", "../../" + "a" * 58, "a" * 63])
def test_a_hash_that_is_none(publish, server, shown):
    wheel, run = publish
    server.files[wheel.name] = shown
    failed_well(run(5), server.url, repr(shown))
    assert server.uploads == 0
    server.files[wheel.name] = sha256(wheel)
    run()


@pytest.mark.parametrize("path", ["GET /", "GET /+api", PAGE])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless(**DEVPI), "does not end: no page has 1 MiB"),
        (endless(piece=b" ", pause=0.02, **DEVPI), "is stuck"),
        (endless(status=302, Location="/", **DEVPI), "does not end"),
    ],
    ids=["large", "slow", "redirect"],
)
def test_an_answer_without_an_end(publish, server, impatient, path, answer, words):
    server.answers[path] = answer
    failed_well(publish[1](5), server.url, words)
    assert server.uploads == 0


def test_a_large_page_and_a_late_one_are_read(publish, server, monkeypatch):
    """The controls: what ends within the bounds is a page, however it comes."""
    wheel, run = publish
    server.files[wheel.name] = sha256(wheel)
    monkeypatch.setattr(answers, "PAGE", dataclasses.replace(answers.PAGE, seconds=0.5, least=1000))
    parts = said(server.page(description="x" * 3_000_000), kind=SIMPLE)
    server.answers[PAGE] = parts
    assert "was there" in run().output

    def late(handler):
        handler.server.end.wait(0.4)
        parts(handler)

    server.answers[PAGE] = late
    assert "was there" in run().output


@pytest.mark.parametrize("piece", [(b"x" * 65536, 0.0), (b"x", 0.02)], ids=["large", "slow"])
def test_an_upload_whose_answer_has_no_end(publish, server, impatient, piece):
    """The wheel is there all the same, and its page says so."""
    server.answers["POST"] = endless("text/plain", *piece)
    publish[1]()
    assert server.uploads == 1


def test_an_upload_whose_answer_has_no_end_and_is_not_listed(publish, server, impatient):
    server.take = lambda body: None
    server.answers["POST"] = endless("text/plain")
    failed_well(publish[1](42), server.url, "does not end")
    assert server.uploads == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said(b"", 302, Location="http://[no-url"), "broke off: ValueError"),
        (said(b"x" * 500_000, 400), "answers 400"),
        (said(b"", 400, kind="text/plain; charset=idna"), "answers 400"),
        (said(HTML, 400, **{"Content-Encoding": "gzip"}), "broke off"),
        (broken, "broke off"),
    ],
)
def test_an_answer_to_an_upload_that_is_none(publish, server, answer, words):
    server.take = lambda body: None
    server.answers["POST"] = answer
    failed = publish[1](42)
    failed_well(failed, server.url, words)
    assert len(failed.error) < 2000
    assert server.uploads == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless("application/zip"), "does not end: no file has 2 MiB"),
        (endless("application/zip", b"x", 0.02), "is stuck"),
        (broken, "gives no answer"),
        (said(b"", 302, Location="#"), "redirects"),
    ],
    ids=["large", "slow", "broken", "circle"],
)
def test_a_file_without_an_end(publish, server, impatient, answer, words):
    """A page without hashes: the file itself has to tell."""
    wheel, run = publish
    server.files[wheel.name] = ""
    server.answers[f"GET /+f/{wheel.name}"] = answer
    failed_well(run(5), wheel.name, words)
    server.answers[f"GET /+f/{wheel.name}"] = said(wheel.read_bytes())  # the control
    assert "was there" in run().output
    assert server.uploads == 0


def test_fewer_redirects_than_a_circle_has(publish, server):
    wheel, run = publish
    for n in range(connection._REDIRECTS - 1):
        at = PAGE if n == 0 else f"GET /{n}"
        server.answers[at] = said(b"", 302, Location=f"/team/stable/{n + 1}")
    server.files[wheel.name] = sha256(wheel)
    server.answers[f"GET /{connection._REDIRECTS - 1}"] = said(server.page(), kind=SIMPLE)
    assert "was there" in run().output
