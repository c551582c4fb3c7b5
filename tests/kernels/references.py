"""What the kernels must compute, in float64 and the plainest words."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Top-k lists of one token each, and how the indexer may deliver them: all invalid; first tiles
# invalid; holes; duplicates, which count twice; a short prefill row.
PADDED_TOPK = 128
PADDED_LISTS: list[list[int]] = [[], [3, 9], [7, 8, 9], [5] * 6 + [2], list(range(10))]
PADDED_INDICES = [
    [-1] * PADDED_TOPK,
    [-1] * (PADDED_TOPK - 2) + [3, 9],
    [7] + [-1] * 50 + [8] + [-1] * 70 + [9] + [-1] * 5,
    [5] * 6 + [2] + [-1] * (PADDED_TOPK - 7),
    list(range(10)) + [-1] * (PADDED_TOPK - 10),
]


def two_requests(page: int) -> tuple[torch.Tensor, list[int], list[list[int]], list[list[int]]]:
    """Three tokens of two requests, interleaved, whose block tables of 40 blocks share none.

    (block table [2, 10], the request of each token, its top-k within it, the same as cache rows)
    """
    import torch

    rng = random.Random(3)
    blocks = rng.sample(range(40), 20)
    table = torch.tensor([blocks[:10], blocks[10:]], dtype=torch.int32)
    req_id = [1, 0, 1]
    indices = [[rng.randrange(10 * page) for _ in range(64)] for _ in req_id]
    lists = [
        [int(table[r, i // page]) * page + i % page for i in names]
        for r, names in zip(req_id, indices, strict=True)
    ]
    return table, req_id, indices, lists


def sparse_mla_reference(
    q: torch.Tensor,
    rows: dict[int, torch.Tensor] | torch.Tensor,
    lists: list[list[int]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, 512], natural log-sum-exp [T, H]); lists holds the valid rows of each token."""
    import torch

    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, 512, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for t, names in enumerate(lists):
        if not names:
            continue
        k = torch.stack([rows[n] for n in names]).double()
        scores = q[t].double() @ k.T * scale
        lse[t] = torch.logsumexp(scores, -1)
        out[t] = torch.softmax(scores, -1) @ k[:, :512]
    return out, lse


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    """Infinities and NaN at the same places, then a relative L2 error below the bound."""
    import torch

    actual = actual.double()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        places = kind(actual) != kind(expected)
        assert not places.any(), (
            f"{what}: {kind.__name__} differs at {places.nonzero()[:5].tolist()}"
        )
    finite = torch.isfinite(expected)
    norm = expected[finite].norm()
    error = (actual[finite] - expected[finite]).norm()
    assert error <= bound * norm, f"{what}: relative L2 error {error / norm:.2e} above {bound:.0e}"


def mqa_reference(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Indexer logits [M, N] of e4m3 q [M, H, D] and k [N, D], in float64."""
    import torch

    scores = torch.einsum("mhd,nd->mhn", q.double(), k.double()).relu()
    return (scores * weights.double()[..., None]).sum(1) * k_scale.double()


def block_flat(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The indexer cache uint8 [blocks, page, 1, 132] that holds e4m3 values and float32 scales."""
    import torch

    blocks, page, dim = values.shape
    flat = torch.empty(blocks, page * (dim + 4), dtype=torch.uint8, device=values.device)
    flat[:, : page * dim] = values.view(torch.uint8).reshape(blocks, -1)
    flat[:, page * dim :] = scales.contiguous().view(torch.uint8).reshape(blocks, -1)
    return flat.view(blocks, page, 1, dim + 4)


def ds_mla_rows(
    codes: torch.Tensor, scales: torch.Tensor, rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8_ds_mla rows uint8 [N, 656], what they stand for, float64 [N, 576]).

    codes uint8 [N, 512], scales float32 [N, 4] (one for each 128 codes), rope bfloat16 [N, 64]:
    vLLM's csrc/cache_kernels.cu, concat_and_cache_ds_mla_kernel.
    """
    import torch

    rows = torch.empty(len(codes), 656, dtype=torch.uint8, device=codes.device)
    rows[:, :512] = codes
    rows[:, 512:528] = scales.contiguous().view(torch.uint8)
    rows[:, 528:] = rope.contiguous().view(torch.uint8)
    latent = codes.view(torch.float8_e4m3fn).double().view(-1, 4, 128)
    latent = latent * scales.double()[..., None]
    return rows, torch.cat([latent.view(-1, 512), rope.double()], 1)


def ds_mla_quantized(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ds_mla_rows of bfloat16 latent [N, 512] and rope [N, 64], as vLLM's op quantizes them."""
    import torch

    groups = latent.float().view(-1, 4, 128)
    scales = (groups.abs().amax(-1) / 448).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return ds_mla_rows(codes.view(-1, 512), scales, rope)
