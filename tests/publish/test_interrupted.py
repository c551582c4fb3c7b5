"""Uploads that are cut, publishers that are killed, and eight of them at once."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import socketserver
import threading
import time
import zipfile
from urllib.parse import urlsplit

import pytest
import requests

from tests.index.checking import listed
from tests.index.wheels import write_wheel

from . import servers
from .conftest import as_user
from .forking import Forks
from .release import BIG, VERSION, sha256

NEXT = "0.20.2+glm5.2"


def whole(simple, tmp_path, project="vllm-glm5"):
    """Download each file that the page lists, check it as installers do, return the names."""
    from pypi_simple import PyPISimple
    from pypi_simple.errors import NoSuchProjectError

    with PyPISimple(simple) as client:
        try:
            packages = client.get_project_page(project).packages
        except NoSuchProjectError:
            return set()
        for package in packages:
            path = tmp_path / package.filename
            path.write_bytes(requests.get(package.url, timeout=60).content)
            assert sha256(path) == package.digests["sha256"]
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None
            path.unlink()
    return {package.filename for package in packages}


class CuttingProxy(socketserver.ThreadingTCPServer):
    """Passes connections on to a server; breaks the one that has sent so many bytes."""

    daemon_threads = False

    def __init__(self, url, cut_after):
        self.target = urlsplit(url)
        self.cut_after = cut_after
        self.cuts = 0
        super().__init__(("127.0.0.1", 0), _Cutting)
        self.url = url.replace(f":{self.target.port}", f":{self.server_address[1]}", 1)

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.thread.join()
        self.server_close()


class _Cutting(socketserver.BaseRequestHandler):
    def handle(self):
        target = (self.server.target.hostname, self.server.target.port)
        with socket.create_connection(target) as upstream:
            back = threading.Thread(target=copy, args=(upstream, self.request, None))
            back.start()
            if copy(self.request, upstream, self.server.cut_after):
                self.server.cuts += 1
            back.join()


def copy(source, sink, limit):
    """Copy until the end, or until the limit; then both connections are at their end."""
    sent, cut = 0, False
    with contextlib.suppress(OSError):
        while not cut and (data := source.recv(1 << 16)):
            sent += len(data)
            cut = limit is not None and sent > limit
            if not cut:
                sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    return cut


def test_an_upload_that_is_cut(release, tool, server, tmp_path, environment):
    url, simple, who = server
    wheel = release.wheel(files=BIG)
    report = release.report(wheel)
    publish = ("publish", wheel, "--report", report, "--index")
    with CuttingProxy(url, 4 << 20) as proxy:
        failed = tool.run(*publish, proxy.url, code=42, **who)
    assert proxy.cuts >= 1
    assert "run the command again" in failed.error
    time.sleep(0.5)
    assert whole(simple, tmp_path) == set()
    assert environment.install_with("pip", simple, "vllm-glm5", check=False).returncode
    tool.run(*publish, url, **who)
    environment.install_with("pip", simple, "vllm-glm5")
    assert environment.version() == VERSION


def test_a_pypiserver_on_wsgiref_keeps_half_an_upload(release, tool, tmp_path, environment):
    """Its fault; what it keeps does not install, and the tool says what to do about it."""
    wheel = release.wheel(files=BIG)
    publish = ("publish", wheel, "--report", release.report(wheel), "--index")
    folder = tmp_path / "pypiserver"
    with servers.pypiserver(folder, software="wsgiref") as url:
        with CuttingProxy(url, 4 << 20) as proxy:
            cut = tool.run(*publish, proxy.url, code=17, **as_user())
        assert "waitress" in cut.error
        kept = folder / "packages" / wheel.name
        assert 0 < kept.stat().st_size < wheel.stat().st_size
        assert environment.install_with("pip", f"{url}simple/", "vllm-glm5", check=False).returncode
        refused = tool.run(*publish, url, code=17, **as_user())
        assert "was cut" in refused.error
        assert f"delete {wheel.name}" in refused.error
        kept.unlink()
        tool.run(*publish, url, **as_user())
        environment.install_with("pip", f"{url}simple/", "vllm-glm5")


def test_a_lost_answer_is_no_failure(release, tool, server, tmp_path):
    """The server has the wheel, and the connection broke before it said so."""
    url, simple, who = server
    wheel = release.wheel(files=BIG)
    publish = ("publish", wheel, "--report", release.report(wheel), "--index", url)
    from unittest import mock

    from twine.repository import Repository

    upload = Repository.upload

    def lost(self, package, **_):
        upload(self, package).close()
        raise requests.ConnectionError("reset by peer")

    with mock.patch.object(Repository, "upload", lost):
        tool.run(*publish, **who)
    assert whole(simple, tmp_path) == {wheel.name}


@pytest.mark.timeout(240)
def test_a_publisher_killed_at_any_moment(release, tool, server, tmp_path):
    """Ten deaths; what is listed after each is whole, and the next run goes through."""
    url, simple, who = server
    clock = random.Random(5)
    deaths, finished = 0, set()
    with Forks(tool, **who) as forks:
        publish = publisher(release, url)
        span = forks.span(publish(1))
        for _ in range(10):
            number = len(finished) + 2
            after = clock.uniform(0, span.seconds)
            ((code, text),) = forks.run(publish(number), kill_after=after)
            if code == 0:
                span.saw(after)
            deaths += code == -signal.SIGKILL
            assert code in {0, -signal.SIGKILL}, text
            names = whole(simple, tmp_path)
            assert len(names) - 1 - len(finished) in {0, 1}
            if len(names) - 1 > len(finished):
                finished.add(number)
        assert deaths >= 5
        forks.finish(publish(len(finished) + 2))
    assert len(whole(simple, tmp_path)) == len(finished) + 2


def publisher(release, index):
    """Return what gives the command that publishes the n-th revision, one that takes a while."""

    def command(number):
        wheel = release.wheel(f"0.20.2+glm5.{number}", files=BIG)
        return ("publish", wheel, "--report", release.report(wheel), "--index", index)

    return command


@pytest.mark.timeout(180)
def test_eight_publishers_at_once(release, tool, server, tmp_path):
    url, simple, who = server
    publish = publisher(release, url)
    with Forks(tool, **who) as forks:
        done = forks.run(*(publish(n) for n in range(1, 9)))
    assert [code for code, _ in done] == [0] * 8, done
    assert len(whole(simple, tmp_path)) == 8


@pytest.mark.timeout(180)
def test_eight_publishers_of_one_version(release, tool, server, tmp_path):
    """Two contents under one version: one wins, and all the others are told."""
    url, simple, who = server
    wheels = [release.wheel(folder=str(n), files={"vllm/x.py": str(n % 2)}) for n in range(8)]
    commands = [("publish", w, "--report", release.report(w), "--index", url) for w in wheels]
    with Forks(tool, **who) as forks:
        done = forks.run(*commands)
    assert whole(simple, tmp_path) == {wheels[0].name}
    page = requests.get(f"{simple}vllm-glm5/", timeout=10).text
    winner = next(n for n in (0, 1) if sha256(wheels[n]) in page)
    codes = [code for code, _ in done]
    assert codes[1 - winner :: 2] == [17] * 4, done
    # pypiserver looks whether a name is taken and writes the file in two steps: for a moment the other
    # content can be there, and who publishes the winner's then is told of it.
    writes_over = not simple.endswith("/+simple/")
    for code, text in done[winner::2]:
        assert code == 0 or (writes_over and code == 17 and sha256(wheels[1 - winner]) in text), (
            done
        )
    assert 0 in codes


@pytest.mark.timeout(240)
def test_a_promotion_killed_at_any_moment(release, tool, tmp_path, environment):
    """Thirty deaths on the directory index; each listed file is whole, and installs."""
    index = tmp_path / "index"
    folder = index / "simple" / "vllm-glm5"
    first = release.wheel()
    tool.run("publish", first, "--report", release.report(first), "--index", index)
    noise = random.Random(7).randbytes(16 << 20)
    wheel = release.wheel(NEXT, files={"vllm/__init__.py": "", "vllm/x.so": noise})
    tool.run("publish", wheel, "--index", index, "--channel", "staging")
    promote = ("promote", NEXT, "--report", release.report(wheel), "--index", index)
    shutil.copytree(index / "simple", tmp_path / "before")
    clock = random.Random(6)
    deaths = leftovers = 0
    with Forks(tool) as forks:
        span = forks.span(promote)
        for round_ in range(30):
            shutil.rmtree(index / "simple")
            shutil.copytree(tmp_path / "before", index / "simple")
            assert listed(index / "simple") == {first.name}
            # By the clock, most die while the signature is verified: let others get further.
            after = clock.uniform(0, span.seconds if round_ % 2 else 0.1)
            when = None if round_ % 2 else folder / ".vllm-glm5-tmp-*"
            ((code, _),) = forks.run(promote, kill_after=after, kill_when=when)
            if code == 0 and when is None:
                span.saw(after)
            deaths += code == -signal.SIGKILL
            leftovers += bool(list(folder.glob(".vllm-glm5-tmp-*")))
            assert first.name in listed(index / "simple")
            if round_ % 10 == 9:
                url = (index / "simple").as_uri()
                environment.install_with("uv", url, "--reinstall", f"vllm-glm5=={VERSION}")
        assert deaths >= 15
        assert leftovers >= 3, "some died in the middle of writing"
        forks.finish(promote)
    assert listed(index / "simple") == {first.name, wheel.name}
    assert not list(index.rglob(".vllm-glm5-tmp-*"))
    environment.install_with("pip", (index / "simple").as_uri(), "--upgrade", "vllm-glm5")
    assert environment.version() == NEXT


def test_the_check_of_whole_files_can_fail(pypiserver, tmp_path):
    """The control of ``whole``: a listed file that is none."""
    wheel = write_wheel(tmp_path, VERSION, BIG)
    folder = tmp_path / "pypiserver" / "packages"
    (folder / wheel.name).write_bytes(wheel.read_bytes()[: 4 << 20])
    with pytest.raises(zipfile.BadZipFile):
        whole(f"{pypiserver}simple/", tmp_path)
