"""A fork of a small release, and a developer who makes patches for it: real git everywhere."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from builder.locations import Cache, Project
from tests.series.fork import Developer, Fork, Work, three
from tests.series.rebasing import Rebase


@pytest.fixture
def tmp_path(folder):
    path = Path(tempfile.mkdtemp(dir=folder))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def _templates(folder):
    """Made once, copied for each test."""
    Developer.new(folder / "templates" / "developer")
    Fork.new(folder / "templates" / "fork").source()
    developer = Developer.new(folder / "templates" / "developer-of-three")
    fork = Fork.new(folder / "templates" / "work")
    fork.put(three(developer))
    made = Work(fork)
    made.export()
    made.check()
    return folder / "templates"


def _copy(template, root):
    shutil.copytree(template, root, symlinks=True)
    return Fork(root, Project(root / "project"), Cache(root / "cache"))


@pytest.fixture
def developer(_templates, tmp_path):
    """Somebody with a repository of the release."""
    shutil.copytree(_templates / "developer", tmp_path / "developer")
    return Developer(tmp_path / "developer")


@pytest.fixture
def fork(_templates, tmp_path):
    """The project (release pinned, series empty) and a cache that holds the release."""
    return _copy(_templates / "fork", tmp_path / "fork")


@pytest.fixture
def work(_templates, tmp_path):
    """A project with a series of three patches, as exported, and its clean work tree."""
    fork = _copy(_templates / "work", tmp_path / "fork")
    made = Work(fork)
    made.user.git("update-index", "--refresh")
    return made


@pytest.fixture
def rebase(tmp_path):
    return Rebase(tmp_path / "rebase")
