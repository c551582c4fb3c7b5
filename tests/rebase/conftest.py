"""Two made-up releases of upstream, and a fork whose series moves from one to the other."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.rebase.moving import Moving


@pytest.fixture
def moving(folder):
    """A function that makes a fork with two releases and a series on the first."""
    path = Path(tempfile.mkdtemp(dir=folder))
    made = []

    def make(old, new, *patches):
        made.append(Moving(path / str(len(made)), old, new, patches))
        return made[-1]

    yield make
    shutil.rmtree(path)
