"""The real servers, on loopback, as their manuals say to run them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import requests

PASSWORD = "corr3ct-h0rse"
USER = "publisher"
TOOLS = Path(sys.executable).parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _clean() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bundle = os.environ.get("PIP_CERT")  # a mirror asks the public index itself
    return kept | ({"SSL_CERT_FILE": bundle} if bundle else {})


@contextlib.contextmanager
def _running(command, url, log: Path):
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=_clean()) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    requests.get(url, timeout=5).close()
                    break
                except requests.RequestException:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def pypiserver(folder: Path, *options, passwords=True, software="auto", fallback=None):
    """``pypi-server run`` with an htpasswd file; gives its URL."""
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    digest = base64.b64encode(hashlib.sha1(PASSWORD.encode()).digest()).decode()
    htpasswd = folder / "htpasswd"
    htpasswd.write_text(f"{USER}:{{SHA}}{digest}\n")
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    command = [TOOLS / "pypi-server", "run", "-i", "127.0.0.1", "-p", str(port), *options]
    command += ["--server", software, "-v"]
    command += ["-P", htpasswd] if passwords else []
    command += ["--fallback-url", fallback] if fallback else ["--disable-fallback"]
    with _running([*command, packages], url, folder / "pypiserver.log"):
        yield url


class Devpi:
    """A devpi server with a root user; indexes are made by its own API, as devpi-client does."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log
        self.root = ("root", "r00t-pass")

    def call(self, method, path, auth, **json):
        answer = requests.request(
            method, f"{self.url}{path}", auth=tuple(part.encode() for part in auth), json=json,
            timeout=30, headers={"Accept": "application/json"},
        )  # fmt: skip
        assert answer.ok, (path, answer.status_code, answer.text)
        return answer.json()

    def user(self, name, password=PASSWORD):
        self.call("PUT", name, self.root, password=password)
        return (name, password)

    def index(self, owner, name, **settings) -> str:
        settings = {"type": "stage", "bases": [], "volatile": False} | settings
        self.call("PUT", f"{owner[0]}/{name}", owner, **settings)
        return f"{self.url}{owner[0]}/{name}/"


@contextlib.contextmanager
def devpi(folder: Path):
    """``devpi-init`` and ``devpi-server``."""
    state, log = folder / "server", folder / "devpi.log"
    options = ["--serverdir", state]
    subprocess.run(
        [TOOLS / "devpi-init", *options, "--root-passwd", "r00t-pass", "--no-root-pypi"],
        check=True, capture_output=True, env=_clean(),
    )  # fmt: skip
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    # The least that argon2 takes: it hashes the password of each single request.
    quick = ["--argon2-memory-cost", "8", "--argon2-parallelism", "1", "--argon2-time-cost", "1"]
    command = [TOOLS / "devpi-server", *options, *quick, "--host", "127.0.0.1"]
    command += ["--port", str(port)]
    with _running([*command, "--enable-core-metadata"], f"{url}+api", log):
        yield Devpi(url, log)
