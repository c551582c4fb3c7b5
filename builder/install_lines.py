"""The lines that install a wheel from an index, for pip and for uv.

The wheel comes from the private index, its dependencies from the public one: the index that pip is
configured for. Nobody's credentials are printed.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from builder import alias
from builder.credentials import variables_of_children
from builder.locations import DISTRIBUTION
from builder.pip_configuration import pip_configuration

PUBLIC_PLACEHOLDER = "PUBLIC_INDEX"
PRIVATE_PLACEHOLDER = "PRIVATE_INDEX"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_PIP_DEFAULT = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"


@dataclass(frozen=True)
class PublicIndex:
    """Where the dependencies come from.

    :param url: None where neither pip's configuration nor pip itself tells.
    :param configured: pip's configuration names it; else it is pip's own default.
    """

    url: str | None
    configured: bool


def install_lines(
    index: str | Path,
    version: str,
    *,
    public: PublicIndex | None = None,
    complete: bool = False,
    with_alias: bool = False,
) -> tuple[str, str]:
    """Return the line for pip and the one for uv.

    The alias is named where there is one, though the wheel that requires it brings it in: whatever
    somebody adds to the line is then satisfied by it, and uv takes a yanked version only by name.

    :param index: URL or folder of a channel, with or without its ``simple`` at the end.
    :param public: asked from pip where it is not given.
    :param with_alias: the index has the alias of that version.
    :param complete: the index has the dependencies too (devpi, with a mirror among its bases).
    """
    wanted = [f"{DISTRIBUTION}=={version}"]
    if with_alias:
        wanted.append(alias.requirement(version))
    pip, uv = only_index(index) if complete else index_options(index, public)
    lines = (
        shlex.join(["pip", "install", *wanted, *pip]),
        shlex.join(["uv", "pip", "install", *wanted, *uv]),
    )
    return with_hint(lines[0]), with_hint(lines[1])


def index_options(
    index: str | Path, public: PublicIndex | None = None
) -> tuple[list[str], list[str]]:
    """Return the options that name both indexes, for pip and for uv."""
    private = simple_url(index)
    public = public or public_index()
    pip, uv = ["--index-url", private], ["--index", private]
    if public.url is None:
        # Not replacing pip's own index comes to the same: pip ranks no index above another.
        pip = ["--extra-index-url", private]
    else:
        shown = PUBLIC_PLACEHOLDER if has_credentials(public.url) else public.url
        pip += ["--extra-index-url", shown]
        if public.configured:
            # uv does not read pip's configuration; with neither configured, its default is pip's.
            uv += ["--default-index", shown]
    if host := _untrusted_host(private):
        pip += ["--trusted-host", host]
    return pip, uv


def only_index(index: str | Path) -> tuple[list[str], list[str]]:
    """Return the options that name this index and no other, for pip and for uv."""
    private = simple_url(index)
    host = _untrusted_host(private)
    trusted = ["--trusted-host", host] if host else []
    return ["--index-url", private, *trusted], ["--default-index", private]


def _channel(index: str | Path) -> str | Path:
    """Take an index folder in which nothing was released yet for its staging channel."""
    folder = Path(index)
    staging = folder / "staging"
    released = (folder / "simple" / DISTRIBUTION).is_dir()
    return staging if not released and (staging / "simple" / DISTRIBUTION).is_dir() else index


def simple_url(index: str | Path) -> str:
    """Return the URL that installers take, placeholder instead of one with credentials."""
    text = str(index if _URL.match(str(index)) else _channel(index))
    if text == PRIVATE_PLACEHOLDER:
        return text
    url = text if _URL.match(text) else Path(text).absolute().as_uri()
    if has_credentials(url):
        return PRIVATE_PLACEHOLDER
    url = url.rstrip("/")
    return f"{url}/" if url.endswith(("/simple", "/+simple")) else f"{url}/simple/"


def has_credentials(url: str) -> bool:
    return "@" in urlsplit(url).netloc


def public_index() -> PublicIndex:
    """Ask pip which index it is configured for, now and with this environment's variables."""
    if configured := pip_configuration().get("index-url"):
        return PublicIndex(configured, configured=True)
    # pip has no public way to tell its default. A host name of ours could go stale unnoticed.
    said = subprocess.run(
        [sys.executable, "-c", _PIP_DEFAULT], capture_output=True, text=True, check=False,
        env=variables_of_children(),
    )  # fmt: skip
    return PublicIndex(said.stdout.strip() or None, configured=False)


def _untrusted_host(url: str) -> str | None:
    """Return the host that pip would refuse without an option: plain HTTP, not on loopback."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.hostname == "localhost":
        return None
    try:
        if ipaddress.ip_address(parts.hostname).is_loopback:
            return None
    except ValueError:
        pass  # a name
    return parts.netloc


def with_hint(line: str) -> str:
    """Explain the placeholders of a line in a shell comment; most lines have none."""
    hints = [
        f"{name}: {meaning}"
        for name, meaning in (
            (PUBLIC_PLACEHOLDER, "pip's configured index-url, not printed as it has credentials"),
            (
                PRIVATE_PLACEHOLDER,
                "the URL of the index that has vllm-glm5, with its credentials if any",
            ),
        )
        if name in shlex.split(line)
    ]
    return f"{line}  # {'; '.join(hints)}" if hints else line
