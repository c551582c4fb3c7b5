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
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from builder.errors import PackageIndexError
from builder.pip_configuration import pip_configuration

if TYPE_CHECKING:
    import requests
    from pypi_simple import ProjectPage

ATTEMPTS = 4  # connections tried for one request before the index counts as unreachable


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


def redacted(text: str) -> str:
    """Return a URL, or a text with URLs in it, without credentials: for messages and logs."""
    return re.sub(r"(?<=://)[^/\s'\"]*@", "", text)


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
    from requests.adapters import HTTPAdapter  # noqa: PLC0415
    from urllib3.util.retry import Retry  # noqa: PLC0415

    retry = Retry(total=ATTEMPTS - 1, backoff_factor=0.3, status_forcelist=[429, 502, 503, 504])
    with requests.Session() as session:
        session.mount("https://", HTTPAdapter(max_retries=retry))
        session.mount("http://", HTTPAdapter(max_retries=retry))
        if settings.ca_bundle:
            session.verify = settings.ca_bundle
        yield session


def _unreachable(url: str, error: Exception) -> PackageIndexError:
    return PackageIndexError(
        f"the package index gives no answer that helps: {type(error).__name__}",
        where=redacted(url),
        details=(redacted(str(error))[:300],),
        next_step="check the network and `python -m pip config list`, then run the command again",
    )


def _project_pages(project: str, settings: IndexSettings) -> Iterator[tuple[str, ProjectPage]]:
    """Give the page of each index that has the project, with the index's URL.

    :raises PackageIndexError: an index does not answer.
    """
    import requests  # noqa: PLC0415 - slow to import
    from pypi_simple import NoSuchProjectError, PyPISimple  # noqa: PLC0415

    for url in settings.urls:
        with _session(settings) as session, PyPISimple(url, session=session) as client:
            try:
                page = client.get_project_page(project, timeout=settings.timeout)
            except NoSuchProjectError:
                continue
            except (requests.RequestException, ValueError) as error:
                raise _unreachable(url, error) from error
        yield url, page


def release_files(project: str, version: str, settings: IndexSettings) -> list[ReleaseFile]:
    """Return the files of one release, from the first index that has the project.

    :raises PackageIndexError: no index answers, or none has that release.
    """
    from packaging.version import Version  # noqa: PLC0415 - slow to import

    for url, page in _project_pages(project, settings):
        files = [
            ReleaseFile(
                name=package.filename,
                url=_with_credentials(package.url, url),
                sha256=package.digests.get("sha256"),
                size=package.size,
                requires_python=package.requires_python,
                is_yanked=package.is_yanked,
            )
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
        next_step="check `python -m pip config list`, then run the command again",
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

    :raises PackageIndexError: the server refuses (a status other than 200 and 206).
    """
    headers = {"Accept-Encoding": "identity"}  # a .tar.gz must not be unpacked on the way
    if start:
        headers["Range"] = f"bytes={start}-"
    with (
        _session(settings) as session,
        session.get(file.url, headers=headers, stream=True, timeout=settings.timeout) as response,
    ):
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
            offset = int(stated[1]) if stated else start
        yield offset, _chunks(response)


def _chunks(response: requests.Response) -> Iterator[bytes]:
    """Yield bytes as they come: a reader that waits for full chunks loses what a break cuts off."""
    import requests  # noqa: PLC0415 - slow to import
    import urllib3  # noqa: PLC0415

    try:
        while chunk := response.raw.read1(1 << 20):
            yield chunk
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(error) from error


def content_length(file: ReleaseFile, settings: IndexSettings) -> int:
    """Ask the server for the size in bytes of a file."""
    import requests  # noqa: PLC0415 - slow to import

    with _session(settings) as session:
        try:
            response = session.head(
                file.url,
                allow_redirects=True,
                timeout=settings.timeout,
                headers={"Accept-Encoding": "identity"},
            )
            response.raise_for_status()
            return int(response.headers["Content-Length"])
        except (requests.RequestException, KeyError) as error:
            raise _unreachable(file.url, error) from error
