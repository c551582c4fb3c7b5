"""Triton kernels of the patched tree without a GPU: interpreted, and compiled ahead of time.

Needs a Python with torch and triton, and VLLM_GLM5_TREE, the patched source tree.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

HAVE_TRITON = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
if HAVE_TRITON and "triton" not in sys.modules:
    import torch

    # Triton reads the variable when it is imported. With a GPU the same process may run kernels on
    # it, so the interpreter stays out of the way there.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # Triton 3.6's interpreter makes loop bounds of one-element arrays.
            item.add_marker(
                pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
            )


@pytest.fixture(scope="session")
def tree() -> Path:
    path = os.environ.get("VLLM_GLM5_TREE")
    if not path:
        pytest.skip("VLLM_GLM5_TREE names no patched tree")
    return Path(path)


@pytest.fixture(scope="session")
def interpreted() -> None:
    if not HAVE_TRITON:
        pytest.skip("this Python has no torch and triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without its interpreter (a GPU is here)")


@pytest.fixture(scope="session")
def sparse_mla(interpreted: None, tree: Path):
    from loading import load_op

    return load_op(tree, "triton_sparse_mla")


@pytest.fixture(scope="session")
def mqa(interpreted: None, tree: Path):
    from loading import load_op

    return load_op(tree, "triton_mqa_logits")


@pytest.fixture
def sparse_mla_fp8(interpreted: None, tree: Path):
    from interpreting import true_small_floats
    from loading import load_op

    with true_small_floats():
        yield load_op(tree, "triton_sparse_mla_fp8")
