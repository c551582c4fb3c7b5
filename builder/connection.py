"""Requests to a package server: credentials for it alone, redirects on it alone, errors by cause."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urljoin, urlsplit

from builder import answers
from builder.credentials import Credentials
from builder.errors import PackageIndexError, UploadRefusedError

if TYPE_CHECKING:
    import requests
    from requests.auth import HTTPBasicAuth

DENIED = (401, 403)
TIMEOUT = 60  # seconds without an answer
_REDIRECTS = 5  # requests for one answer


class Connection:
    """Requests to one host, with the credentials for it and for nobody else."""

    def __init__(self, url: str, credentials: Credentials | None) -> None:
        import requests  # noqa: PLC0415 - slow to import

        self.credentials = credentials
        self._origin = urlsplit(url)[:2]
        self._session = requests.Session()
        self._session.verify = certificates() or True
        self._session.auth = authentication(credentials)
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, answers.adapter())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def ask(self, method: str, url: str, **options: Any) -> requests.Response:  # noqa: ANN401
        """Send a request; follow redirects on the host only.

        pypiserver redirects to the public index for what it lacks, which is no answer to us.

        :raises PackageIndexError: no answer, one without an end, one with a status of 500 and more,
            or redirects in a circle.
        :raises UploadRefusedError: the server does not know us, or denies it to us.
        """
        import requests  # noqa: PLC0415 - slow to import
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        try:
            for _ in range(_REDIRECTS):
                answer = self._session.request(
                    method, url, timeout=TIMEOUT, allow_redirects=False, **options
                )
                target = urljoin(url, answer.headers.get("Location", ""))
                if not answer.is_redirect or urlsplit(target)[:2] != self._origin:
                    break
                url = target
            else:
                raise answers.nonsense(url, f"{_REDIRECTS} redirects one after the other")
        # requests lets some through: urllib3's, and ValueError of a Location that is no URL.
        except (requests.RequestException, HTTPError, ValueError) as error:
            raise unreachable(url, error) from error
        if answer.status_code in DENIED:
            raise denied(url, answer.status_code, self.credentials)
        if answer.status_code >= 500:
            raise PackageIndexError(
                f"the server answers {answer.status_code} {answer.reason}",
                where=url,
                next_step="look into the server's log, then run the command again",
            )
        return answer


def authentication(credentials: Credentials | None) -> HTTPBasicAuth | None:
    """Return what a session sends: UTF-8 (RFC 7617); requests itself knows Latin-1 only.

    What the environment holds in another encoding is sent as it stands there.
    """
    from requests.auth import HTTPBasicAuth  # noqa: PLC0415 - slow to import

    if credentials is None:
        return None
    parts = (credentials.username, credentials.password)
    return HTTPBasicAuth(*(part.encode(errors="surrogateescape") for part in parts))


def certificates() -> str | None:
    """Return the file of certificates that the user configured for twine, requests or pip."""
    names = ("TWINE_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def denied(url: str, status: int, credentials: Credentials | None) -> UploadRefusedError:
    """Return the error for 401 and 403, which says whose credentials were tried."""
    who = "nobody: no credentials are configured for this URL"
    if credentials is not None:
        who = f"{credentials.username} (from {credentials.source})"
    return UploadRefusedError(
        f"the server answers {status}: a wrong password, or no right to do this",
        where=url,
        details=(f"asked as  {who}",),
        next_step="set TWINE_USERNAME and TWINE_PASSWORD, or write ~/.netrc, or run: "
        "keyring set URL USER; the server's administrator gives the right to upload",
    )


def unreachable(url: str, error: Exception) -> PackageIndexError:
    """Return the error for a connection that could not be made, or broke."""
    if said := re.search(r"\[SSL[^\]]*\][^(']*", str(error)):
        return PackageIndexError(
            "no safe connection to the package server (TLS)",
            where=url,
            details=(said[0].strip(),),
            next_step="name the file of the authority that signed its certificate in TWINE_CERT; "
            "or check the URL, where the words above are not about a certificate",
        )
    return PackageIndexError(
        f"the package server gives no answer: {type(error).__name__}",
        where=url,
        next_step="check the URL and that the server runs, then run the command again",
    )
