"""Imports one Triton file of a patched tree, with nothing of vLLM but that file."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

OPS = Path("vllm/v1/attention/ops")


def load_op(tree: Path, name: str) -> types.ModuleType:
    """The module OPS/name.py of this tree; its one vLLM import is satisfied by Triton itself."""
    import triton
    import triton.language as tl

    package = types.ModuleType("vllm")
    utils = types.ModuleType("vllm.triton_utils")
    utils.__dict__.update(triton=triton, tl=tl)
    saved = {key: sys.modules.get(key) for key in ("vllm", "vllm.triton_utils")}
    sys.modules.update({"vllm": package, "vllm.triton_utils": utils})
    try:
        spec = importlib.util.spec_from_file_location(f"op_{name}", tree / OPS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        for key, value in saved.items():
            if value is None:
                del sys.modules[key]
            else:
                sys.modules[key] = value
    return module
