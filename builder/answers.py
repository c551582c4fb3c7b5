"""Answers of a server that end, and are of the shape that was asked for.

requests reads a body for as long as it comes, and its timeout counts silence alone: a page without
an end fills the memory, and one at a byte a second lasts for ever. What comes whole may still be
anything: a proxy's page to sign in at, another version's JSON, an error with the status 200.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.credentials import redacted
from builder.errors import PackageIndexError

if TYPE_CHECKING:
    import requests
    from pypi_simple import ProjectPage
    from requests.adapters import HTTPAdapter

_CHUNK = 1 << 20
_CHECK_URL = "check the URL of the index"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Bound:
    """What a body may be at most, and what has to come of it at least.

    :param size: bytes.
    :param least: bytes that come in ``seconds`` of waiting, or the server counts as stuck.
    """

    what: str
    size: int
    seconds: float
    least: int


# The page of a project that is built every night has some MB; a parser takes a second for each.
PAGE = Bound("page", size=64 << 20, seconds=60, least=60 << 10)
# A proxy that looks for viruses lets some bytes through from time to time, and then all the rest.
FILE = Bound("file", size=16 << 30, seconds=600, least=60 << 10)


def chunks(raw: Any, url: str, bound: Bound, *, decode: bool = True) -> Iterator[bytes]:  # noqa: ANN401
    """Yield a body's bytes as they come: who waits for full chunks cannot see that it is stuck.

    :param raw: urllib3's response; its errors are raised as they are.
    :raises PackageIndexError: there is no end to it, or hardly anything comes.
    """
    size, waited, before = 0, 0.0, 0
    while True:
        began = time.monotonic()
        chunk = raw.read1(_CHUNK, decode_content=decode)
        waited += time.monotonic() - began
        if not chunk:
            return
        size += len(chunk)
        what = ""
        if size > bound.size:
            what = f"does not end: no {bound.what} has {_amount(bound.size)}"
        elif waited >= bound.seconds:
            if size - before < bound.least:
                what = (
                    f"is stuck: {size - before} bytes came in the last {waited:.0f} seconds, "
                    f"{size} in all"
                )
            waited, before = 0.0, size
        if what:
            raw.close()  # what still comes is nobody's
            raise nonsense(
                url,
                f"the answer {what}",
                "check the URL, the network and the server's log, then run the command again",
            )
        yield chunk


def _amount(size: int) -> str:
    return f"{size >> 30} GiB" if size >> 30 else f"{size >> 20} MiB"


class _Bounded:
    """urllib3's response as requests reads it, with an end."""

    def __init__(self, raw: Any, url: str) -> None:  # noqa: ANN401
        self._raw = raw
        self._url = url

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._raw, name)

    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        return chunks(self._raw, self._url, PAGE)

    def read(self, *_: object, **__: object) -> bytes:
        """Return nothing: requests drops what is left of a redirect that it could not decode."""
        return b""


def bounded(response: requests.Response, *, stream: bool = False) -> requests.Response:
    """Give a response's body an end, where it is not its caller who reads it.

    :param stream: the caller does; requests itself reads what comes with a redirect all the same.
    """
    if not stream or response.is_redirect:
        response.raw = _Bounded(response.raw, response.url)
    return response


def adapter(**options: Any) -> HTTPAdapter:  # noqa: ANN401
    """Return what makes a session's requests, so that all that it reads by itself has an end."""
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - slow to import

    class Bounding(HTTPAdapter):
        def send(
            self,
            request: requests.PreparedRequest,
            stream: bool = False,
            *arguments: Any,  # noqa: ANN401
            **others: Any,  # noqa: ANN401
        ) -> requests.Response:
            answer = super().send(request, stream, *arguments, **others)
            return bounded(answer, stream=stream)

    return Bounding(**options)


def nonsense(url: str, what: str, next_step: str = _CHECK_URL) -> PackageIndexError:
    """Return the error for an answer of the wrong kind."""
    return PackageIndexError(what, where=redacted(url), next_step=next_step)


def project_page(
    answer: requests.Response, project: str, next_step: str = _CHECK_URL
) -> ProjectPage:
    """Read a project's page, HTML or JSON.

    :raises PackageIndexError: it is none.
    """
    from pypi_simple import ProjectPage  # noqa: PLC0415 - slow to import

    try:
        return ProjectPage.from_response(answer, project)
    except Exception as error:  # parsers of HTML, JSON, URLs and versions: each raises its own
        said = redacted(str(error)).strip() or type(error).__name__
        what = f"not a page of PEP 503 or 691: {said[:300]}"
        raise nonsense(answer.url, what, next_step) from error


def sha256_of(hashes: dict[str, str], name: str, url: str) -> str | None:
    """Return the sha256 that a page has of a file; None where it has another hash or none.

    :raises PackageIndexError: what it has is none.
    """
    found = hashes.get("sha256", "").lower()
    if found and not _SHA256.fullmatch(found):
        raise nonsense(url, f"the page has {found[:80]!r} as the sha256 of {name[:200]}")
    return found or None


def json_object(answer: requests.Response) -> dict[str, Any]:
    """Return the JSON object that an answer is.

    :raises PackageIndexError: it is something else.
    """
    try:
        found = answer.json()
    except (ValueError, RecursionError) as error:
        kind = answer.headers.get("Content-Type", "nothing that it names")[:80]
        what = f"not the JSON that was asked for: {type(error).__name__} ({kind})"
        raise nonsense(answer.url, what) from error
    if not isinstance(found, dict):
        raise nonsense(answer.url, f"not the JSON that was asked for: a {type(found).__name__}")
    return found
