"""Sparse MLA kernels on a real GPU, against float64 on the same GPU."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from sparse_ops import (  # noqa: E402
    check_nothing_compiles,
    check_replay_with_padded_rows,
    error,
    gpu_marks,
    poisoned,
    reference,
)

pytestmark = gpu_marks()
BOUND = {"bfloat16": 5e-3, "float16": 1e-3}
SCALE = 0.0625
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
# On 9.0 each takes a form of the loop of its own: rows in the place of heads, plain, nested.
forms = pytest.mark.parametrize("heads", [8, 16, 64])


@pytest.fixture(scope="module")
def ops():
    yield from poisoned("triton_sparse_mla")


def case(tokens, heads, topk, dtype, *, rope=64, rows=65_536, page=64, seed=0):
    """Queries, cache and lists; a tenth of the entries are -1, and unnamed rows hold NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    kwargs = {"device": "cuda", "generator": generator}
    dtype = getattr(torch, dtype)
    q = torch.randn(tokens, heads, 512 + rope, **kwargs).to(dtype)
    cache = torch.randn(rows, 512 + rope, **kwargs).to(dtype)
    indices = torch.randint(0, rows, (tokens, topk), dtype=torch.int32, **kwargs)
    indices[torch.rand(tokens, topk, **kwargs) < 0.1] = -1
    named = torch.zeros(rows, dtype=torch.bool, device="cuda")
    named[indices[indices >= 0].long()] = True
    cache[~named] = torch.nan
    return q, cache.view(rows // page, page, -1), indices


def call(ops, q, cache, indices, **kwargs):
    rope = cache.shape[-1] - 512
    q_pe = q[..., 512:] if rope else None
    return ops.sparse_mla_forward(q[..., :512], q_pe, cache, indices, SCALE, **kwargs)


def check(ops, q, cache, indices, **kwargs) -> float:
    out, lse = call(ops, q, cache, indices, **kwargs)
    expected, expected_lse = reference(q, cache.reshape(-1, cache.shape[-1]), indices, SCALE)
    off = error(out, expected)
    assert off < BOUND[str(q.dtype).removeprefix("torch.")], off
    assert error(lse, expected_lse) < 1e-4
    again, again_lse = call(ops, q, cache, indices, **kwargs)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)
    return off


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [1, 6, 8, 12, 16, 20, 32, 64, 128])
def test_sparse_heads_and_tokens(ops, figure, heads, dtype):
    worst = 0.0
    for seed, (tokens, topk) in enumerate(
        [(1, 2048), (3, 512), (17, 1024), (64, 2048), (300, 2048)]
    ):
        worst = max(worst, check(ops, *case(tokens, heads, topk, dtype, seed=seed)))
    figure(f"sparse MLA {dtype} {heads} heads, relative L2", worst)


def test_sparse_rows_of_512(ops):
    for tokens in (1, 40, 300):
        check(ops, *case(tokens, 8, 2048, "bfloat16", rope=0))


def test_sparse_mixed_types(ops):
    """A float16 cache of a bfloat16 model: the queries are rounded to the cache's type."""
    q, cache, indices = case(9, 8, 2048, "bfloat16")
    cache = cache.half()
    out, _ = call(ops, q, cache, indices)
    expected, _ = reference(q.half(), cache.reshape(-1, 576), indices, SCALE)
    assert out.dtype == torch.bfloat16
    assert error(out, expected) < BOUND["bfloat16"]


def test_sparse_large_batch(ops):
    """16,384 tokens in one call; every 64th is compared."""
    q, cache, indices = case(16_384, 8, 512, "bfloat16")
    out, lse = call(ops, q, cache, indices)
    assert torch.isfinite(out).all()
    part = slice(0, None, 64)
    expected, expected_lse = reference(q[part], cache.reshape(-1, 576), indices[part], SCALE)
    assert error(out[part], expected) < BOUND["bfloat16"]
    assert error(lse[part], expected_lse) < 1e-4


@forms
@pytest.mark.parametrize("tokens", [1, 5, 400])
def test_sparse_indices_that_name_no_row(ops, tokens, heads):
    q, cache, indices = case(tokens, heads, 2048, "bfloat16")
    rows = cache.shape[0] * cache.shape[1]
    bad = torch.tensor([INT_MIN, -123_456, -1, rows, rows + 1, 2_000_000_000, INT_MAX])
    bad = bad.to(torch.int32).cuda()
    holes = indices < 0
    indices[holes] = bad[torch.arange(int(holes.sum()), device="cuda") % len(bad)]
    indices[0, :1024] = INT_MAX  # whole tiles, the first ones
    if tokens > 1:
        indices[1] = bad[torch.arange(2048, device="cuda") % len(bad)]
    check(ops, q, cache, indices)
    if tokens > 1:
        out, lse = call(ops, q, cache, indices)
        assert (out[1] == 0).all()
        assert (lse[1] == -torch.inf).all()


@forms
def test_sparse_pool_beyond_two_to_the_31_elements(ops, heads):
    rows = 2**31 // 576 // 64 * 64 + 6400
    cache = torch.full((rows // 64, 64, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    names = torch.cat([torch.arange(rows - 500, rows), torch.arange(12)]).cuda()
    cache.view(rows, 576)[names] = torch.randn(512, 576, device="cuda").bfloat16()
    indices = names.int().repeat(3, 4)
    q = torch.randn(3, heads, 576, device="cuda").bfloat16()
    check(ops, q, cache, indices)


@forms
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_sparse_block_tables_of_many_requests(ops, tokens, heads):
    """In-kernel look-up equals the rows that the table names; unused entries are garbage."""
    page, pages = 64, 40
    q, cache, _ = case(tokens, heads, 2048, "bfloat16")
    cache.nan_to_num_(0.5)
    requests = min(tokens, 25)
    order = torch.randperm(cache.shape[0], device="cuda")
    table = order[: requests * pages].view(requests, pages).to(torch.int32)
    req_id = torch.randint(0, requests, (tokens,), device="cuda", dtype=torch.int32)
    lengths = torch.randint(1, page * pages - 64, (tokens, 1), device="cuda")
    local = (torch.rand(tokens, 2048, device="cuda") * lengths).int()
    local[:, 1900:] = -1
    wide = torch.full((requests, pages + 9), INT_MAX, dtype=torch.int32, device="cuda")
    wide[:, :pages] = table
    rows = table[req_id.long()].gather(1, local.clamp_min(0).long() // page) * page + local % page
    rows[local < 0] = -1
    out, lse = call(ops, q, cache, local, req_id=req_id, block_table=wide)
    expected, expected_lse = reference(q, cache.reshape(-1, 576), rows, SCALE)
    assert error(out, expected) < BOUND["bfloat16"]
    assert error(lse, expected_lse) < 1e-4


def test_sparse_every_row_of_the_table_runs_here(ops, figure):
    """The configurations of the other cards too: the arithmetic is the same, forced."""
    ran = 0
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for key, rows in ops.CONFIGS.items():
        for heads, tokens, config in rows:
            for dtype in BOUND:
                for splits in (1, 5):
                    count = min(heads, 64)
                    arguments = case(min(tokens, 7), count, 2048, dtype, rows=8192)
                    try:
                        check(ops, *arguments, config=config, splits=splits)
                    except Exception as problem:
                        if "OutOfResources" not in type(problem).__name__:
                            raise AssertionError((key, heads, tokens, config, splits)) from problem
                        assert limit < 232_448, f"{key}: {config} does not fit"
                    ran += 1
    figure("sparse MLA table rows run", ran)


@forms
def test_sparse_batch_invariance_is_bitwise(ops, heads):
    q, cache, indices = case(700, heads, 2048, "bfloat16")
    out, lse = call(ops, q, cache, indices, batch_invariant=True)
    for part in (slice(0, 1), slice(3, 20), slice(500, 700)):
        alone, alone_lse = call(ops, q[part], cache, indices[part], batch_invariant=True)
        assert torch.equal(out[part], alone)
        assert torch.equal(lse[part], alone_lse)
    expected, _ = reference(q[:20], cache.reshape(-1, 576), indices[:20], SCALE)
    assert error(out[:20], expected) < BOUND["bfloat16"]


@forms
def test_sparse_graph_replay_with_padded_rows(ops, heads):
    def expected(q, cache, indices):
        return reference(q, cache.reshape(-1, 576), indices, SCALE)

    inputs = case(8, heads, 2048, "bfloat16")
    check_replay_with_padded_rows(partial(call, ops), inputs, expected, BOUND["bfloat16"])


@pytest.mark.parametrize("heads", [8, 64])
def test_sparse_nothing_compiles_after_the_warm_up(ops, heads):
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = case(2048, heads, 2048, "bfloat16", rows=4096)
    counts = ops.warmup_token_counts(device, heads, 2048, 2048)
    check_nothing_compiles(partial(call, ops), counts, inputs)
