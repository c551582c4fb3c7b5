"""Upstream's own build fails, or asks for what it must not have: what a user sees of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.build import madeup


def test_a_failed_build_names_its_log(make_user):
    user = make_user([("Break it", {"setup.py": "raise SystemExit('this tree is broken')\n"})])
    said = user.fails(15, "--tag", user.tag)
    assert "this tree is broken" in said
    log = next(word.rstrip(":") for word in said.split() if ".log" in word)
    assert "this tree is broken" in Path(log).read_text()
    assert not list((user.cache / "work").iterdir())


# cmake's own words, and what Python prints when the caller of cmake gives up.
CMAKE = r"""
import os, subprocess

def configure(depth=12):
    if depth:
        return configure(depth - 1)
    said = 'CMake Error at CMakeLists.txt:21 (find_package):\n  Could not find CUDAToolkit\n'
    subprocess.run(
        ['sh', '-c', 'printf %s "$SAID" >&2; exit 1'], env=os.environ | {'SAID': said}, check=True
    )

configure()
"""


@pytest.mark.parametrize("cause", ["cmake", "compiler"])
def test_a_failed_build_shows_what_stopped_it(make_user, cause):
    """And not the end of the traceback of whoever had started it."""
    if cause == "cmake":
        user = make_user([("Configure", {"setup.py": lambda text: CMAKE + text})])
        expected = "CMake Error at CMakeLists.txt:21 (find_package):"
    else:
        broken = {"csrc/ops.c": lambda text: f"{text}\nint broken(void) {{ return nobody; }}\n"}
        user = make_user([("Break it", broken)], tag=madeup.SOURCE_TAG)
        expected = "nobody"
    said = user.fails(15, "--tag", user.tag, "--no-stage")
    assert expected in said
    log = next(word.rstrip(":") for word in said.split() if ".log" in word)
    last = "\n".join(Path(log).read_text().splitlines()[-15:])
    if cause == "cmake":
        assert expected not in last, "the control: the last lines alone do not show it"
        assert "Could not find CUDAToolkit" in said


def test_the_build_has_no_network(make_user, index):
    """Upstream's setup.py must not fetch anything: what it takes is what was pinned."""
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel gives no network namespaces here")
    probe = (
        f"import urllib.request; urllib.request.urlopen('http://{index.host}/simple/vllm/', "
        "timeout=5)\n"
    )
    exec(probe, {})  # it is there
    user = make_user([("Ask the network", {"setup.py": lambda text: probe + text})])
    assert "urlopen error" in user.fails(15, "--tag", user.tag, "--no-stage")
