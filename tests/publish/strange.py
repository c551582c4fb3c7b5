"""A server that looks like a pypiserver, and answers an upload as a test wants it to."""

from __future__ import annotations

import contextlib
import http.server
import threading

PAGE = b"<html><body>Please sign in to this pypiserver</body></html>"


class Strange(http.server.ThreadingHTTPServer):
    """``answer`` is a status, or ``half`` (reads half of it and hangs up), or ``silence``.

    ``page`` is what it answers to who asks for a project: status, media type, text.
    """

    daemon_threads = True

    def __init__(self, answer, location="", page=(404, "text/html", "")):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.location = location
        self.page = page
        self.requests: list[tuple[str, str]] = []
        self.wheels = 0
        self.end = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("Authorization", "")))
        if "simple" in self.path:
            status, kind, text = self.server.page
            self.reply(status, kind, text.encode())
        else:
            self.reply(200)

    def do_POST(self):
        self.server.requests.append((self.path, self.headers.get("Authorization", "")))
        size = int(self.headers["Content-Length"])
        if "multipart" not in self.headers["Content-Type"]:  # asked who may upload
            self.rfile.read(size)
            self.reply(200)
            return
        self.server.wheels += 1
        answer = self.server.answer
        if answer == "half":
            self.rfile.read(size // 2)
            self.close_connection = True
            return
        self.rfile.read(size)
        if answer == "silence":
            self.server.end.wait()
            self.close_connection = True
            return
        self.reply(answer)

    def reply(self, status, kind="text/html", body=PAGE):
        self.send_response(status)
        if status in {302, 307}:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def serving(server):
    """Answer until the end; what waits for ``server.end`` goes on then."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.end.set()
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def strange(answer, location="", context=None, **options):
    """Run it; ``context`` makes it speak TLS."""
    with Strange(answer, location, **options) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
            server.url = server.url.replace("http:", "https:")
        with serving(server):
            yield server
