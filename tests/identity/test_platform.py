"""Patch 0001: what the look-ups decide when only ``vllm-glm5`` is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from .conftest import VERSION

PROBE = Path(__file__).with_name("probe_look_ups.py")
NOT_FOUND = "PackageNotFoundError: No package metadata was found for vllm"


def _probe(tree, site_without_vllm, renamed_distribution, home):
    python, view = site_without_vllm
    done = subprocess.run(
        [python, "-I", "-S", PROBE, tree, renamed_distribution, view],
        check=False, capture_output=True, text=True, cwd=home, timeout=240,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    last = (done.stdout.splitlines() or [""])[-1]
    assert last.startswith("RESULTS "), done.stdout + done.stderr
    return json.loads(last.removeprefix("RESULTS "))


@pytest.fixture(scope="module")
def patched(patched_tree, site_without_vllm, renamed_distribution, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return _probe(patched_tree, site_without_vllm, renamed_distribution, home)


@pytest.fixture(scope="module")
def unpatched(base_tree, site_without_vllm, renamed_distribution, tmp_path_factory):
    """With the rename alone, each look-up fails: what the patch is for."""
    home = tmp_path_factory.mktemp("home")
    return _probe(base_tree, site_without_vllm, renamed_distribution, home)


def test_a_gpu_is_found(patched):
    assert patched["platform"] == "vllm.platforms.cuda.CudaPlatform"


def test_unpatched_no_gpu_is_found(unpatched):
    assert unpatched["platform"] == "vllm.platforms.interface.UnspecifiedPlatform"


def test_the_command_answers(patched):
    assert patched["command_line"] == [0, VERSION]


def test_unpatched_the_command_dies(unpatched):
    assert unpatched["command_line"] == NOT_FOUND


def test_run_batch_runs(patched):
    assert patched["run_batch"] == [f"vLLM batch processing API version {VERSION}", 1]


def test_unpatched_run_batch_dies(unpatched):
    assert unpatched["run_batch"] == NOT_FOUND


def test_a_missing_extra_is_named(patched):
    assert patched["placeholder"] == "Please install vllm-glm5[audio] for audio support"


def test_unpatched_a_missing_extra_is_not_named(unpatched):
    assert unpatched["placeholder"] == NOT_FOUND
