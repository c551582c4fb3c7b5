"""Where the project is, and how tests run the tool: as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What concerns one release alone is tested with this one; each_release() is for the others too.
TAG = "v0.20.2"
TAGS = sorted(path.parent.name for path in ROOT.glob("patches/v*/series"))


EACH_RELEASE = pytest.mark.parametrize("tag", TAGS, scope="session")


def each_release(metafunc):
    """As EACH_RELEASE, for the tests of a module or folder that need a release's tree or wheel."""
    if "tag" in metafunc.fixturenames:
        metafunc.parametrize("tag", TAGS, scope="session")
        metafunc.has_tag = True


def run_builder(*arguments, cwd=None, check=True, env=None, cache=None):
    """Run ``python -m builder`` as a user would; return the finished process."""
    environment = dict(os.environ if env is None else env)
    if cache is not None:
        environment["VLLM_GLM5_CACHE"] = str(cache)
    process = subprocess.run(
        [sys.executable, "-m", "builder", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if check and process.returncode:
        pytest.fail(f"builder {arguments} ended with {process.returncode}\n{process.stderr}")
    return process
