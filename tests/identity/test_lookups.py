"""Patch 0001: nothing in the tree asks for the distribution by upstream's name alone."""

from __future__ import annotations

import pytest

from .look_ups import look_ups


def test_the_patched_tree_has_none(patched_tree):
    assert list(look_ups(patched_tree)) == []


ADDED_SINCE = {
    "v0.20.2": [],
    "v0.23.0": ["vllm/triton_utils/importing.py"],
    "v0.33.0": ["vllm/snapshot/runtime.py"],
}


def test_upstreams_tree_has_them(base_tree, tag):
    """The search finds what it is for; a release that adds a place shows here."""
    assert [found.partition(":")[0] for found in look_ups(base_tree)] == sorted([
        "vllm/entrypoints/cli/main.py",
        "vllm/entrypoints/cli/run_batch.py",
        "vllm/platforms/__init__.py",
        "vllm/utils/import_utils.py",
        *ADDED_SINCE[tag],
    ])  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        'from importlib.metadata import version\nx = 1\nversion("vllm")\n',
        'import importlib.metadata\nx = 1\nimportlib.metadata.version(\n    "vllm",\n)\n',
        "import importlib.metadata as m\nx = 1\nm.metadata('vllm')\n",
        "from importlib.metadata import distribution as d, distribution\nx = 1\ndistribution('vLLM')\n",
        "import importlib.metadata\nx = 1\nimportlib.metadata.files('vllm')\n",
        "import importlib.metadata\nx = 1\nimportlib.metadata.version(distribution_name='vllm')\n",
        "from importlib.metadata import Distribution\nx = 1\nDistribution.from_name('vllm')\n",
    ],
)
def test_a_new_look_up_is_found(tmp_path, source):
    (tmp_path / "vllm" / "new").mkdir(parents=True)
    (tmp_path / "vllm" / "new" / "place.py").write_text(source)
    assert list(look_ups(tmp_path)) == ["vllm/new/place.py:3"]


@pytest.mark.parametrize(
    "source",
    [
        'from importlib.metadata import version\nversion("torch"), "vllm"\n',
        'import importlib.resources\nimportlib.resources.files("vllm")\n',
        'import logging\nlogging.getLogger("vllm")\n',
        'from vllm import distribution\ndistribution.version(), "vllm"\n',
    ],
)
def test_other_calls_are_not(tmp_path, source):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "place.py").write_text(source)
    assert list(look_ups(tmp_path)) == []
