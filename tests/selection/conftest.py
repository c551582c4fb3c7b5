"""What a patched tree selects on cards that are not there, in the real vLLM environment.

VLLM_GLM5_PYTHON (by default this Python) must have vLLM's compiled extensions; VLLM_GLM5_TREE is
the patched source tree, VLLM_GLM5_BASE_TREE upstream's own, both of the same release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from jobs import OURS, UPSTREAMS, name_of  # noqa: E402


def _folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    return Path(value)


@pytest.fixture(scope="session")
def tree() -> Path:
    return _folder("VLLM_GLM5_TREE")


@pytest.fixture(scope="session")
def base_tree() -> Path:
    return _folder("VLLM_GLM5_BASE_TREE")


def probe(tree: Path, stub: Path, jobs: list[list]) -> list:
    """What probe.py prints for these jobs."""
    python = os.environ.get("VLLM_GLM5_PYTHON", sys.executable)
    drop = ("PYTHONPATH", "VLLM_SPARSE_INDEXER_BACKEND", "VLLM_BATCH_INVARIANT")
    env = {key: value for key, value in os.environ.items() if key not in drop}
    done = subprocess.run(
        [python, HERE / "probe.py", tree, stub, json.dumps(jobs)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def decided(tree, base_tree, tmp_path_factory) -> dict[str, list]:
    """Answers of both trees by job: {"ours matrix": ..., "upstream construct 12.0": ...}."""
    stub = tmp_path_factory.mktemp("stub")
    answers = {}
    for who, where, jobs in (("ours", tree, OURS), ("upstream", base_tree, UPSTREAMS)):
        for job, answer in zip(jobs, probe(where, stub, jobs), strict=True):
            answers[f"{who} {name_of(job)}"] = answer
    return answers


@pytest.fixture(scope="session")
def ours(decided) -> list[dict]:
    return decided["ours matrix"]


@pytest.fixture(scope="session")
def upstreams(decided) -> list[dict]:
    return decided["upstream matrix"]
