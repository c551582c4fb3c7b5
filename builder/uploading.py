"""A wheel on its way to a package server: whole and approved, or not at all.

twine makes the request. What leaves is hashed as it leaves, so that no copy of 250 MB has to keep it
from being exchanged; where it is not what was approved, its last bytes stay here, and a request that
ends early puts nothing on a server's pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from builder import answers, digests
from builder.connection import (
    DENIED,
    TIMEOUT,
    Connection,
    authentication,
    certificates,
    denied,
)
from builder.console import is_terminal
from builder.errors import AuditError, PackageIndexError, UploadFailedError
from builder.wheel_file import read_metadata

if TYPE_CHECKING:
    import requests
    from twine.package import PackageFile

    from builder.remote_index import Server

ANSWER_TIMEOUT = 300  # devpi hashes the whole wheel before it answers
_CHUNK = 1 << 16  # four times urllib3's: each has its price, in twine's layers above all


def upload(wheel: Path, sha256: str, server: Server, connection: Connection) -> None:
    """Send one wheel with twine.

    :raises AuditError: it has another sha256 by now; the server lists nothing of it.
    :raises UploadRefusedError: a wrong password, or no right to upload.
    :raises UploadFailedError: the connection broke, or another answer than "done".
    """
    import requests  # noqa: PLC0415 - slow to import
    from twine.repository import Repository  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    who = connection.credentials
    changed = _changed(wheel, server)
    if digests.sha256_of(wheel) != sha256:
        raise changed
    with contextlib.ExitStack() as stack:
        # twine prints progress where results belong
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        repository = Repository(server.url, None, None, disable_progress_bar=not is_terminal())
        stack.callback(repository.close)
        repository.session.auth = authentication(who)
        repository.set_certificate_authority(certificates())
        _send_only(repository.session, wheel.stat().st_size, sha256, changed)
        try:
            # Once: twine would send 250 MB five times to a server that answers 500.
            answer = repository.upload(_package(wheel, sha256), max_redirects=1)
        # requests lets some through: urllib3's, and ValueError of a Location that is no URL.
        except (requests.RequestException, HTTPError, ValueError) as error:
            raise UploadFailedError(
                f"the upload broke off: {type(error).__name__}",
                where=server.url,
                details=(str(error)[:300],),
                next_step="run the command again; what was sent does not count",
            ) from error
        except PackageIndexError as error:  # the wheel may be there: its page says so
            raise UploadFailedError(
                error.what, where=error.where, next_step=error.next_step
            ) from error
    if answer.status_code in DENIED:
        raise denied(server.url, answer.status_code, who)
    if answer.status_code != 200:
        raise UploadFailedError(
            f"the server answers {answer.status_code} {answer.reason}",
            where=server.url,
            details=tuple(line[:300] for line in _said(answer).splitlines()[:3]),
            next_step=_remedy(server, answer),
        )


def _said(answer: requests.Response) -> str:
    """Return an answer's text; its charset is the server's word, and may be none of a text."""
    return answer.content.decode(errors="replace").strip()


def _package(wheel: Path, sha256: str) -> PackageFile:
    """Describe a wheel to twine, which would hash all of it in a slow way, for an unused hash too."""
    from twine.package import PackageFile  # noqa: PLC0415 - slow to import

    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch) / wheel.name
        with wheel.open("rb") as file, zipfile.ZipFile(described, "w") as archive:
            archive.writestr("wheel.dist-info/METADATA", read_metadata(file, wheel))
        package = PackageFile.from_filename(str(described), comment=None)
    package.filename = str(wheel)
    package.sha2_digest = sha256
    package.blake2_256_digest = None
    return package


def _send_only(session: requests.Session, size: int, sha256: str, changed: AuditError) -> None:
    """Let nothing leave but that file, and give up on a server that is silent: twine never does."""
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - slow to import

    class Watched(HTTPAdapter):
        def send(
            self,
            request: requests.PreparedRequest,
            *arguments: Any,  # noqa: ANN401
            **options: Any,  # noqa: ANN401
        ) -> requests.Response:
            request.body = _checked(request.body, request.headers, size, sha256, changed)
            options["timeout"] = (TIMEOUT, ANSWER_TIMEOUT)
            return answers.bounded(super().send(request, *arguments, **options))

    for scheme in ("https://", "http://"):
        session.mount(scheme, Watched())


def _checked(
    body: Any,  # noqa: ANN401 - twine's own, which requests types as bytes
    headers: Mapping[str, Any],
    size: int,
    sha256: str,
    changed: AuditError,
) -> Iterator[bytes]:
    """Pass a form on whose last part is the file; keep its end where the file is another one."""
    boundary = headers["Content-Type"].partition("boundary=")[2]
    closing = f"\r\n--{boundary}--\r\n".encode()
    end = int(headers["Content-Length"]) - len(closing)
    begin = end - size
    digest, at, chunk = hashlib.sha256(), 0, b""
    while at < end and (chunk := body.read(_CHUNK)):
        digest.update(chunk[max(begin - at, 0) : max(end - at, 0)])
        at += len(chunk)
        if at < end:
            yield chunk
    # A file that grew goes on where the form should end; of one that shrank, chunk is empty.
    kept = len(chunk) - max(at - end, 0)
    rest = chunk[kept:] + body.read(len(closing) + 1)
    if (digest.hexdigest(), rest) != (sha256, closing):
        raise changed
    yield chunk[:kept] + rest


def _changed(wheel: Path, server: Server) -> AuditError:
    kept = "" if server.loses_cut_uploads else f", delete {wheel.name} on the server if it has it"
    return AuditError(
        "the wheel changed while it was published",
        where=str(wheel),
        next_step=f"let its build finish{kept}, then publish again",
    )


def _remedy(server: Server, answer: requests.Response) -> str:
    if answer.status_code == 413:
        return (
            "let the server take larger files: --max-request-body-size of devpi-server, "
            "client_max_body_size of an nginx before it; then run the command again"
        )
    if answer.is_redirect:
        there = urljoin(server.url, answer.headers["Location"])
        return f"if that is the server, give the URL that it names: --index {there}"
    return "run the command again; where another publisher was quicker, it says so"
