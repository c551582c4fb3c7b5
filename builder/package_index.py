"""The package index that pip is configured for: which files a release has, and their bytes.

pip's own configuration decides (its files, ``PIP_*`` variables); netrc and credentials in the URL
are honoured by requests. pypi-simple reads the pages, HTML or JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit, urlunsplit

from builder import answers
from builder.credentials import redacted
from builder.errors import PackageIndexError
from builder.pip_configuration import pip_configuration

if TYPE_CHECKING:
    import requests
    from pypi_simple import DistributionPackage, ProjectPage
    from urllib3 import BaseHTTPResponse
    from urllib3.util.retry import Retry

_CONFIGURED = "check `python -m pip config list`, then run the command again"
ATTEMPTS = 4  # connections tried for one request before the index counts as unreachable
RETRY_AFTER = 60  # seconds that an index may ask us to wait before the next one


@dataclass(frozen=True)
class IndexSettings:
    """pip's settings that concern us: index URLs in order, CA bundle, seconds before a timeout."""

    urls: tuple[str, ...]
    ca_bundle: str | None
    timeout: float


@dataclass(frozen=True)
class ReleaseFile:
    """A file of a release as the index lists it; ``size`` is None where the page has none."""

    name: str
    url: str
    sha256: str | None
    size: int | None
    requires_python: str | None
    is_yanked: bool = False


@cache
def pip_settings() -> IndexSettings:
    """Return pip's settings, asked from pip once a run.

    :raises PackageIndexError: no index of it is one over HTTP.
    """
    values = pip_configuration()
    from pypi_simple import PYPI_SIMPLE_ENDPOINT  # noqa: PLC0415 - slow to import

    configured = [values.get("index-url") or PYPI_SIMPLE_ENDPOINT]
    configured += values.get("extra-index-url", "").split()
    urls = tuple(url for url in configured if url.startswith(("http://", "https://")))
    if not urls:
        raise PackageIndexError(
            "pip is configured for no index over HTTP",
            where=", ".join(redacted(url) for url in configured),
            next_step="set PIP_INDEX_URL to one, then run the command again",
        )
    timeout = values.get("default-timeout", values.get("timeout", "30"))
    if not re.fullmatch(r"\d+(\.\d+)?", timeout):
        raise PackageIndexError(
            f"pip is configured for a timeout of {timeout!r}, which is no number of seconds",
            next_step="correct it: `python -m pip config list` shows it",
        )
    return IndexSettings(urls=urls, ca_bundle=values.get("cert"), timeout=float(timeout))


@contextmanager
def _session(settings: IndexSettings) -> Iterator[requests.Session]:
    import requests  # noqa: PLC0415 - slow to import

    with requests.Session() as session:
        for scheme in ("https://", "http://"):
            session.mount(scheme, answers.adapter(max_retries=_retry()))
        if settings.ca_bundle:
            session.verify = settings.ca_bundle
        yield session


def _retry() -> Retry:
    from urllib3.util.retry import Retry  # noqa: PLC0415 - slow to import

    class Impatient(Retry):
        def increment(
            self,
            method: str | None = None,
            url: str | None = None,
            response: BaseHTTPResponse | None = None,
            *arguments: Any,  # noqa: ANN401
            **options: Any,  # noqa: ANN401
        ) -> Self:
            if response is not None:
                response.close()  # urllib3 would read all of it first, whether it ends or not
            return super().increment(method, url, response, *arguments, **options)

        def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
            asked = super().get_retry_after(response)
            return None if asked is None else min(asked, RETRY_AFTER)

    return Impatient(total=ATTEMPTS - 1, backoff_factor=0.3, status_forcelist=[429, 502, 503, 504])


def _unreachable(url: str, error: Exception) -> PackageIndexError:
    return PackageIndexError(
        f"the package index gives no answer that helps: {type(error).__name__}",
        where=redacted(url),
        details=(redacted(str(error))[:300],),
        next_step="check the network and `python -m pip config list`, then run the command again",
    )


def _project_pages(project: str, settings: IndexSettings) -> Iterator[tuple[str, ProjectPage]]:
    """Give the page of each index that has the project, with the index's URL.

    :raises PackageIndexError: an index does not answer, or with something else.
    """
    import requests  # noqa: PLC0415 - slow to import
    from pypi_simple import ACCEPT_ANY, PyPISimple  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    for url in settings.urls:
        with _session(settings) as session, PyPISimple(url, session=session) as client:
            try:
                page = client.get_project_url(project)
                answer = session.get(page, timeout=settings.timeout, headers={"Accept": ACCEPT_ANY})
                if answer.status_code == 404:
                    continue
                answer.raise_for_status()
            except (requests.RequestException, HTTPError, ValueError) as error:
                raise _unreachable(url, error) from error
        yield url, answers.project_page(answer, project, _CONFIGURED)


def release_files(project: str, version: str, settings: IndexSettings) -> list[ReleaseFile]:
    """Return the files of one release, from the first index that has the project.

    :raises PackageIndexError: no index answers, one with nonsense, or none has that release.
    """
    from packaging.version import Version  # noqa: PLC0415 - slow to import

    for url, page in _project_pages(project, settings):
        files = [
            _release_file(package, url)
            for package in page.packages
            if package.version and _is_version(package.version, Version(version))
        ]
        if files:
            return files
    raise PackageIndexError(
        f"no index has {project} {version}",
        where=", ".join(redacted(url) for url in settings.urls),
        next_step=f"check the version with: python -m pip index versions {project}",
    )


def _release_file(package: DistributionPackage, index: str) -> ReleaseFile:
    """Take over what a page says of a file; its name and hash become paths in the cache.

    :raises PackageIndexError: it is none that a file has.
    """
    name, size = package.filename, package.size
    if "/" in name:
        what = f"the page lists {name[:200]!r}, which is no file name"
        raise answers.nonsense(index, what, _CONFIGURED)
    if size is not None and size < 0:
        what = f"the page says that {name[:200]} has {size} bytes"
        raise answers.nonsense(index, what, _CONFIGURED)
    return ReleaseFile(
        name=name,
        url=_with_credentials(package.url, index),
        sha256=answers.sha256_of(package.digests, name, index),
        size=size,
        requires_python=package.requires_python,
        is_yanked=package.is_yanked,
    )


def project_versions(project: str, settings: IndexSettings) -> list[str]:
    """Return every version of a project, from the first index that has it, in no certain order.

    :raises PackageIndexError: no index answers, or none has the project.
    """
    for _, page in _project_pages(project, settings):
        # A yanked release is none that a fork should follow.
        return sorted({p.version for p in page.packages if p.version and not p.is_yanked})
    raise PackageIndexError(
        f"no index has {project}",
        where=", ".join(redacted(url) for url in settings.urls),
        next_step=_CONFIGURED,
    )


def _with_credentials(url: str, index: str) -> str:
    """Return a file's URL with the index's credentials, as pip does for files on its host."""
    file, base = urlsplit(url), urlsplit(index)
    if "@" in file.netloc or file.netloc != base.netloc.rpartition("@")[2]:
        return url
    return urlunsplit(file._replace(netloc=base.netloc))


def _is_version(text: str, version: object) -> bool:
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415

    try:
        return Version(text) == version
    except InvalidVersion:
        return False


@contextmanager
def open_file(
    file: ReleaseFile, settings: IndexSettings, start: int = 0
) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Request the file's bytes from offset ``start`` on.

    Gives the offset at which the server really begins (0 where it knows no ranges) and the
    chunks. A connection that breaks raises requests' own exceptions: the caller resumes.

    :raises PackageIndexError: the server refuses (a status other than 200 and 206), or its answer
        begins elsewhere.
    """
    headers = {"Accept-Encoding": "identity"}  # a .tar.gz must not be unpacked on the way
    if start:
        headers["Range"] = f"bytes={start}-"
    with _session(settings) as session, _requested(file, headers, session, settings) as response:
        if start and response.status_code == 416:
            yield 0, iter(())  # the server's file ends before that offset
            return
        if response.status_code not in (200, 206):
            raise PackageIndexError(
                f"the index answers {response.status_code} {response.reason}",
                where=redacted(file.url),
                next_step="check the index and its credentials, then run the command again",
            )
        offset = 0
        if response.status_code == 206:
            stated = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            offset = int(stated[1][:20]) if stated else start
            if offset > start:
                raise answers.nonsense(
                    file.url,
                    f"asked for the bytes from {start} on, the index sends from {offset} on",
                )
        yield offset, _chunks(response)


def _requested(
    file: ReleaseFile, headers: dict[str, str], session: requests.Session, settings: IndexSettings
) -> requests.Response:
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - slow to import

    try:
        return session.get(file.url, headers=headers, stream=True, timeout=settings.timeout)
    # No URL, here or in a redirect: asking again does not help.
    except (HTTPError, ValueError) as error:
        raise _unreachable(file.url, error) from error


def _chunks(response: requests.Response) -> Iterator[bytes]:
    import requests  # noqa: PLC0415 - slow to import
    import urllib3  # noqa: PLC0415

    try:
        yield from answers.chunks(response.raw, response.url, answers.FILE, decode=False)
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(error) from error


def content_length(file: ReleaseFile, settings: IndexSettings) -> int:
    """Ask the server for the size in bytes of a file."""
    import requests  # noqa: PLC0415 - slow to import
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    with _session(settings) as session:
        try:
            response = session.head(
                file.url,
                allow_redirects=True,
                timeout=settings.timeout,
                headers={"Accept-Encoding": "identity"},
            )
            response.raise_for_status()
            size = int(response.headers["Content-Length"])
        except (requests.RequestException, HTTPError, KeyError, ValueError) as error:
            raise _unreachable(file.url, error) from error
    if size < 0:
        raise answers.nonsense(file.url, f"the index says that the file has {size} bytes")
    return size
