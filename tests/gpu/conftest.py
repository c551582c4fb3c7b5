"""Fixtures of the GPU suite: figures on record, the model under test, one engine a process.

Needs a CUDA device and the built wheel. VLLM_GLM5_REFERENCE may name a folder of reference files
(glm-dsa-mini's layout); without it the suite makes a model of the same shape and its own oracle.
VLLM_GLM5_FIGURES may name a JSON file that collects the figures.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# Engines inherit it. FlashInfer's sampler is compiled when the first one starts, for two minutes and
# behind a lock, and a test that is killed then leaves that to the next. Only top-k and top-p use it.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

ENGINE_LIMIT_S = 240
FIGURES: dict[str, object] = {}


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: measures, so nothing else may run on the card")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU and the built wheel")


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in item.path.parents]
    if not here or has_gpu():
        return
    for item in here:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter):
    if not FIGURES:
        return
    terminalreporter.section("figures")
    width = max(map(len, FIGURES))
    for name in sorted(FIGURES):
        terminalreporter.write_line(f"{name:<{width}}  {FIGURES[name]}")


@pytest.fixture(scope="session")
def record_figure():
    """Call with a name and a value; the run's report and VLLM_GLM5_FIGURES get it."""
    target = os.environ.get("VLLM_GLM5_FIGURES")

    def record(name: str, value) -> None:
        if hasattr(value, "item"):
            value = value.item()
        FIGURES[name] = round(value, 5) if isinstance(value, float) else value
        if target:
            path = Path(target)
            known = json.loads(path.read_text()) if path.exists() else {}
            known[name] = FIGURES[name]
            scratch = path.with_name(path.name + ".tmp")
            scratch.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            scratch.replace(path)

    return record


@pytest.fixture(scope="module")
def figure(request):
    """Call with a name and a value of the sparse kernels."""
    from sparse_ops import figures_of

    return figures_of(request.config)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that all processes of a gate share; a run without the gate has its own."""
    shared = os.environ.get("VLLM_GLM5_SHARED")
    return Path(shared) if shared else tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def gguf_models(shared_folder):
    from gguf_suite import Models, call

    reference = os.environ.get("VLLM_GLM5_REFERENCE")
    folder = shared_folder / "models"
    folder.mkdir(exist_ok=True)
    return Models(folder, Path(reference) if reference else None, call)


@pytest.fixture(scope="session")
def run_engine(shared_folder):
    """Run an engine once a gate for the same job; its arrays and facts, and its log."""
    from gguf_suite import Engines, call

    folder = shared_folder / "engines"
    folder.mkdir(exist_ok=True)
    return Engines(folder, call, ENGINE_LIMIT_S)
