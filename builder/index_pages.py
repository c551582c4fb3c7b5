"""The pages of a project's folder in an index, brought up to date with the wheels that lie there."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import Version

from builder import atomic, metadata, simple_pages
from builder.console import say
from builder.digests import sha256_of
from builder.simple_pages import HTML_PAGE, JSON_PAGE, ListedWheel
from builder.wheel_file import parse, read_metadata


def metadata_path(wheel: Path) -> Path:
    """Return where METADATA of a wheel of the index lies (PEP 658)."""
    return wheel.with_name(f"{wheel.name}.metadata")


def yanked_path(wheel: Path) -> Path:
    """Return the file that marks a wheel as yanked, and holds the reason."""
    return wheel.with_name(f"{wheel.name}.yanked")


def write_pages(folder: Path) -> None:
    """Bring the project's pages, then the channel's, up to date with what is there.

    :raises AuditError: a file there is not a whole wheel.
    """
    known = {wheel.path.name: wheel for wheel in simple_pages.read_page(folder)}
    wheels = [_describe(path, known.get(path.name)) for path in folder.glob("*.whl")]
    wheels.sort(key=lambda wheel: (Version(wheel.version), wheel.path.name))
    _replace(folder / JSON_PAGE, simple_pages.project_json(folder.name, wheels))
    _replace(folder / HTML_PAGE, simple_pages.project_html(folder.name, wheels))
    projects = sorted(page.parent.name for page in folder.parent.glob(f"*/{HTML_PAGE}"))
    _replace(folder.parent / JSON_PAGE, simple_pages.channel_json(projects))
    _replace(folder.parent / HTML_PAGE, simple_pages.channel_html(projects))


def _replace(page: Path, text: str) -> None:
    if not page.exists() or page.read_bytes() != text.encode():
        atomic.write_text(page, text)


def _describe(path: Path, known: ListedWheel | None) -> ListedWheel:
    """Describe a wheel of the index; its hash is not taken again where its page has it.

    A published version keeps its bytes: what the page says of a wheel that was damaged since stays,
    so that installers refuse it, and METADATA beside a wheel is its own again.
    """
    status = path.stat()
    uploaded = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    yanked = yanked_path(path).read_text("utf-8").strip() if yanked_path(path).exists() else None
    unchanged = known is not None and (known.size, known.uploaded) == (status.st_size, uploaded)
    sha256 = known.sha256 if known is not None and unchanged else sha256_of(path)
    if known is not None and known.sha256 != sha256:
        say(f"{path}: damaged since it was published; publish the wheel again that it was made of")
        return replace(known, yanked=yanked)
    core = _own_metadata(path, known)
    return ListedWheel(
        path=path,
        project=path.parent.name,
        version=str(parse(path).version),
        size=status.st_size,
        sha256=sha256,
        metadata_sha256=hashlib.sha256(core).hexdigest(),
        requires_python=next(iter(metadata.parse(core.decode()).values("Requires-Python")), None),
        uploaded=uploaded,
        yanked=yanked,
    )


def _own_metadata(wheel: Path, known: ListedWheel | None) -> bytes:
    """Return METADATA as it lies beside the wheel; take it out again where that is another."""
    beside = metadata_path(wheel)
    core = beside.read_bytes() if beside.exists() else None
    if core is None or known is None or hashlib.sha256(core).hexdigest() != known.metadata_sha256:
        with wheel.open("rb") as file:
            own = read_metadata(file, wheel)
        if own != core:
            atomic.write_bytes(beside, own)
        return own
    return core
