"""Serve a directory index over HTTP: PEP 503 and PEP 691 pages by Accept, wheels by Range.

Any web server can serve the tree; this one adds what static ones lack, content negotiation, and
gives out what belongs to a channel alone. It has no TLS and no log-in, and listens on loopback
unless told otherwise.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, ClassVar
from urllib.parse import quote, unquote, urlsplit

from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.alias import alias_name
from builder.console import ending_signals
from builder.errors import BuilderError, PolicyError
from builder.index import STABLE, channels, list_wheels, simple_folder
from builder.install_lines import PublicIndex, install_lines, public_index
from builder.locations import DISTRIBUTION
from builder.simple_pages import HTML_PAGE, JSON_PAGE

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
HTML_TYPE = "application/vnd.pypi.simple.v1+html"
PLAIN_HTML_TYPE = "text/html"

_PAGES = {JSON_TYPE: JSON_PAGE, HTML_TYPE: HTML_PAGE, PLAIN_HTML_TYPE: HTML_PAGE}
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)
_WILDCARDS = ("127.0.0.1", {"0.0.0.0", ""}), ("::1", {"::"})  # noqa: S104 - to compare with
_IMMUTABLE = "max-age=31536000, immutable"


def serve(index: Path, host: str = "127.0.0.1", port: int = 8080, *, prefix: str = "") -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; print the URL and how to install from it.

    :param port: 0 takes a free one.
    :param prefix: the path below which the index is, such as ``/glm5``.
    :raises BuilderError: no such index, or the address cannot be listened on.
    """
    with make_server(index, host, port, prefix=prefix) as server, _stopped_by_signals(server):
        # From here on clients can connect: they wait until the loop below takes them.
        offered = [c for c in channels(index) if (simple_folder(index, c) / HTML_PAGE).is_file()]
        urls = " ".join(f"{_below(server.url, channel)}/simple/" for channel in offered)
        nothing = f"{server.url}/simple/, where nothing is published yet"
        _say(f"serving {index} at {urls or nothing} (Ctrl-C stops)")
        public = public_index()
        for channel in offered:
            _announce(index, channel, server.url, public)
        server.serve_forever(poll_interval=0.2)


def make_server(index: Path, host: str, port: int, *, prefix: str = "") -> IndexServer:
    """Return a server that listens and waits for ``serve_forever``.

    :raises BuilderError: no such index, or the address cannot be listened on.
    """
    if not index.is_dir():
        raise BuilderError(
            "no such index",
            where=str(index),
            next_step="build one (python -m builder --tag TAG), or name it with --index",
        )
    try:
        return IndexServer(index, host, port, prefix)
    except (OSError, OverflowError) as error:
        raise BuilderError(
            f"cannot listen: {error}",
            where=f"{host}:{port}",
            next_step="give another --port (0 takes a free one) or another --host",
        ) from error


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the command's output


def _announce(index: Path, channel: str, url: str, public: PublicIndex) -> None:
    wheels = list_wheels(index, channel)
    versions = [w.version for w in wheels if w.project == DISTRIBUTION]
    if not versions:
        return
    newest = max(versions, key=Version)
    has_alias = alias_name(newest) in {wheel.path.name for wheel in wheels}
    _say(f"{channel}:")
    for line in install_lines(_below(url, channel), newest, public=public, with_alias=has_alias):
        _say(f"  {line}")


def _below(url: str, channel: str) -> str:
    return url if channel == STABLE else f"{url}/{channel}"


@contextmanager
def _stopped_by_signals(server: IndexServer) -> Iterator[None]:
    """End ``serve_forever`` on SIGINT, SIGTERM and SIGHUP, between two requests."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def stop(*_: object) -> None:
        # shutdown() waits for the loop, which runs in the very thread that this interrupts.
        threading.Thread(target=server.shutdown, daemon=True).start()

    numbers = (signal.SIGINT, *ending_signals())
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class IndexServer(ThreadingHTTPServer):
    """One thread per connection; those still sending do not delay the end."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, index: Path, host: str, port: int, prefix: str) -> None:
        self.index = index.resolve()
        self.prefix = tuple(part for part in prefix.split("/") if part)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for a name that nothing here uses.
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """The URL that the index is below, without a slash at the end."""
        host, port = str(self.server_address[0]), self.server_address[1]
        host = next((loopback for loopback, any_ in _WILDCARDS if host in any_), host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{port}{self.path_of()}"

    def path_of(self, *parts: str) -> str:
        return "".join(f"/{quote(part)}" for part in (*self.prefix, *parts))

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        if not isinstance(sys.exception(), ConnectionError):  # a client that went away is no error
            super().handle_error(request, client_address)


class _NotFoundError(Exception):
    pass


class _MovedError(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    server: IndexServer
    protocol_version = "HTTP/1.1"
    server_version = "vllm-glm5-index"
    sys_version = ""
    timeout: ClassVar[float] = 60  # seconds that an idle client keeps its thread
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: an installer asks for each dependency, most of which are elsewhere."""

    def _answer(self) -> None:
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True  # a body nobody reads is not the next request
        try:
            found = self._find()
            if found.is_dir():
                self._send_page(found)
            else:
                self._send_file(found, *_kind(found))
        except _MovedError as moved:
            self._refuse(HTTPStatus.MOVED_PERMANENTLY, {"Location": str(moved)})
        except (_NotFoundError, OSError, ValueError, PolicyError) as error:
            if isinstance(error, ConnectionError | TimeoutError):
                raise
            self._refuse(HTTPStatus.NOT_FOUND)

    def _find(self) -> Path:
        """Return the file, or the folder whose page is meant.

        Nothing but ``[CHANNEL/]simple/[PROJECT/[FILE]]`` is looked for.
        """
        parts = unquote(urlsplit(self.path).path).split("/")[1:]
        known = self.server.prefix
        if tuple(parts[: len(known)]) != known or len(parts) == len(known):
            raise _NotFoundError
        *names, last = parts[len(known) :]
        if last:
            names.append(last)
        if any(not name or name.startswith(".") or set(name) & set("/\\\0") for name in names):
            raise _NotFoundError
        channel = STABLE if names[:1] == ["simple"] else "".join(names[:1])
        simple = simple_folder(self.server.index, channel)  # PolicyError: no such channel
        root = list(simple.relative_to(self.server.index).parts)
        if names[: len(root)] != root:
            raise _NotFoundError
        below = names[len(root) :]

        is_file = bool(last) and (len(below) == 2 or below[-1:] in ([HTML_PAGE], [JSON_PAGE]))
        if not is_file:
            below = [canonicalize_name(name) for name in below]
        # resolve: a symbolic link must not lead out of the index.
        path = simple.joinpath(*below).resolve(strict=True)
        if not path.is_relative_to(self.server.index) or len(below) > 2:
            raise _NotFoundError
        if path.is_dir() == is_file or (len(below) == 2 and not is_file):
            raise _NotFoundError
        if not is_file and (last or [*root, *below] != names):
            # Built from checked names: a path as the client gave it could lead to another host.
            raise _MovedError(f"{self.server.path_of(*root, *below)}/")
        return path

    def _send_page(self, folder: Path) -> None:
        accept = self.headers.get_all("Accept")
        offered = [kind for kind, name in _PAGES.items() if (folder / name).is_file()]
        if not offered:
            raise _NotFoundError
        kind = negotiate(None if accept is None else ",".join(accept), offered)
        if kind is None:
            self._refuse(HTTPStatus.NOT_ACCEPTABLE, {"Vary": "Accept"})
            return
        # An installer asks each time: a page that a build has just replaced counts at once.
        self._send_file(folder / _PAGES[kind], kind, "no-cache", {"Vary": "Accept"})

    def _send_file(
        self, path: Path, kind: str, caching: str, more: dict[str, str] | None = None
    ) -> None:
        with path.open("rb") as file:
            status = _status_of(file)
            tag = f'"{status[1]:x}-{status[0]:x}"'
            headers = {
                "ETag": tag,
                "Last-Modified": formatdate(status[1] // 10**9, usegmt=True),
                "Cache-Control": caching,
                "Accept-Ranges": "bytes",
                **(more or {}),
            }
            known = self.headers.get("If-None-Match", "")
            if known.strip() == "*" or tag in re.findall(r'"[^"]*"', known):
                self._head(HTTPStatus.NOT_MODIFIED, headers)
                return
            self._send_span(file, status[0], kind, headers)

    def _send_span(self, file: IO[bytes], size: int, kind: str, headers: dict[str, str]) -> None:
        asked = None
        condition = self.headers.get("If-Range")
        if condition in {None, headers["ETag"], headers["Last-Modified"]}:
            asked = byte_range(self.headers.get("Range", ""), size)
        if asked is not None and not asked:
            self._refuse(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{size}"}
            )
            return
        span = range(size) if asked is None else asked
        if asked is not None:
            headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{size}"
        headers |= {"Content-Type": kind, "Content-Length": str(len(span))}
        self._head(HTTPStatus.OK if asked is None else HTTPStatus.PARTIAL_CONTENT, headers)
        if self.command != "HEAD" and span:
            self.connection.sendfile(file, span.start, len(span))

    def _refuse(self, status: HTTPStatus, more: dict[str, str] | None = None) -> None:
        body = f"{status.value} {status.phrase}\n".encode()
        headers = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
        self._head(status, headers | (more or {}))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def _status_of(file: IO[bytes]) -> tuple[int, int]:
    """Return size in bytes and time of change in ns of an open file."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _kind(path: Path) -> tuple[str, str]:
    """Return the media type of a file, and how long it may be kept."""
    if path.name == JSON_PAGE:
        return JSON_TYPE, "no-cache"
    if path.name == HTML_PAGE:
        return PLAIN_HTML_TYPE, "no-cache"
    if path.suffix == ".json":
        return "application/json", "no-cache"
    return "application/octet-stream", _IMMUTABLE


def negotiate(accept: str | None, offered: Sequence[str]) -> str | None:
    """Pick the media type by RFC 9110, section 12.5.1; None where the client takes none of them.

    The range that names a type most exactly gives its weight. Where weights are equal, an exactly
    named type goes before a wildcard's, JSON before HTML, and plain HTML where only wildcards
    matched. PEP 691's ``latest`` stands for v1.
    """
    if accept is None or not accept.strip():
        return PLAIN_HTML_TYPE if PLAIN_HTML_TYPE in offered else None
    ranges: dict[str, float] = {}
    for item in accept.lower().replace("simple.latest+", "simple.v1+").split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        weights = [p.partition("=")[2].strip() for p in parameters if p.startswith("q")]
        if re.fullmatch(r"0(\.\d{0,3})?|1(\.0{0,3})?", (weights or ["1"])[0]):
            ranges[name] = float((weights or ["1"])[0])
    if not ranges:  # nothing in it is understood: as if it had not been sent
        return negotiate(None, offered)
    best: tuple[float, int, int] = (0.0, 0, 0)
    picked = None
    for position, kind in enumerate(offered):
        candidates = (kind, f"{kind.partition('/')[0]}/*", "*/*")
        exactness, name = next(
            ((3 - i, name) for i, name in enumerate(candidates) if name in ranges), (0, "")
        )
        preference = 1 if kind == PLAIN_HTML_TYPE and exactness < 3 else -position
        rank = (ranges.get(name, 0.0), exactness, preference)
        if rank[0] > 0 and (picked is None or rank > best):
            best, picked = rank, kind
    return picked


def byte_range(header: str, size: int) -> range | None:
    """Return the one span of bytes asked for, clipped to the file; empty where it has none of it.

    None where all is to be sent: no header, one not understood, or several spans at once, which
    RFC 9110, section 14.2, lets a server ignore.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None or match[0].endswith("=-"):
        return None
    first, last = match[1], match[2]
    if not first:
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    stop = min(size, int(last) + 1) if last else size
    return range(int(first), max(stop, int(first)))
