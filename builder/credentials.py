"""Who uploads: from the environment, netrc or the keyring; never from a command line.

What stands on a command line is seen by everybody on the machine (``ps``) and stays in the shell's
history, so that a URL with credentials is refused. Nothing here is printed or logged.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from builder.errors import UploadRefusedError

USERNAME_VARIABLE = "TWINE_USERNAME"
PASSWORD_VARIABLE = "TWINE_PASSWORD"  # noqa: S105 - twine's own names, which CI secrets have already


@dataclass(frozen=True)
class Credentials:
    """A name and a password; the password has no place in a message, ``repr`` included."""

    username: str
    password: str = field(repr=False)
    source: str


def redacted(text: str) -> str:
    """Return a URL, or a text with URLs in it, without credentials: for messages and logs."""
    return re.sub(r"(?<=://)[^/\s'\"]*@", "", text)


def variables_of_children() -> dict[str, str]:
    """Return our environment without the credentials: no program that we start uploads anything."""
    ours = {USERNAME_VARIABLE, PASSWORD_VARIABLE}
    return {name: value for name, value in os.environ.items() if name not in ours}


def credentials_for(url: str) -> Credentials | None:
    """Return the first that is there for this URL; None where nothing is configured.

    :raises UploadRefusedError: the URL itself has some, or the environment has half of them.
    """
    if "@" in urlsplit(url).netloc:
        raise UploadRefusedError(
            "the URL has credentials, and what is on a command line is seen by everybody",
            where=urlsplit(url).netloc.rpartition("@")[2],
            next_step=f"give the URL without them; set {USERNAME_VARIABLE} and "
            f"{PASSWORD_VARIABLE}, or write ~/.netrc, or run: keyring set URL USER",
        )
    return _from_environment(url) or _from_netrc(url) or _from_keyring(url, None)


def _from_environment(url: str) -> Credentials | None:
    username = os.environ.get(USERNAME_VARIABLE)
    password = os.environ.get(PASSWORD_VARIABLE)
    if username and password:
        return Credentials(username, password, "environment")
    if username:
        if found := _from_keyring(url, username):
            return found
        raise UploadRefusedError(
            f"{USERNAME_VARIABLE} is set, and neither {PASSWORD_VARIABLE} nor the keyring has "
            "the password",
            where=url,
            next_step=f"set {PASSWORD_VARIABLE}, or run: keyring set {url} {username}",
        )
    return None


def _from_netrc(url: str) -> Credentials | None:
    from requests.utils import get_netrc_auth  # noqa: PLC0415 - slow to import

    found = get_netrc_auth(url)
    return Credentials(found[0], found[1], "netrc") if found and found[1] else None


def _from_keyring(url: str, username: str | None) -> Credentials | None:
    import keyring  # noqa: PLC0415 - slow to import

    try:
        found = keyring.get_credential(url, username)
    except Exception:  # noqa: BLE001 - no backend, a locked one: each raises errors of its own
        return None
    return Credentials(found.username, found.password, "keyring") if found else None
