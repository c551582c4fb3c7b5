"""Compiles the fused kernels that prepare the indexer's queries and keys, for cards without a GPU.

    fused.py TREE STUB_FOLDER CAPABILITY...

Prints a JSON object: for each capability the kernels that were compiled, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "selection")]


def launch(kernels, dtype) -> None:
    """One step of GLM-5: 8 tokens, 8 heads of 64 on this GPU, an indexer of 32 heads."""
    import torch

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    tokens, heads = 8, 8
    positions = empty(tokens, dtype=torch.int64)
    cos_sin = empty(4096, 64)
    kernels.fused_norm_rope(
        positions, empty(tokens, 2048), empty(2048), 1e-5, empty(tokens, 512), empty(512), 1e-5,
        empty(tokens, 64), cos_sin, empty(tokens, 128), empty(128, dtype=torch.float32),
        empty(128, dtype=torch.float32), 1e-6, cos_sin, empty(tokens, 2048, dtype=torch.int32),
        slot_mapping=positions,
        indexer_k_cache=empty(100, 64, 132, dtype=torch.uint8),
        mla_kv_cache=empty(100, 64, 576),
        mla_k_scale=empty(1, dtype=torch.float32),
        index_rope_interleave=True,
        skip_scale=True,
        kv_c_out=empty(tokens, 512),
        k_pe_out=empty(tokens, 64),
    )  # fmt: skip
    kernels.fused_q(
        positions, empty(tokens, heads, 64), cos_sin, empty(tokens, 32, 128), cos_sin,
        empty(tokens, heads, 512), empty(1, dtype=torch.float32), empty(tokens, 32), 1.0, 1.0,
        index_rope_interleave=True, quantize_mqa=False,
    )  # fmt: skip


def main(tree: str, stub: str, *capabilities: str) -> dict[str, list[str] | str]:
    import overlay

    overlay.install(Path(tree))
    import no_gpu

    platform = no_gpu.fake_cuda((8, 0), Path(stub))
    import torch
    from aot import compiling_for
    from vllm.models.deepseek_v32.common import kernels

    answers: dict[str, list[str] | str] = {}
    for capability in map(int, capabilities):
        platform.faked = divmod(capability, 10)
        try:
            with compiling_for(capability) as compiled:
                for dtype in (torch.bfloat16, torch.float16):
                    launch(kernels, dtype)
            answers[str(capability)] = sorted({name for name, _ in compiled})
        except Exception as error:  # noqa: BLE001 - it is the result
            answers[str(capability)] = f"{type(error).__name__}: {error}"
    return answers


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(main(*sys.argv[1:])), file=out)
