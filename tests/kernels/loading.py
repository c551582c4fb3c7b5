"""Imports one Triton file of a patched tree, with nothing of vLLM but its Triton files."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

OPS = Path("vllm/v1/attention/ops")
PACKAGES = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops")


def load_op(tree: Path, name: str) -> types.ModuleType:
    """The module OPS/name.py of this tree; vllm.triton_utils is satisfied by Triton itself."""
    import triton
    import triton.language as tl

    utils = types.ModuleType("vllm.triton_utils")
    utils.__dict__.update(triton=triton, tl=tl)
    packages = {package: types.ModuleType(package) for package in PACKAGES}
    packages["vllm.v1.attention.ops"].__path__ = [str(tree / OPS)]
    before = {key: module for key, module in sys.modules.items() if key.split(".")[0] == "vllm"}
    for key in before:
        del sys.modules[key]
    sys.modules.update(packages | {"vllm.triton_utils": utils})
    try:
        spec = importlib.util.spec_from_file_location(f"op_{name}", tree / OPS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == "vllm"]:
            del sys.modules[key]
        sys.modules.update(before)
    return module
