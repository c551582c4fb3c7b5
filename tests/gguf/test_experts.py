"""The kernels of quantized weights are asked for what they can address, and for nothing else.

No GPU here: the kernels are stood in for by what their sources say (csrc/quantization/gguf, the
same in vLLM up to v0.23.0 and in vllm-gguf-plugin 0.0.5), limits included.
"""

from __future__ import annotations

import numpy as np
import pytest
import release
import torch

BLOCK = 8


def align(topk_ids, block_size, num_experts):
    """moe_align_block_size: rows by expert, each expert's padded with the number of rows."""
    flat = topk_ids.flatten().tolist()
    rows, experts = [], []
    for expert in range(num_experts):
        mine = [row for row, chosen in enumerate(flat) if chosen == expert]
        mine += [len(flat)] * (-len(mine) % block_size)
        rows += mine
        experts += [expert] * (len(mine) // block_size)
    padded = len(rows)
    longest = len(flat) + num_experts * (block_size - 1)
    rows += [len(flat)] * (longest - padded)
    experts += [0] * (-(-longest // block_size) - len(experts))
    as_int = {"dtype": torch.int32}
    return torch.tensor(rows, **as_int), torch.tensor(experts, **as_int), torch.tensor([padded])


def int32(value: int) -> int:
    return int(np.array([value], np.int64).astype(np.int32)[0])


def moe_a8(x, weights, sorted_ids, expert_ids, padded, kind, rows, top_k, tokens):
    """ggml_moe_a8: `moe_q` of moe.cuh on weights that are one number a row."""
    out = torch.full((tokens * top_k, rows), torch.nan)
    for block, expert in enumerate(expert_ids.tolist()):
        if expert > 255 or expert < 0 or block * BLOCK > padded.item():
            continue
        # `(char*)vx + exp_idx * exp_stride`
        place = int32(int32(expert) * int32(weights.stride(0)))
        assert place >= 0, "out of the tensor"
        assert place % weights.stride(0) == 0, "inside of another expert"
        scale = weights[place // weights.stride(0), :rows, 0].float()
        for row in sorted_ids[block * BLOCK : (block + 1) * BLOCK].tolist():
            if row < tokens * top_k:
                out[row] = x[row // top_k].sum() * scale
    return out


def moe_a8_vec(x, weights, topk_ids, top_k, kind, rows, tokens):
    """ggml_moe_a8_vec: `moe_vec_q` of moe_vec.cuh, a block in z a row."""
    assert tokens * top_k <= 65535, "CUDA error: invalid configuration argument"
    scale = weights[topk_ids.flatten().long(), :rows, 0].float()
    return x.repeat_interleave(top_k, 0).sum(1, keepdim=True) * scale


def mul_mat_a8(weights, x, kind, rows):
    """ggml_mul_mat_a8 in so far as its time grows with the tokens."""
    assert x.shape[0] < 64, "milliseconds"
    return x.sum(1, keepdim=True) * weights[:, 0].float()


def dequantize(weights, kind, rows, columns, dtype):
    """ggml_dequantize of weights that are one number a row."""
    return weights[:rows, :1].to(dtype).expand(rows, columns)


@pytest.fixture
def kernels(monkeypatch):
    """The stand-ins in the place of what the method calls."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    monkeypatch.setattr(fused_moe, "moe_align_block_size", align)
    module = release.experts_module()
    names = {
        "ggml_dequantize": dequantize,
        "ggml_mul_mat_a8": mul_mat_a8,
        "ggml_moe_get_block_size": lambda kind: BLOCK,
        "moe_sum": lambda x, out: torch.sum(x, 1, out=out),
    }
    for name, function in names.items():
        monkeypatch.setattr(module.ops, name, function)
    release.replace_expert_kernels(monkeypatch, moe_a8, moe_a8_vec)
    monkeypatch.setattr(
        module, "apply_moe_activation", lambda kind, out, x: out.copy_(x[:, : out.shape[1]])
    )
    return module


def compute(module, kind, weights, tokens, top_k=2):
    """The method's answer and the right one, for experts that scale by their weights."""
    import gguf

    generator = torch.Generator().manual_seed(7)
    count = weights.shape[0]
    topk_ids = torch.randint(count, (tokens, top_k), generator=generator, dtype=torch.int32)
    topk_ids[0, 0] = count - 1
    x = torch.randint(1, 4, (tokens, 2), generator=generator).float()
    kind = gguf.GGMLQuantizationType[kind]
    ones = torch.ones(tokens, top_k)
    out = module._fused_moe_gguf(x, weights, weights[:, :2], ones, topk_ids, kind, kind, "silu")
    scale = weights[topk_ids.long(), 0, 0].double()
    gate = x.double().sum(1, keepdim=True) * scale
    expected = (gate * 2 * scale).sum(1)
    return out.double(), expected[:, None].expand(-1, 2)


def scaled(weights):
    weights[:, :, 0] = (torch.arange(weights.shape[0]) % 3 + 1)[:, None]
    return weights


@pytest.mark.parametrize("count", [8, 256, 384])
def test_more_experts_than_a_kernel_takes(count, kernels):
    """Kimi K2 has 384. Of a batch the kernel left the rows of 128 of them as they were."""
    weights = scaled(torch.zeros(count, 4, 8, dtype=torch.uint8))
    out, expected = compute(kernels, "Q4_K", weights, 80)
    assert torch.equal(out, expected)


@pytest.fixture
def whole_experts():
    """GLM-5's 256 gates and ups of Q4_K, as a pipeline stage without tensor parallelism has them.

    3.6 GB of address space, of which a page of each expert is used.
    """
    stride = 4096 * 3456
    data = torch.empty(256 * stride, dtype=torch.uint8)
    return scaled(data.as_strided((256, 4, 8), (stride, 8, 1)))


def test_experts_of_more_bytes_than_an_int_counts(kernels, whole_experts):
    out, expected = compute(kernels, "Q4_K", whole_experts, 80)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("tokens", "top_k"), [(7, 8), (64, 8), (8191, 8), (8192, 8), (32768, 2)])
def test_more_rows_than_a_grid_takes(tokens, top_k, kernels):
    """8,192 tokens are the default batch of an H100; IQ types have this kernel only."""
    weights = scaled(torch.zeros(8, 4, 8, dtype=torch.uint8))
    out, expected = compute(kernels, "IQ2_XXS", weights, tokens, top_k)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [63, 64, 4096])
def test_a_linear_layer_of_many_tokens(tokens, kernels):
    import gguf

    weights = torch.arange(24, dtype=torch.uint8).view(3, 8)
    x = torch.randint(1, 4, (tokens, 2)).float()
    out = release.linear_product()(x, weights, gguf.GGMLQuantizationType.Q4_K)
    assert torch.equal(out, x.sum(1, keepdim=True) * torch.tensor([0.0, 8.0, 16.0]))


def test_the_stand_ins_have_the_limits(whole_experts):
    """Controls: asked directly, they fail as the kernels do."""
    topk_ids = torch.tensor([[0, 300]], dtype=torch.int32)
    many = scaled(torch.zeros(384, 4, 8, dtype=torch.uint8))
    out = moe_a8(torch.ones(1, 2), many, *align(topk_ids, BLOCK, 384), 12, 4, 2, 1)
    assert out.isnan().any(dim=1).tolist() == [False, True]
    topk_ids = torch.tensor([[0, 255]], dtype=torch.int32)
    with pytest.raises(AssertionError, match="out of the tensor"):
        moe_a8(torch.ones(1, 2), whole_experts, *align(topk_ids, BLOCK, 256), 12, 4, 2, 1)
    with pytest.raises(AssertionError, match="invalid configuration"):
        moe_a8_vec(torch.ones(8192, 2), many, torch.zeros(8192, 8), 8, 16, 4, 8192)
