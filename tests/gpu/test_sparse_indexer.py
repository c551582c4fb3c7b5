"""Indexer logits kernels on a real GPU, against float64 and against DeepGEMM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from sparse_ops import deep_gemm_options, error, gpu_marks, poisoned  # noqa: E402

pytestmark = gpu_marks()
H, D, PAGE = 32, 128, 64
NATIVE = [False, True]


@pytest.fixture(scope="module")
def ops():
    yield from poisoned("triton_mqa_logits")


@pytest.fixture(scope="module")
def deep_gemm():
    try:
        from vllm.utils import deep_gemm as module

        module._lazy_init()
    except ImportError as problem:
        pytest.skip(f"vLLM cannot be imported: {problem}")
    if module._fp8_fp4_paged_mqa_logits_impl is None:
        pytest.skip("DeepGEMM's extension cannot be imported in this Python")
    return module


def e4m3(*shape, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(torch.float8_e4m3fn)


def floats(*shape, seed):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def expected_logits(q, k, scale, weights):
    scores = torch.einsum("mhd,nd->mhn", q.double(), k.double()).relu()
    return (scores * weights.double()[..., None]).sum(1) * scale.double()


def prefill_case(tokens, keys):
    q, k = e4m3(tokens, H, D, seed=1), e4m3(keys, D, seed=2)
    scale, weights = floats(keys, seed=3).abs() + 0.01, floats(tokens, H, seed=4)
    # Two requests that share the workspace, each causal.
    half = keys // 2
    ks = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    ke = torch.arange(1, tokens + 1, device="cuda", dtype=torch.int32) + half - tokens
    if tokens > 1:
        ks[tokens // 2 :] = half
        ke[tokens // 2 :] += half
    return q, k, scale, weights, ks, ke.clamp_min(1)


def inside(ks, ke, keys):
    columns = torch.arange(keys, device="cuda")
    return (columns >= ks[:, None]) & (columns < ke[:, None])


def paged_case(lens, next_n, blocks):
    batch = len(lens)
    values, scales = e4m3(blocks, PAGE, D, seed=3), floats(blocks, PAGE, seed=4).abs() + 0.01
    flat = torch.empty(blocks, PAGE * 132, dtype=torch.uint8, device="cuda")
    flat[:, : PAGE * D] = values.view(torch.uint8).view(blocks, -1)
    flat[:, PAGE * D :] = scales.view(torch.uint8).view(blocks, -1)
    pages = max(lens) // PAGE + 2
    order = torch.randperm(blocks, device="cuda")[: batch * pages]
    table = order.view(batch, pages).to(torch.int32)
    q, weights = e4m3(batch, next_n, H, D, seed=1), floats(batch * next_n, H, seed=2)
    ends = torch.tensor(lens, device="cuda")[:, None] - next_n + 1
    ends = (ends + torch.arange(next_n, device="cuda")).to(torch.int32).contiguous()
    return q, flat.view(blocks, PAGE, 1, 132), weights, ends, table, values, scales


def check_paged(logits, q, weights, ends, table, values, scales):
    batch, next_n = q.shape[:2]
    worst = 0.0
    for b in range(batch):
        length = int(ends[b].max())
        blocks = table[b, : -(-length // PAGE)].long()
        k = values.view(torch.uint8)[blocks].view(-1, D).view(torch.float8_e4m3fn)[:length]
        want = expected_logits(
            q[b], k, scales[blocks].view(-1)[:length], weights[b * next_n : (b + 1) * next_n]
        )
        for j in range(next_n):
            end = int(ends[b, j])
            worst = max(worst, error(logits[b * next_n + j, :end], want[j, :end]))
    return worst


@pytest.mark.parametrize("native", NATIVE, ids=["bytes", "native"])
def test_sparse_indexer_every_code(ops, native):
    """All 256 bytes as keys: each NaN, zero and subnormal comes through a dot product."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    k = torch.zeros(256, D, dtype=torch.uint8, device="cuda")
    k[:, 5] = codes
    q = torch.zeros(1, H, D, device="cuda")
    q[:, 0, 5], q[:, 1, 5] = 1.0, -1.0
    weights = torch.zeros(1, H, device="cuda")
    weights[0, 0], weights[0, 1] = 1.0, -1.0
    ks = torch.zeros(1, dtype=torch.int32, device="cuda")
    logits = ops.mqa_logits(
        q.to(torch.float8_e4m3fn),
        k.view(torch.float8_e4m3fn),
        torch.ones(256, device="cuda"),
        weights,
        ks,
        ks + 256,
        native_fp8=native,
    )[0]
    want = codes.view(torch.float8_e4m3fn).double()
    known = ~want.isnan()
    assert torch.equal(logits[known].double(), want[known])


@pytest.mark.parametrize("native", NATIVE, ids=["bytes", "native"])
def test_sparse_indexer_prefill(ops, figure, native):
    worst = 0.0
    for tokens, keys in [(1, 100), (17, 2047), (64, 4097), (300, 20_001), (513, 2049)]:
        q, k, scale, weights, ks, ke = prefill_case(tokens, keys)
        logits = ops.mqa_logits(q, k, scale, weights, ks, ke, native_fp8=native)
        again = ops.mqa_logits(q, k, scale, weights, ks, ke, native_fp8=native)
        mask = inside(ks, ke, keys)
        assert torch.equal(logits[mask], again[mask])
        worst = max(worst, error(logits[mask], expected_logits(q, k, scale, weights)[mask]))
    figure(f"indexer prefill {'native' if native else 'bytes'}, relative L2", worst)
    # Hopper's e4m3 instructions keep about 14 bits of a sum.
    assert worst < 2e-3


@pytest.mark.parametrize("native", NATIVE, ids=["bytes", "native"])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_sparse_indexer_paged(ops, figure, next_n, native):
    lens = [100, 2047, 2049, 4097, 20_000]
    q, cache, weights, ends, table, values, scales = paged_case(lens, next_n, 2000)
    shapes = {"rows": ends, "1-D": ends[:, -1].contiguous(), "column": ends[:, -1:].contiguous()}
    worst = 0.0
    for given in shapes.values():
        logits = ops.paged_mqa_logits(q, cache, weights, given, table, 20_480, native_fp8=native)
        assert logits.is_contiguous()
        assert logits.shape == (len(lens) * next_n, 20_480)
        worst = max(worst, check_paged(logits, q, weights, ends, table, values, scales))
    figure(f"indexer decode next_n {next_n} {'native' if native else 'bytes'}, relative L2", worst)
    assert worst < 2e-3


def test_sparse_indexer_pool_beyond_two_to_the_31_bytes(ops):
    blocks = 2**31 // (PAGE * 132) + 500
    values = torch.zeros(1, device="cuda")
    cache = torch.full((blocks, PAGE * 132), 0x7F, dtype=torch.uint8, device="cuda")
    q, small, weights, ends, table, values, scales = paged_case([300, 700], 1, 60)
    far = torch.arange(blocks - 60, blocks, device="cuda")
    cache[far] = small.view(60, -1)
    logits = ops.paged_mqa_logits(
        q, cache.view(blocks, PAGE, 1, 132), weights, ends, far.int()[table.long()], 1024
    )
    assert check_paged(logits, q, weights, ends, table, values, scales) < 2e-3


def test_sparse_indexer_graph_with_padded_requests(ops):
    """Lengths and tables change between replays; a padded request has length 0."""
    q, cache, weights, ends, table, values, scales = paged_case([500, 900, 4000, 77], 1, 300)
    ops.paged_mqa_logits(q, cache, weights, ends, table, 4096)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = ops.paged_mqa_logits(q, cache, weights, ends, table, 4096)
    for lens in ([4000, 1, 65, 0], [64, 4000, 128, 0]):
        ends.copy_(torch.tensor(lens, dtype=torch.int32, device="cuda")[:, None])
        table[3] = 2**31 - 1
        graph.replay()
        torch.cuda.synchronize()
        parts = (q[:3], weights[:3], ends[:3], table[:3], values, scales)
        assert check_paged(logits, *parts) < 2e-3


def same_choice(ours, theirs, length, topk, label):
    """Top-k sets equal but for ties: whatever one has and the other lacks is within rounding."""
    if length <= topk:
        return
    mine, other = (set(x[:length].topk(topk).indices.tolist()) for x in (ours, theirs))
    odd = mine ^ other
    if odd:
        threshold = theirs[:length].topk(topk).values[-1]
        gap = (theirs[list(odd)] - threshold).abs().max() / theirs[:length].abs().max()
        assert gap < 1e-3, f"{label}: {len(odd)} differ, gap {gap:.1e}"


def deep_gemm_prefill(deep_gemm, q, k, scale, weights, ks, ke):
    """DeepGEMM's logits [M, N]; from v0.33.0 on it starts each row's at column 0."""
    function = deep_gemm.fp8_fp4_mqa_logits
    options = deep_gemm_options(function, int((ke - ks).max()))
    packed = function((q, None), (k, scale), weights, ks, ke, **options)
    if "max_seqlen_k" not in options:
        return packed
    out = packed.new_full((len(q), len(k)), float("nan"))
    for row, (start, end) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        out[row, start:end] = packed[row, : end - start]
    return out


def test_sparse_indexer_prefill_as_deep_gemm(ops, deep_gemm, figure):
    q, k, scale, weights, ks, ke = prefill_case(256, 16_384)
    theirs = deep_gemm_prefill(deep_gemm, q, k, scale, weights, ks, ke)
    ours = ops.mqa_logits(q, k, scale, weights, ks, ke)
    mask = inside(ks, ke, 16_384)
    off = error(ours[mask], theirs[mask].double())
    figure("indexer prefill against DeepGEMM, relative L2", off)
    assert off < 1e-3
    for m in range(0, 256, 17):
        part = slice(int(ks[m]), int(ke[m]))
        same_choice(ours[m, part], theirs[m, part], part.stop - part.start, 2048, f"row {m}")


@pytest.mark.parametrize("next_n", [1, 2])
def test_sparse_indexer_paged_as_deep_gemm(ops, deep_gemm, figure, next_n):
    lens = [100, 2049, 4097, 20_000]
    q, cache, weights, ends, table, *_ = paged_case(lens, next_n, 1600)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(ends, PAGE, sms)
    function = deep_gemm.fp8_fp4_paged_mqa_logits
    options = deep_gemm_options(function, 20_480)
    theirs = function(
        (q, None), cache, weights, ends, table, schedule, max_model_len=20_480, **options
    )
    ours = ops.paged_mqa_logits(q, cache, weights, ends, table, 20_480)
    worst = 0.0
    for row, end in enumerate(ends.flatten().tolist()):
        worst = max(worst, error(ours[row, :end], theirs[row, :end].double()))
        same_choice(ours[row], theirs[row], end, 2048, f"row {row}")
    figure(f"indexer decode next_n {next_n} against DeepGEMM, relative L2", worst)
    assert worst < 1e-3
