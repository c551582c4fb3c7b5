"""What GLM-5's GGUF products take by their number of tokens: ggml's kernels, and dequantized pieces.

    python benchmarks/gguf_matmul.py [--kinds Q8_0,Q4_K] [--json FILE]

Needs a GPU with 20 GB free and an environment with the built wheel of v0.20.2 or v0.23.0. The dimensions
are those of one layer, uncut: `attn_output` and `attn_q_b` are its large linear layers, `experts` are both
products of 8 of 256, without what is between them. Milliseconds, medians of events around a call; both
ways run in one process on the same tensors, and their relative L2 distance says that they compute the same.
"""

# ruff: noqa: PLC0415
from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import sparse_timing
import torch

HIDDEN, EXPERTS, MIDDLE, TOP_K = 6144, 256, 2048, 8
LINEAR = {"attn_output": (6144, 16384), "attn_q_b": (16384, 2048)}
KINDS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q2_K", "IQ2_XXS")
LINEAR_TOKENS = (16, 32, 64, 128, 512, 2048, 4096)
EXPERT_TOKENS = (64, 256, 512, 1024, 2048, 4096)
NEVER, ALWAYS = 1 << 40, 0


def blocks(kind: gguf.GGMLQuantizationType, *shape: int) -> torch.Tensor:
    from gguf_blocks import random_blocks

    generator = torch.Generator("cuda").manual_seed(7)
    return random_blocks(kind, *shape, scale=2**-12, generator=generator)


@contextlib.contextmanager
def dequantizing_from(tokens: int) -> Iterator[None]:
    """So many tokens of a linear layer, or of an expert."""
    from vllm.model_executor.layers.quantization import gguf_dequantized as module

    names = ("_LINEAR_TOKENS", "_EXPERT_TOKENS", "_EXPERT_TOKENS_OF_VECTORS")
    before = {name: getattr(module, name) for name in names}
    vars(module).update(dict.fromkeys(names, tokens))
    try:
        yield
    finally:
        vars(module).update(before)


def compare(call: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Both ways' milliseconds, and the distance of their results."""
    from sparse_ops import error

    times, results = {}, {}
    for way, tokens in (("kernel", NEVER), ("dequantized", ALWAYS)):
        with dequantizing_from(tokens):
            results[way] = call()
            times[f"{way}_ms"] = round(sparse_timing.event_time(call, 3) / 1e3, 3)
    distance = error(results["dequantized"], results["kernel"].double())
    return times | {"distance": round(distance, 4)}


def linear(kind: gguf.GGMLQuantizationType) -> Iterator[dict]:
    from vllm.model_executor.layers.quantization.gguf import _fused_mul_mat_gguf

    for name, (rows, columns) in LINEAR.items():
        weight = blocks(kind, rows, columns)
        for tokens in LINEAR_TOKENS:
            x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
            times = compare(lambda x=x, weight=weight: _fused_mul_mat_gguf(x, weight, kind))
            yield {"product": name, "kind": kind.name, "tokens": tokens} | times


def experts(kind: gguf.GGMLQuantizationType) -> Iterator[dict]:
    from vllm.model_executor.layers.quantization.gguf import _fused_moe_gguf

    up, down = blocks(kind, EXPERTS, 2 * MIDDLE, HIDDEN), blocks(kind, EXPERTS, HIDDEN, MIDDLE)
    for tokens in EXPERT_TOKENS:
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        weights, ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)
        given = (x, up, down, weights.bfloat16(), ids.int(), kind, kind, "silu")
        times = compare(lambda given=given: _fused_moe_gguf(*given))
        yield {"product": "experts", "kind": kind.name, "tokens": tokens} | times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sparse_timing.need_gpu(parser)
    sparse_timing.need_folder(parser, options.json)
    rows = []
    for name in options.kinds.split(","):
        kind = gguf.GGMLQuantizationType[name]
        for product in (linear, experts):
            for row in product(kind):
                print(" ".join(f"{value:>12}" for value in row.values()), flush=True)
                rows.append(row)
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
