"""Sparse MLA over fp8_ds_mla rows on a real GPU, against float64 and FLASHMLA_SPARSE."""

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
    check_written_rows,
    ds_mla_rows,
    ds_mla_values,
    error,
    gpu_marks,
    poisoned,
    reference,
)

pytestmark = gpu_marks()
BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
SCALE = 0.0625
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
ways = pytest.mark.parametrize("native", [False, True], ids=["bytes", "native"])


@pytest.fixture(scope="module")
def ops():
    yield from poisoned("triton_sparse_mla_fp8")


@pytest.fixture
def native_or_skip(native):
    if native and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no instruction for e4m3 before 8.9")
    return native


def case(tokens, heads, topk, dtype=torch.bfloat16, *, rows=65_536, page=64, seed=0):
    """Queries, cache and lists; a tenth of the entries are -1, and unnamed rows are all ones."""
    generator = torch.Generator("cuda").manual_seed(seed)
    kwargs = {"device": "cuda", "generator": generator}
    q = torch.randn(tokens, heads, 576, **kwargs).to(dtype)
    size = 10 ** (torch.rand(rows, 4, 1, **kwargs) * 2 - 1.5)
    latent = (torch.randn(rows, 4, 128, **kwargs) * size).view(rows, 512).bfloat16()
    cache = ds_mla_rows(latent, torch.randn(rows, 64, **kwargs).bfloat16())
    indices = torch.randint(0, rows, (tokens, topk), dtype=torch.int32, **kwargs)
    indices[torch.rand(tokens, topk, **kwargs) < 0.1] = -1
    named = torch.zeros(rows, dtype=torch.bool, device="cuda")
    named[indices[indices >= 0].long()] = True
    cache[~named] = 0xFF
    return q, cache.view(rows // page, page, 656), indices


def call(ops, q, cache, indices, **kwargs):
    return ops.sparse_mla_fp8_forward(q[..., :512], q[..., 512:], cache, indices, SCALE, **kwargs)


def expected(q, cache, indices):
    return reference(q, ds_mla_values(cache.reshape(-1, 656)), indices, SCALE)


def check(ops, q, cache, indices, **kwargs) -> float:
    out, lse = call(ops, q, cache, indices, **kwargs)
    right, right_lse = expected(q, cache, indices)
    off = error(out, right)
    assert off < BOUND[q.dtype], off
    assert error(lse, right_lse) < 1e-4
    again, again_lse = call(ops, q, cache, indices, **kwargs)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)
    return off


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_every_code_in_every_column(ops, native_or_skip, dtype):
    """A list of one row gives that row back, to the bit: 256 rows of one code each."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    rows = torch.zeros(256, 656, dtype=torch.uint8, device="cuda")
    rows[:, :512] = codes[:, None]
    rows[:, 512:528] = torch.ones(256, 4, device="cuda").view(torch.uint8)
    indices = torch.full((256, 64), -1, dtype=torch.int32, device="cuda")
    indices[:, 5] = torch.arange(256, device="cuda")
    q = torch.zeros(256, 8, 576, dtype=dtype, device="cuda")
    out, _ = call(ops, q, rows.view(4, 64, 656), indices, native_fp8=native_or_skip)
    right = codes.view(torch.float8_e4m3fn).double()[:, None, None].expand(256, 8, 512)
    assert torch.equal(out.isnan(), right.isnan())
    known = ~right.isnan()
    assert torch.equal(out[known].double(), right[known])


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 6, 8, 16, 20, 64, 128])
def test_fp8_heads_and_tokens(ops, figure, heads, dtype, native_or_skip):
    worst = 0.0
    for seed, (tokens, topk) in enumerate([(1, 2048), (3, 512), (17, 1024), (300, 2048)]):
        arguments = case(tokens, heads, topk, dtype, seed=seed)
        worst = max(worst, check(ops, *arguments, native_fp8=native_or_skip))
    way = "native" if native_or_skip else "bytes"
    figure(f"sparse MLA fp8 {dtype} {heads} heads {way}, relative L2", worst)


@pytest.mark.parametrize("tokens", [1, 5, 400])
def test_fp8_indices_that_name_no_row(ops, tokens):
    q, cache, indices = case(tokens, 8, 2048)
    rows = cache.shape[0] * cache.shape[1]
    bad = torch.tensor([INT_MIN, -123_456, -1, rows, rows + 1, 2_000_000_000, INT_MAX])
    bad = bad.to(torch.int32).cuda()
    holes = indices < 0
    indices[holes] = bad[torch.arange(int(holes.sum()), device="cuda") % len(bad)]
    indices[0, :1024] = INT_MAX  # whole tiles, the first ones
    check(ops, q, cache, indices)
    indices[0] = INT_MIN
    out, lse = call(ops, q, cache, indices)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()


def test_fp8_pool_beyond_two_to_the_31_bytes(ops):
    rows = 2**31 // 656 // 64 * 64 + 6400
    cache = torch.full((rows // 64, 64, 656), 0xFF, dtype=torch.uint8, device="cuda")
    names = torch.cat([torch.arange(rows - 500, rows), torch.arange(12)]).cuda()
    latent, rope = torch.randn(512, 512).bfloat16(), torch.randn(512, 64).bfloat16()
    cache.view(rows, 656)[names] = ds_mla_rows(latent, rope).cuda()
    indices = names.int().repeat(3, 4)
    q = torch.randn(3, 8, 576, device="cuda").bfloat16()
    out, lse = call(ops, q, cache, indices)
    values = ds_mla_values(cache.view(rows, 656)[names])
    places = torch.arange(512, device="cuda", dtype=torch.int32).repeat(3, 4)
    right, right_lse = reference(q, values, places, SCALE)
    assert error(out, right) < BOUND[q.dtype]
    assert error(lse, right_lse) < 1e-4


@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_fp8_block_tables_of_many_requests(ops, tokens):
    """In-kernel look-up equals the rows that the table names, to the bit."""
    page, pages = 64, 40
    q, cache, _ = case(tokens, 8, 2048)
    cache[cache == 0xFF] = 0x11
    requests = min(tokens, 25)
    order = torch.randperm(cache.shape[0], device="cuda")
    table = order[: requests * pages].view(requests, pages).to(torch.int32)
    req_id = torch.randint(0, requests, (tokens,), device="cuda", dtype=torch.int32)
    local = torch.randint(-1, page * pages, (tokens, 2048), device="cuda", dtype=torch.int32)
    wide = torch.full((requests, pages + 9), INT_MAX, dtype=torch.int32, device="cuda")
    wide[:, :pages] = table
    rows = table[req_id.long()].gather(1, local.clamp_min(0).long() // page) * page + local % page
    rows[local < 0] = -1
    out, lse = call(ops, q, cache, local, req_id=req_id, block_table=wide)
    right, right_lse = call(ops, q, cache, rows)
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)


@ways
def test_fp8_every_row_of_the_table_runs_here(ops, figure, native_or_skip):
    """The configurations of the other cards too: the arithmetic is the same, forced."""
    ran = 0
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for key, rows in ops.FP8_CONFIGS.items():
        for heads, _, config in rows:
            for splits in (1, 5):
                arguments = case(7, min(heads, 64), 2048, rows=8192)
                kwargs = {"config": config, "splits": splits, "native_fp8": native_or_skip}
                try:
                    check(ops, *arguments, **kwargs)
                except Exception as problem:
                    if "OutOfResources" not in type(problem).__name__:
                        raise AssertionError((key, heads, config, splits)) from problem
                    assert limit < 232_448, f"{key}: {config} does not fit"
                ran += 1
    figure(f"sparse MLA fp8 table rows run, {'native' if native_or_skip else 'bytes'}", ran)


def test_fp8_batch_invariance_is_bitwise(ops):
    q, cache, indices = case(700, 8, 2048)
    out, lse = call(ops, q, cache, indices, batch_invariant=True)
    for part in (slice(0, 1), slice(3, 20), slice(500, 700)):
        alone, alone_lse = call(ops, q[part], cache, indices[part], batch_invariant=True)
        assert torch.equal(out[part], alone)
        assert torch.equal(lse[part], alone_lse)


def test_fp8_graph_replay_with_padded_rows(ops):
    q, cache, indices = case(8, 8, 2048)
    inputs, bound = (q, cache, indices), BOUND[q.dtype]
    check_replay_with_padded_rows(partial(call, ops), inputs, expected, bound)


@pytest.mark.parametrize("heads", [8, 64])
def test_fp8_nothing_compiles_after_the_warm_up(ops, heads):
    device = torch.device("cuda", torch.cuda.current_device())
    counts = ops.fp8_warmup_token_counts(device, heads, 2048, 2048)
    check_nothing_compiles(partial(call, ops), counts, case(2048, heads, 2048, rows=4096))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_rows_that_the_backend_writes(dtype):
    """Through vLLM's op, from either type: what the format says, and no other row."""
    triton_mla_sparse = pytest.importorskip("vllm.v1.attention.backends.mla.triton_mla_sparse")
    latent = (torch.randn(200, 512, device="cuda") * 3).to(dtype)
    rope = torch.randn(200, 1, 64, device="cuda").to(dtype)
    cache = torch.full((4, 64, 656), 0xFF, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(256, device="cuda")[:200]
    slots[7] = -1
    impl = object.__new__(triton_mla_sparse.TritonMLASparseImpl)
    one = torch.ones(1, device="cuda")
    impl.do_kv_cache_update(latent, rope, cache, slots, "fp8_ds_mla", one)
    kept = slots >= 0
    written = cache.view(256, 656)[slots[kept]]
    check_written_rows(written, latent[kept].bfloat16(), rope[kept, 0].bfloat16())
    assert int((cache.view(256, 656) == 0xFF).all(1).sum()) == 57


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_fp8_as_flash_mla(ops, figure, tokens):
    """The same cache through FLASHMLA_SPARSE's fp8 kernel: both as near to float64."""
    flashmla = pytest.importorskip("vllm.v1.attention.ops.flashmla")
    if not flashmla.is_flashmla_sparse_supported()[0]:
        pytest.skip("FlashMLA has no sparse kernels for this card")
    q, cache, indices = case(tokens, 64, 2048)
    cache[cache == 0xFF] = 0x11  # its kernel reads what it then masks
    theirs, _ = flashmla.flash_mla_with_kvcache(
        q=q.unsqueeze(0),
        k_cache=cache.unsqueeze(-2),
        block_table=torch.empty((1, 1), dtype=torch.int32, device="cuda"),
        head_dim_v=512,
        cache_seqlens=torch.full((1,), 8192, dtype=torch.int32, device="cuda"),
        tile_scheduler_metadata=flashmla.get_mla_metadata()[0],
        is_fp8_kvcache=True,
        indices=indices.unsqueeze(0),
        softmax_scale=SCALE,
    )
    ours, _ = call(ops, q, cache, indices)
    right, _ = expected(q, cache, indices)
    off, theirs_off = error(ours, right), error(theirs[0], right)
    figure(
        f"sparse MLA fp8 {tokens} tokens, relative L2 ours, FlashMLA",
        f"{off:.1e}, {theirs_off:.1e}",
    )
    assert off < BOUND[q.dtype]
    assert error(ours, theirs[0].double()) < 2e-2
