"""The two pages of a project and of a channel: HTML (PEP 503) and JSON (PEP 691, 700).

Both say the same. All links are relative, so that the tree can be moved, copied and served below
any URL; that rules out PEP 740's ``provenance``, whose value is a complete URL (and whose object
holds Sigstore's attestations only): provenance and reports are files beside the wheel.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

HTML_PAGE = "index.html"
JSON_PAGE = "index.v1_json"

_API_VERSION = "1.1"  # PEP 700: versions, size, upload-time


@dataclass(frozen=True)
class ListedWheel:
    """A wheel as the pages of its project list it.

    :param size: bytes.
    :param metadata_sha256: of the METADATA file beside it.
    :param uploaded: when it was published, UTC in RFC 3339's form.
    :param yanked: why nobody should take it any more (PEP 592); None for the others.
    """

    path: Path
    project: str
    version: str
    size: int
    sha256: str
    metadata_sha256: str
    requires_python: str | None
    uploaded: str
    yanked: str | None = None


def read_page(folder: Path) -> tuple[ListedWheel, ...]:
    """Return what the JSON page lists; nothing where it is missing or not one of ours."""
    try:
        page: dict[str, Any] = json.loads((folder / JSON_PAGE).read_bytes())
        return tuple(_listed(folder, file) for file in page["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _listed(folder: Path, file: dict[str, Any]) -> ListedWheel:
    """Take over what a page says of one file.

    :raises ValueError: something of it is of another kind than what we write.
    """
    path = folder / file["filename"]
    texts = (file["hashes"]["sha256"], file["core-metadata"]["sha256"], file["upload-time"])
    optional = (file.get("requires-python"), file.get("yanked"))
    if not (
        isinstance(file["size"], int)
        and all(isinstance(text, str) for text in texts)
        and all(text is None or isinstance(text, str) for text in optional)
    ):
        raise ValueError(file)
    return ListedWheel(
        path=path,
        project=folder.name,
        version=str(parse_wheel_filename(path.name)[1]),
        size=file["size"],
        sha256=file["hashes"]["sha256"],
        metadata_sha256=file["core-metadata"]["sha256"],
        requires_python=file.get("requires-python"),
        uploaded=file["upload-time"],
        yanked=file.get("yanked"),
    )


def project_json(project: str, wheels: list[ListedWheel]) -> str:
    files: list[dict[str, object]] = []
    for wheel in wheels:
        file: dict[str, object] = {
            "filename": wheel.path.name,
            "url": quote(wheel.path.name),
            "hashes": {"sha256": wheel.sha256},
            "size": wheel.size,
            "upload-time": wheel.uploaded,
            # PEP 714: this key alone; old versions of pip fail on the older one in JSON.
            "core-metadata": {"sha256": wheel.metadata_sha256},
        }
        if wheel.requires_python is not None:
            file["requires-python"] = wheel.requires_python
        if wheel.yanked is not None:
            file["yanked"] = wheel.yanked
        files.append(file)
    page = {
        "meta": {"api-version": _API_VERSION},
        "name": project,
        "versions": list(dict.fromkeys(wheel.version for wheel in wheels)),
        "files": files,
    }
    return json.dumps(page, indent=1) + "\n"


def project_html(project: str, wheels: list[ListedWheel]) -> str:
    links = []
    for wheel in wheels:
        # '+' is quoted: some servers and clients read it as a space.
        attributes = {"href": f"{quote(wheel.path.name)}#sha256={wheel.sha256}"}
        if wheel.requires_python is not None:
            attributes["data-requires-python"] = wheel.requires_python
        if wheel.yanked is not None:
            attributes["data-yanked"] = wheel.yanked
        # PEP 714: installers from before it know the older name only.
        attributes["data-dist-info-metadata"] = f"sha256={wheel.metadata_sha256}"
        attributes["data-core-metadata"] = f"sha256={wheel.metadata_sha256}"
        text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
        links.append(f"<a {text}>{html.escape(wheel.path.name)}</a><br>")
    return _html_page(f"Links for {project}", links)


def channel_json(projects: list[str]) -> str:
    page = {
        "meta": {"api-version": _API_VERSION},
        "projects": [{"name": project} for project in projects],
    }
    return json.dumps(page, indent=1) + "\n"


def channel_html(projects: list[str]) -> str:
    return _html_page("Simple index", [f'<a href="{p}/">{p}</a><br>' for p in projects])


def _html_page(title: str, lines: list[str]) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta name="pypi:repository-version" content="{_API_VERSION}">',
            f"<title>{html.escape(title)}</title>",
            "</head>",
            "<body>",
            f"<h1>{html.escape(title)}</h1>",
            *lines,
            "</body>",
            "</html>",
            "",
        ]
    )
