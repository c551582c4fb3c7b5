"""The patched loader on a machine without a GPU: real model classes, real files.

Needs the environment of a built wheel (its compiled extensions are imported, not run) and
VLLM_GLM5_TREE, the patched source tree.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Nothing here may depend on what a hub answers; huggingface_hub reads this when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(HERE), str(HERE.parent / "gpu"), str(HERE.parent / "selection")]
from gguf_bytes import Table  # noqa: E402 - found by the line above
from release import IN_TREE  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "plugin: for releases that leave GGUF to a plugin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if IN_TREE:
        others = [item for item in items if item.get_closest_marker("plugin")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    for item in items:
        if HERE in item.path.parents:
            # Importing vLLM and its dependencies warns; none of it is ours.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def data() -> Path:
    return HERE / "data"


@pytest.fixture(scope="session")
def tree() -> Path:
    return Path(os.environ["VLLM_GLM5_TREE"])


@pytest.fixture(scope="session", autouse=True)
def platform(tmp_path_factory):
    """vLLM of the patched tree, on a CUDA platform of capability 9.0 whose device is the CPU."""
    tree = os.environ.get("VLLM_GLM5_TREE")
    if not tree:
        pytest.skip("VLLM_GLM5_TREE names no patched tree")
    if not all(importlib.util.find_spec(name) for name in ("torch", "gguf", "vllm")):
        pytest.skip("this Python has no vLLM")
    import cpu_vllm

    return cpu_vllm.start(Path(tree), tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="session")
def config(data):
    import transformers

    return transformers.AutoConfig.from_pretrained(data / "hf")


@pytest.fixture(scope="session")
def files(data):
    """The files of the format's own tools, by the names of their quantizations."""
    return {
        "bf16": data / "glm-dsa-micro-bf16.gguf",
        "Q4_K_M": data / "glm-dsa-micro-Q4_K_M.gguf",
        "q8_0": data / "q8_0-split" / "glm-dsa-micro-Q8_0-00001-of-00006.gguf",
    }


@pytest.fixture
def table(files):
    """The header of the Q4_K_M file, to be changed."""
    return Table(files["Q4_K_M"].read_bytes())


@pytest.fixture(scope="session")
def error():
    from vllm.transformers_utils.gguf_file import GGUFFileError

    return GGUFFileError


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """vLLM's loggers do not propagate."""
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO")
    return caplog
