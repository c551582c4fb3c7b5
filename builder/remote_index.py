"""Package servers that take uploads: devpi, pypiserver, and what else twine can upload to.

pypi-simple reads the pages; builder.uploading sends the file. A server is asked before 250 MB travel
whether it would take them, and read after that: what counts is what it lists, not what it answered.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from builder import answers, atomic
from builder.connection import Connection, denied, unreachable
from builder.errors import (
    AuditError,
    PackageIndexError,
    UnsupportedByServerError,
    UploadFailedError,
)
from builder.wheel_file import parse

if TYPE_CHECKING:
    import requests

_STAGES = 100  # more are inherited by no index, but by one that names another with each answer

T = TypeVar("T")


class Kind(StrEnum):
    DEVPI = "devpi"
    PYPISERVER = "pypiserver"
    OTHER = "another server"


@dataclass(frozen=True)
class Server:
    """A package server, or the one index of a devpi server, as it describes itself.

    :param url: takes uploads.
    :param simple: the URL for installers.
    :param stage: devpi's USER/INDEX; empty elsewhere.
    :param volatile: lets files be replaced (devpi); None where the server does not tell.
    :param uploaders: who may upload (devpi's ``acl_upload``); None where it does not tell.
    :param bases: the stages that it inherits (devpi), USER/INDEX: what they list, it lists too.
    :param complete: inherits a mirror of the public index, so that it has the dependencies too.
    :param loses_cut_uploads: False where it keeps the first half of an upload that broke off.
    """

    kind: Kind
    url: str
    simple: str
    stage: str = ""
    volatile: bool | None = None
    uploaders: tuple[str, ...] | None = None
    bases: tuple[str, ...] = ()
    complete: bool = False
    loses_cut_uploads: bool = True


@dataclass(frozen=True)
class RemoteFile:
    """A file as the server's page lists it.

    :param sha256: None where the page has another hash or none.
    """

    name: str
    url: str
    sha256: str | None
    requires_python: str | None
    has_metadata: bool


def examine(url: str, connection: Connection) -> Server:
    """Ask a server what it is.

    :raises PackageIndexError: it gives no answer or nonsense, or devpi has no such index.
    :raises UnsupportedByServerError: it takes no uploads.
    """
    url = f"{url.rstrip('/').removesuffix('/simple').removesuffix('/+simple')}/"
    _refuse_the_public_index(url)
    answer = connection.ask("GET", url, headers={"Accept": "application/json, text/html;q=0.9"})
    software = answer.headers.get("Server", "")
    if "X-Devpi-Server-Version" in answer.headers:
        return _examine_devpi(url, answer, connection)
    if software.startswith("vllm-glm5-index"):
        raise UnsupportedByServerError(
            "a directory index that is served takes no uploads",
            where=url,
            next_step="publish on the machine that has the folder: --index FOLDER",
        )
    kind = Kind.PYPISERVER if b"pypiserver" in answer.content.lower() else Kind.OTHER
    return Server(
        kind=kind,
        url=url,
        simple=f"{url}simple/",
        loses_cut_uploads=not software.startswith("WSGIServer"),
    )


def _refuse_the_public_index(url: str) -> None:
    from twine import utils  # noqa: PLC0415 - slow to import

    public = {urlsplit(each).netloc for each in (utils.DEFAULT_REPOSITORY, utils.TEST_REPOSITORY)}
    if urlsplit(url).netloc in public:
        raise UnsupportedByServerError(
            "the public index takes no local versions (+glm5.N), which is what all wheels have",
            where=url,
            next_step="publish to an index of your own: --index",
        )


def _examine_devpi(url: str, answer: requests.Response, connection: Connection) -> Server:
    api = f"{url}+api"
    offered = _result(connection.ask("GET", api)) if answer.ok else {}
    if "pypisubmit" not in offered:
        raise PackageIndexError(
            "this devpi server has no such index",
            where=url,
            next_step="give the URL of an index (https://HOST/USER/INDEX/); one is made with: "
            "devpi index -c USER/INDEX bases=root/pypi volatile=False",
        )
    settings = _result(answer)
    simple = _value(offered, "simpleindex", str, api)
    index = _value(offered, "index", str, api)
    base = index.rsplit("/", 2)[0]
    stage = index.removeprefix(f"{base}/")
    root = f"{url.rstrip('/').rsplit('/', 2)[0]}/"
    stages, complete = _inherited(root, _texts(settings, "bases", url), connection)
    status = (*_value(offered, "authstatus", list, api, []), "")[0]
    if connection.credentials is not None and status != "ok":
        raise denied(url, 401, connection.credentials)
    return Server(
        kind=Kind.DEVPI,
        # The server's own name for itself may be another one, such as behind a proxy.
        url=url,
        simple=simple if simple.startswith(urljoin(url, "/")) else f"{url}+simple/",
        stage=stage,
        volatile=_value(settings, "volatile", bool, url, True),
        uploaders=_texts(settings, "acl_upload", url),
        bases=stages,
        complete=complete,
    )


def _result(answer: requests.Response) -> dict[str, Any]:
    """Return what devpi says of a thing; nothing where it has no such thing.

    :raises PackageIndexError: it says something that devpi does not say.
    """
    if answer.status_code == 404:
        return {}
    return _value(answers.json_object(answer), "result", dict, answer.url)


def _value(
    said: Mapping[str, Any], key: str, kind: type[T], url: str, default: T | None = None
) -> T:
    """Return one value of an answer.

    :raises PackageIndexError: it is missing without a default, or is of another kind.
    """
    value = said.get(key, default)
    if not isinstance(value, kind):
        found = "missing" if key not in said else f"a {type(value).__name__}, not a {kind.__name__}"
        raise answers.nonsense(
            url,
            f"not an answer of devpi's: {key!r} is {found}",
            "check the URL of the index, and what stands before the server (curl URL)",
        )
    return value


def _texts(said: Mapping[str, Any], key: str, url: str) -> tuple[str, ...]:
    """Return a list of texts of an answer; nothing where there is none.

    :raises PackageIndexError: it is something else.
    """
    values = _value(said, key, list, url, [])
    return tuple(_value({key: each}, key, str, url) for each in values)


def _inherited(
    root: str, bases: tuple[str, ...], connection: Connection
) -> tuple[tuple[str, ...], bool]:
    """Return the stages that an index inherits, and whether a mirror is among its bases.

    :raises PackageIndexError: there is no end of them, or one of them says nonsense.
    """
    waiting, stages, mirror = [*bases], dict[str, None](), False
    while waiting:
        name = waiting.pop()
        if name in stages:
            continue
        url = f"{root}{name}"
        if len(stages) == _STAGES:
            raise answers.nonsense(url, f"the index inherits more than {_STAGES} others")
        found = _result(connection.ask("GET", url, headers={"Accept": "application/json"}))
        if found.get("type") == "mirror":
            mirror = True
            continue
        stages[name] = None
        waiting += _texts(found, "bases", url)
    return tuple(stages), mirror


def require_upload_right(server: Server, connection: Connection) -> None:
    """Find out whether an upload would be refused, before its body travels.

    :raises UploadRefusedError: a wrong password, no credentials, or no right.
    """
    if server.kind is Kind.PYPISERVER:
        # It ignores `verify`, after it has looked at who asks.
        connection.ask("POST", server.url, data={":action": "verify"})
    elif server.uploaders is not None:
        name = connection.credentials.username if connection.credentials else ""
        groups = [each for each in server.uploaders if each.startswith(":")]
        if not groups and name not in server.uploaders:
            raise denied(server.url, 403, connection.credentials)


def list_files(server: Server, project: str, connection: Connection) -> tuple[RemoteFile, ...]:
    """Return the files of a project that this very index has; what it inherits does not count.

    :raises PackageIndexError: no answer, or a page that is none.
    """
    from pypi_simple import ACCEPT_ANY  # noqa: PLC0415 - slow to import

    url = urljoin(server.simple, f"{project}/")
    answer = connection.ask("GET", url, headers={"Accept": ACCEPT_ANY})
    if answer.status_code == 404 or answer.is_redirect:  # pypiserver's, to the public index
        return ()
    if answer.status_code != 200:  # to take it for an empty page would upload over what is there
        raise answers.nonsense(
            url,
            f"the server answers {answer.status_code} {answer.reason} to a request for its page",
            "look into the server's log, then run the command again",
        )
    packages = answers.project_page(answer, project).packages
    if server.stage:
        packages = [p for p in packages if f"/{server.stage}/+" in urlsplit(p.url).path]
    for package in packages:
        _require_name(package.filename, url)
    return tuple(
        RemoteFile(
            name=package.filename,
            url=package.url,
            sha256=answers.sha256_of(package.digests, package.filename, url),
            requires_python=package.requires_python,
            has_metadata=bool(package.has_metadata),
        )
        for package in packages
    )


def _require_name(name: str, url: str) -> None:
    """Refuse a page with a wheel of which nobody can say what it is.

    :raises PackageIndexError: the file name says neither project nor version.
    """
    try:
        if name.endswith(".whl"):
            parse(Path(name))
    except AuditError as error:
        raise answers.nonsense(
            url,
            f"the page lists {name[:200]!r}, which is no file name of a wheel",
            "delete that file on the server, then run the command again",
        ) from error


@contextlib.contextmanager
def _body(file: RemoteFile, server: Server, connection: Connection) -> Iterator[Iterator[bytes]]:
    if urlsplit(file.url)[:2] != urlsplit(server.url)[:2]:
        raise PackageIndexError(
            "the page names a file on another host, which does not get our credentials",
            where=file.url,
            next_step="give the URL of the index that has the file",
        )
    import requests  # noqa: PLC0415 - slow to import
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    with connection.ask("GET", file.url, stream=True) as answer:
        if answer.status_code != 200:
            raise PackageIndexError(
                f"the server lists the file and answers {answer.status_code} to a request for it",
                where=file.url,
                next_step="look into the server's log",
            )
        try:
            yield answers.chunks(answer.raw, file.url, answers.FILE)
        except (requests.RequestException, HTTPError) as error:
            raise unreachable(file.url, error) from error


def sha256_of(file: RemoteFile, server: Server, connection: Connection) -> str:
    """Return the page's hash; where it has none, that of the file as it comes."""
    if file.sha256 is not None:
        return file.sha256
    digest = hashlib.sha256()
    with _body(file, server, connection) as chunks:
        for chunk in chunks:
            digest.update(chunk)
    return digest.hexdigest()


def download(file: RemoteFile, folder: Path, server: Server, connection: Connection) -> Path:
    """Download a file of the server and compare its hash with the page's."""
    digest = hashlib.sha256()
    path = folder / Path(file.name).name
    with _body(file, server, connection) as chunks, atomic.replacing(path) as copy:
        for chunk in chunks:
            digest.update(chunk)
            copy.write(chunk)
        if file.sha256 not in {None, digest.hexdigest()}:
            raise UploadFailedError(
                "the file is not what the server's page says",
                where=file.url,
                details=(f"page  {file.sha256}", f"file  {digest.hexdigest()}"),
                next_step="have the server's storage examined (devpi-fsck)",
            )
    return path


def is_cut(file: RemoteFile, wheel: Path, server: Server, connection: Connection) -> bool:
    """Tell whether the server's file is the beginning of ours: an upload that broke off."""
    with _body(file, server, connection) as chunks, wheel.open("rb") as ours:
        if any(chunk != ours.read(len(chunk)) for chunk in chunks):
            return False
        return bool(ours.read(1))


def push(server: Server, project: str, version: str, target: str, connection: Connection) -> None:
    """Copy all files of a version from this devpi index to another one of the same server.

    :param target: USER/INDEX.
    :raises UploadRefusedError: no right to upload there.
    :raises UploadFailedError: it was not done.
    """
    answer = connection.ask(
        "POST", server.url, json={"name": project, "version": version, "targetindex": target}
    )
    if answer.status_code != 200:
        said = ""
        with contextlib.suppress(PackageIndexError):
            said = str(answers.json_object(answer).get("message", ""))[:300]
        raise UploadFailedError(
            f"devpi answers {answer.status_code} to the push of {project} {version}",
            where=f"{server.stage} -> {target}",
            details=(said,) if said else (),
            next_step="check that the target exists and what it holds, then run the command again",
        )
