"""A server that says it is devpi, and answers some paths as no devpi does."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time

from builder import answers
from tests.publish.strange import serving

NESTED = b"[" * 200_000  # deeper than a parser goes
SIMPLE = "application/vnd.pypi.simple.v1+json"


def said(value, status=200, kind="application/json", **headers):
    """Return an answer that is whole: a value as JSON, or bytes as they are."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = {"Content-Type": kind, "Content-Length": str(len(body))} | headers

    def write(handler):
        handler.start(status, head)
        handler.wfile.write(body)

    return write


def endless(kind=SIMPLE, piece=b" " * 65536, pause=0.0, status=200, **headers):
    """Return a chunked answer whose last chunk never comes."""

    def write(handler):
        handler.start(status, {"Content-Type": kind, "Transfer-Encoding": "chunked"} | headers)
        while not handler.server.end.is_set():
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            time.sleep(pause)

    return write


def broken(handler):
    """Write less than was announced, and hang up."""
    handler.start(200, {"Content-Type": SIMPLE, "Content-Length": "1000"})
    handler.wfile.write(b"{")
    handler.close_connection = True


class Nonsense(http.server.ThreadingHTTPServer):
    """The index team/stable of a devpi server; ``answers`` replaces those of some paths."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = f"http://127.0.0.1:{self.server_port}/"
        self.url = f"{self.root}team/stable/"
        self.end = threading.Event()
        self.files: dict[str, str] = {}
        self.uploads = 0
        self.requests: list[str] = []
        self.answers = {}

    def api(self, **changed):
        return {
            "result": {
                "pypisubmit": self.url,
                "simpleindex": f"{self.url}+simple/",
                "index": self.url.rstrip("/"),
                "authstatus": ["ok", "publisher", []],
            }
            | changed
        }

    def settings(self, **changed):
        right = {"type": "stage", "volatile": False, "acl_upload": ["publisher"], "bases": []}
        return {"type": "indexconfig", "result": right | changed}

    def page(self, project="vllm-glm5", **changed):
        files = [
            {"filename": name, "url": f"{self.url}+f/{name}", "hashes": {"sha256": digest}}
            for name, digest in self.files.items()
        ]
        return {"meta": {"api-version": "1.1"}, "name": project, "files": files} | changed

    def right(self, path):
        devpi = {"X-Devpi-Server-Version": "6.17.0"}
        if path.endswith("+api"):
            return said(self.api(), **devpi)
        if "+simple" in path:
            return said(self.page(), kind=SIMPLE) if self.files else said({}, 404)
        return said(self.settings(), **devpi)

    def handle_error(self, request, client_address):
        """Who has read enough goes away in the middle."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def start(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self):
        path = self.path.removeprefix("/team/stable")
        self.server.requests.append(f"{self.command} {path}")
        self.server.answers.get(f"{self.command} {path}", self.server.right(path))(self)

    do_HEAD = do_GET  # noqa: N815 - the name that the module looks for

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.uploads += 1
        self.server.take(body)
        self.server.answers.get("POST", said({}))(self)


def make_impatient(monkeypatch):
    """Set bounds that a test can wait for."""
    monkeypatch.setattr(answers, "PAGE", answers.Bound("page", 1 << 20, 0.5, 1000))
    monkeypatch.setattr(answers, "FILE", answers.Bound("file", 2 << 20, 0.5, 1000))


@contextlib.contextmanager
def nonsense():
    with Nonsense() as server, serving(server):
        yield server
