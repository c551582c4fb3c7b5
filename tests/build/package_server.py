"""A package index on loopback that can misbehave: HTML and JSON pages, ranges, credentials."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import quote, unquote


@dataclass
class Fault:
    """What happens to one request for a file; used up by it unless ``always``.

    :param cut: send so many bytes, then close the connection.
    :param status: answer with this status instead.
    :param flip: send bytes that differ in the last one.
    :param rate: bytes per second.
    :param shorten: claim and send so many bytes less, as if the file were shorter.
    :param nameless: leave Content-Length out.
    """

    cut: int | None = None
    status: int | None = None
    flip: bool = False
    rate: float | None = None
    shorten: int = 0
    nameless: bool = False
    always: bool = False


@dataclass
class Served:
    """One request for a file: the range asked for and the bytes that were sent."""

    name: str
    range: str | None
    sent: int = 0
    status: int = 200


@dataclass
class PackageServer:
    """The index; ``files`` maps project names to their files, by name."""

    files: dict[str, dict[str, bytes]]
    json_pages: bool = False
    with_hashes: bool = True
    ranges: bool = True
    absolute_links: bool = False
    credentials: str | None = None
    page_status: int | None = None
    yanked: set[str] = field(default_factory=set)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    pages: int = 0

    def __post_init__(self) -> None:
        self.original = {project: dict(files) for project, files in self.files.items()}

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.index = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}/simple/"

    def bytes_sent(self, name: str) -> int:
        return sum(item.sent for item in self.served if item.name == name)

    def reset(self) -> None:
        """Behave again, and hold the files of the beginning."""
        self.files = {project: dict(files) for project, files in self.original.items()}
        self.json_pages, self.with_hashes, self.ranges = False, True, True
        self.absolute_links, self.credentials, self.page_status, self.pages = False, None, None, 0
        self.yanked.clear()
        self.faults.clear()
        self.served.clear()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    index: PackageServer

    def handle_error(self, request, client_address):
        """A client that goes away in the middle is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        index = self.server.index
        if index.credentials is not None:
            wanted = "Basic " + base64.b64encode(index.credentials.encode()).decode()
            if self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        if match := re.fullmatch(r"/simple/([^/]+)/", self.path):
            self._page(match[1])
        elif match := re.fullmatch(r"/files/([^/]+)", self.path):
            self._file(unquote(match[1]), body=body)
        else:
            self.send_error(404)

    def _page(self, project: str) -> None:
        index = self.server.index
        index.pages += 1
        if index.page_status is not None:
            self.send_error(index.page_status)
            return
        if project not in index.files:
            self.send_error(404)
            return
        base = f"http://{index.host}/" if index.absolute_links else "../../"
        rows = [
            (name, f"{base}files/{quote(name)}", hashlib.sha256(data).hexdigest(), len(data))
            for name, data in index.files[project].items()
        ]
        if index.json_pages:
            kind = "application/vnd.pypi.simple.v1+json"
            page = json.dumps(
                {
                    "meta": {"api-version": "1.1"},
                    "name": project,
                    "versions": [],
                    "files": [
                        {
                            "filename": name,
                            "url": url,
                            "size": size,
                            "hashes": {"sha256": digest} if index.with_hashes else {},
                            "yanked": name in index.yanked,
                        }
                        for name, url, digest, size in rows
                    ],
                }
            )
        else:
            kind = "text/html"
            links = [
                f'<a href="{url}{f"#sha256={digest}" if index.with_hashes else ""}"'
                f"{' data-yanked' if name in index.yanked else ''}>{name}</a><br>"
                for name, url, digest, _ in rows
            ]
            page = "<!DOCTYPE html><html><body>\n" + "\n".join(links) + "</body></html>"
        data = page.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, name: str, *, body: bool) -> None:
        index = self.server.index
        data = next((files[name] for files in index.files.values() if name in files), None)
        if data is None:
            self.send_error(404)
            return
        fault = self._fault(name) if body else Fault()
        entry = Served(name, self.headers.get("Range"))
        if body:
            index.served.append(entry)
        if fault.status is not None:
            entry.status = fault.status
            self.send_error(fault.status)
            return
        if fault.flip:
            data = data[:-1] + bytes([data[-1] ^ 1])
        data = data[: len(data) - fault.shorten]
        start = 0
        if entry.range and index.ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", entry.range)[1])
            if start >= len(data):
                entry.status = 416
                self.send_error(416)
                return
            entry.status = 206
        self.send_response(entry.status)
        if entry.status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if not fault.nameless:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if body:
            self._send(data[start:], fault, entry)

    def _fault(self, name: str) -> Fault:
        waiting = self.server.index.faults.get(name, [])
        if not waiting:
            return Fault()
        return waiting[0] if waiting[0].always else waiting.pop(0)

    def _send(self, data: bytes, fault: Fault, entry: Served) -> None:
        if fault.cut is not None:
            data = data[: fault.cut]
        step = 1 << 16
        with suppress(ConnectionError):
            for position in range(0, len(data), step):
                chunk = data[position : position + step]
                if fault.rate:
                    time.sleep(len(chunk) / fault.rate)
                self.wfile.write(chunk)
                entry.sent += len(chunk)
