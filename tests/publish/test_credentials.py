"""Where credentials come from, and where they never show."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from base64 import b64decode
from pathlib import Path

import pytest

from builder.credentials import Credentials, credentials_for
from builder.errors import UploadRefusedError

from . import servers
from .conftest import as_user
from .strange import strange

URL = "https://wheels.invalid/team/stable/"
BACKEND = f"""
from keyring.backend import KeyringBackend
from keyring.credentials import SimpleCredential

class Keyring(KeyringBackend):
    priority = 1
    def get_password(self, service, username):
        open({{log!r}}, "a").write(service + "\\n")
        return {servers.PASSWORD!r} if username == {servers.USER!r} else None
    def get_credential(self, service, username):
        password = self.get_password(service, username or {servers.USER!r})
        return SimpleCredential(username or {servers.USER!r}, password) if password else None
    def set_password(self, *_): raise NotImplementedError
    def delete_password(self, *_): raise NotImplementedError
"""


@pytest.fixture
def tested(release):
    wheel = release.wheel()
    return ("publish", wheel, "--report", release.report(wheel), "--index")


def from_keyring(tmp_path):
    folder = tmp_path / "backend"
    folder.mkdir()
    (folder / "our_backend.py").write_text(BACKEND.format(log=str(tmp_path / "asked")))
    root = Path(__file__).resolve().parent.parent.parent
    return {
        "PYTHON_KEYRING_BACKEND": "our_backend.Keyring",
        "PYTHONPATH": f"{root}:{folder}",
    }


def from_netrc(tmp_path):
    (tmp_path / "netrc").write_text(
        f"machine 127.0.0.1 login {servers.USER} password {servers.PASSWORD}\n"
    )
    (tmp_path / "netrc").chmod(0o600)
    return {"NETRC": str(tmp_path / "netrc")}


@pytest.mark.parametrize("way", ["environment", "netrc", "keyring", "name-and-keyring"])
def test_each_way_in_a_process_of_its_own(tested, tool, pypiserver, tmp_path, way):
    """And in none of them does the password stand where others can read it."""
    variables = {
        "environment": as_user,
        "netrc": lambda: from_netrc(tmp_path),
        "keyring": lambda: from_keyring(tmp_path),
        "name-and-keyring": lambda: {"TWINE_USERNAME": servers.USER} | from_keyring(tmp_path),
    }[way]()
    lines = set()
    with tool.start(*tested, pypiserver, **variables) as process:
        while process.poll() is None:
            lines.update(commands_below(process.pid))
            time.sleep(0.01)
        output, error = process.communicate()
    assert process.returncode == 0, error
    assert len(list((tmp_path / "pypiserver" / "packages").iterdir())) == 1
    everywhere = output + error + (tmp_path / "pypiserver" / "pypiserver.log").read_text()
    assert servers.PASSWORD not in everywhere
    assert any(b"publish" in line for line in lines), "its command line was looked at"
    assert not any(servers.PASSWORD.encode() in line for line in lines)
    if "keyring" in way:
        assert (tmp_path / "asked").read_text().splitlines()[0] == pypiserver


def read(path):
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return b""


def commands_below(pid):
    """The command lines of a process and its children, as they are now."""
    children = read(Path(f"/proc/{pid}/task/{pid}/children")).split()
    return [read(Path(f"/proc/{each}/cmdline")) for each in [pid, *map(int, children)]]


def test_no_program_that_we_start_gets_them(tested, tool, pypiserver, monkeypatch):
    """Their environment can be read by everything that runs as the same user."""
    started = []
    begin = subprocess.Popen.__init__

    def watched(self, command, *arguments, env=None, **options):
        started.append((command, os.environ if env is None else env))
        begin(self, command, *arguments, env=env, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", watched)
    tool.run(*tested, pypiserver, **as_user())
    programs = {Path(str(command[0])).name for command, _ in started}
    assert {"ssh-keygen", Path(sys.executable).name} <= programs, "the control: it starts some"
    for command, variables in started:
        assert "HOME" in variables
        assert servers.PASSWORD not in variables.values(), command
        assert not any(servers.PASSWORD in str(word) for word in command)


def test_credentials_in_the_url_are_refused(tested, tool, pypiserver):
    url = pypiserver.replace("//", f"//{servers.USER}:{servers.PASSWORD}@")
    for command in (tested, ("yank", "1", "--reason", "x", "--index")):
        refused = tool.run(*command, url, code=40)
        assert servers.PASSWORD not in refused.output + refused.error
        assert "keyring" in refused.error


@pytest.mark.parametrize("end", ["?token=s3cret", "simple/?token=s3cret", "#s3cret"])
def test_a_token_in_the_url_is_refused(tested, tool, pypiserver, end):
    """It would be on the command line, in the output, and in a line that installs nothing."""
    for command in (tested, ("yank", "1", "--reason", "x", "--index")):
        refused = tool.run(*command, pypiserver + end, code=41, **as_user())
        assert "s3cret" not in refused.output + refused.error
        assert "TWINE_PASSWORD" in refused.error
    tool.run(*tested, pypiserver, **as_user())  # the control


@pytest.mark.parametrize("password", ["pä€s", "p\udce4s", "#!: \"'\\\t%40@/"])
def test_a_password_of_any_characters(tested, tool, password):
    """A shell in Latin-1 passes bytes that are no UTF-8."""
    with strange(200) as server:
        tool.run(*tested, server.url, code=42, **as_user(servers.USER, password))
    sent = {b64decode(header.removeprefix("Basic ")) for _, header in server.requests}
    assert sent == {os.fsencode(f"{servers.USER}:{password}")}


def test_order(monkeypatch, tmp_path):
    """What is nearest counts: the environment of this very run before the user's files."""
    (tmp_path / "netrc").write_text("machine wheels.invalid login from-netrc password n\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert credentials_for(URL) == Credentials("from-netrc", "n", "netrc")
    for name, value in (("TWINE_USERNAME", "from-env"), ("TWINE_PASSWORD", "e")):
        monkeypatch.setenv(name, value)
    found = credentials_for(URL)
    assert found == Credentials("from-env", "e", "environment")
    assert "'e'" not in repr(found)


def test_half_of_them(monkeypatch):
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
    monkeypatch.setenv("TWINE_USERNAME", "somebody")
    monkeypatch.delenv("TWINE_PASSWORD", raising=False)
    import keyring
    from keyring.backends import null

    before = keyring.get_keyring()
    keyring.set_keyring(null.Keyring())
    try:
        with pytest.raises(UploadRefusedError, match="TWINE_PASSWORD"):
            credentials_for(URL)
    finally:
        keyring.set_keyring(before)
