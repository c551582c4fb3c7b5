"""Products with GGUF weights against float64, on both sides of where dequantized pieces take over.

The method is called as a layer calls it; its weights are random valid blocks of the types that GLM-5's
files have. Memory that torch hands out again is full of NaN.
"""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf_blocks import random_blocks
from sparse_ops import error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

HIDDEN, MIDDLE, EXPERTS, TOP_K = 512, 256, 8, 2
KINDS = ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_XS", "IQ3_S", "IQ2_XXS"]
LINEAR_TOKENS, EXPERT_TOKENS = 64, 64 * EXPERTS // TOP_K
# The kernels round tokens to 8 bits in blocks of 32; the pieces are rounded to the tokens' type.
BOUNDS = {"kernel": 0.04, "dequantized": 0.01}


def methods():
    """The two products as the layers call them, in the tree and in the plugin."""
    try:
        from vllm.model_executor.layers.quantization import gguf as tree
    except ImportError:
        from vllm.plugins.gguf_mla.adapter import bound_kernels
        from vllm_gguf_plugin import ops
        from vllm_gguf_plugin.quantization import fused_moe, linear

        bound_kernels(ops)
        return linear._fused_mul_mat_gguf, fused_moe._fused_moe_gguf
    return tree._fused_mul_mat_gguf, tree._fused_moe_gguf


def blocks(kind: gguf.GGMLQuantizationType, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks with scales of 2**-8, and what they stand for, float64."""
    generator = torch.Generator().manual_seed(7)
    data = random_blocks(kind, *shape, scale=2**-8, generator=generator)
    dense = torch.from_numpy(gguf.quants.dequantize(data.numpy(), kind)).double().cuda()
    assert dense.isfinite().all()
    return data.cuda(), dense


def poison() -> None:
    torch.full((32 << 20,), torch.nan, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_linear(kind, dtype, figure):
    product, _ = methods()
    kind = gguf.GGMLQuantizationType[kind]
    weight, dense = blocks(kind, 384, HIDDEN)
    for way, tokens in (("kernel", LINEAR_TOKENS - 1), ("dequantized", LINEAR_TOKENS)):
        x = torch.randn(tokens, HIDDEN, dtype=dtype, device="cuda") / 64
        poison()
        found = product(x, weight, kind)
        assert found.dtype is dtype
        right = x.double() @ dense.t()
        figure(f"gguf linear {kind.name} {dtype} {way} relative L2", error(found, right))
        assert error(found, right) < BOUNDS[way]
        assert error(found, right.roll(1, 0)) > 0.5  # another token's


def test_linear_in_pieces(monkeypatch):
    """As a vocabulary is, of which 64 requests want the logits; the last piece is shorter."""
    from vllm.model_executor.layers.quantization import gguf_dequantized

    product, _ = methods()
    monkeypatch.setattr(gguf_dequantized, "_PIECE_BYTES", 200 * HIDDEN * 2)
    kind = gguf.GGMLQuantizationType.Q6_K
    weight, dense = blocks(kind, 1000, HIDDEN)
    x = torch.randn(LINEAR_TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda") / 64
    poison()
    found = product(x, weight, kind)
    assert error(found, x.double() @ dense.t()) < BOUNDS["dequantized"]


def experts_reference(x, up, down, weights, ids) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for slot in range(ids.shape[1]):
        gate, value = torch.einsum("th,tmh->tm", x.double(), up[ids[:, slot]]).chunk(2, 1)
        middle = torch.nn.functional.silu(gate) * value
        product = torch.einsum("tm,thm->th", middle, down[ids[:, slot]])
        out += product * weights[:, slot, None].double()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts(kind, dtype, figure):
    """Some experts have no token. IQ types hand over earlier: at 16 tokens an expert."""
    _, product = methods()
    kind = gguf.GGMLQuantizationType[kind]
    up, dense_up = blocks(kind, EXPERTS, 2 * MIDDLE, HIDDEN)
    down, dense_down = blocks(kind, EXPERTS, HIDDEN, MIDDLE)
    last = EXPERT_TOKENS // 4 if kind.name.startswith("IQ") else EXPERT_TOKENS
    some = torch.tensor([1, 2, 4, 7], device="cuda")
    for way, tokens in (("kernel", last - 1), ("dequantized", last)):
        x = torch.randn(tokens, HIDDEN, dtype=dtype, device="cuda") / 64
        ids = some[torch.rand(tokens, len(some), device="cuda").topk(TOP_K).indices]
        weights = torch.rand(tokens, TOP_K, dtype=dtype, device="cuda") / 8
        right = experts_reference(x, dense_up, dense_down, weights, ids)
        poison()
        found = product(x, up, down, weights, ids.int(), kind, kind, "silu")
        assert found.dtype is dtype
        figure(f"gguf experts {kind.name} {dtype} {way} relative L2", error(found, right))
        assert error(found, right) < BOUNDS[way]
        assert error(found, right.roll(1, 0)) > 0.5  # another token's


@pytest.mark.parametrize("kind", ["Q4_K", "IQ2_XXS"])
def test_experts_in_a_graph(kind):
    """So many tokens that pieces are dequantized outside of one, as in the run before the capture."""
    _, product = methods()
    kind = gguf.GGMLQuantizationType[kind]
    up, dense_up = blocks(kind, EXPERTS, 2 * MIDDLE, HIDDEN)
    down, dense_down = blocks(kind, EXPERTS, HIDDEN, MIDDLE)
    x = torch.zeros(EXPERT_TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(EXPERT_TOKENS, TOP_K, dtype=torch.int32, device="cuda")
    weights = torch.full((EXPERT_TOKENS, TOP_K), 1 / 8, dtype=torch.bfloat16, device="cuda")

    def run() -> torch.Tensor:
        return product(x, up, down, weights, ids, kind, kind, "silu")

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    x.copy_(torch.randn_like(x) / 64)
    ids.copy_(torch.rand(EXPERT_TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices)
    graph.replay()
    right = experts_reference(x, dense_up, dense_down, weights, ids)
    assert error(found, right) < BOUNDS["kernel"]
    assert error(run(), right) < BOUNDS["dequantized"]
