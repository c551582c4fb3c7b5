"""Where the project is, and how tests run the tool: as a user would."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What concerns one release alone is tested with this one; each_release() is for the others too.
TAG = "v0.20.2"
TAGS = sorted(path.parent.name for path in ROOT.glob("patches/v*/series"))


EACH_RELEASE = pytest.mark.parametrize("tag", TAGS, scope="session")


def _torch(tag):
    return tomllib.loads((ROOT / "upstream" / f"{tag}.toml").read_text())["torch"]


def given_environment(tag):
    """The Python that VLLM_GLM5_ENVIRONMENTS ("v1=/path/to/python v2=...") names, or None.

    It has a wheel of the release, and everything that ours requires.
    """
    given = dict(one.split("=", 1) for one in os.environ.get("VLLM_GLM5_ENVIRONMENTS", "").split())
    return Path(given[tag]) if tag in given else None


# A second torch takes 9 GB: the tests that need it run where an environment is given.
TAGS_WITH_ENVIRONMENT = [
    tag for tag in TAGS if _torch(tag) == _torch(TAG) or given_environment(tag)
]


def each_release(metafunc):
    """As EACH_RELEASE, for the tests of a module or folder that need a release's tree or wheel."""
    if "tag" in metafunc.fixturenames:
        installs = "vllm_environment" in metafunc.fixturenames
        tags = TAGS_WITH_ENVIRONMENT if installs else TAGS
        metafunc.parametrize("tag", tags, scope="session")
        metafunc.has_tag = True


def advised(text, project):
    """What the tool prints for ``text``, a command of its own in it, where a project was named."""
    return text.replace(
        "python -m builder ", f"python -m builder --project {shlex.quote(str(project))} "
    )


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
