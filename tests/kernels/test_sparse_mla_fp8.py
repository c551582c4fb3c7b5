"""Sparse MLA over fp8_ds_mla rows in Triton's interpreter, against float64."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from references import (  # noqa: E402
    PADDED_INDICES,
    PADDED_LISTS,
    assert_close,
    ds_mla_quantized,
    ds_mla_rows,
    sparse_mla_reference,
    two_requests,
)

SCALE = 0.06
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
# 8: the cache rows are the rows of the tensor core instruction.
forms = pytest.mark.parametrize("block_h", [8, 16], ids="block_h{}".format)
splittings = pytest.mark.parametrize("splits", [1, 3], ids="splits{}".format)


def queries(tokens: int, heads: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, 576, generator=generator).to(dtype)


def rows_of(names: list[int], seed: int = 1) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """{name: (656 bytes, 576 values)} of latents whose groups differ a thousandfold in size."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(len(names), 4, 1, generator=generator) * 3 - 2.5)
    latent = torch.randn(len(names), 4, 128, generator=generator) * size
    rope = torch.randn(len(names), 64, generator=generator).bfloat16()
    packed, values = ds_mla_quantized(latent.view(-1, 512).bfloat16(), rope)
    return {name: (packed[i], values[i]) for i, name in enumerate(names)}


def cache_of(blocks: int, page: int, rows: dict) -> torch.Tensor:
    """0xFF everywhere else: NaN as a code, as a scale and as bfloat16."""
    cache = torch.full((blocks, page, 656), 0xFF, dtype=torch.uint8)
    for name, (packed, _) in rows.items():
        cache[name // page, name % page] = packed
    return cache


def run(ops, q, cache, indices, *, block_h=16, block_n=32, **kwargs):
    kwargs.setdefault("config", ops.SparseMLAConfig(block_h, block_n, 4, 2))
    lists = torch.tensor(indices, dtype=torch.int32)
    return ops.sparse_mla_fp8_forward(q[..., :512], q[..., 512:], cache, lists, SCALE, **kwargs)


def check(ops, q, cache, indices, lists, rows, **kwargs):
    out, lse = run(ops, q, cache, indices, **kwargs)
    values = {name: row for name, (_, row) in rows.items()}
    expected, expected_lse = sparse_mla_reference(q, values, lists, SCALE)
    assert out.dtype == q.dtype
    assert_close(out, expected, BOUND[q.dtype], "out")
    assert_close(lse, expected_lse, 1e-5, "lse")
    return out, lse


def test_every_code_converts_exactly(sparse_mla_fp8):
    """All 65,536 pairs: each code in either place, whatever stands in the other.

    Integer arithmetic, as the interpreter has it; tests/gpu has the assembly, of either kind.
    """
    import triton
    import triton.language as tl

    helper = sparse_mla_fp8._e4m3_pairs_to_f16

    @triton.jit
    def convert(word_ptr, low_ptr, high_ptr, N: tl.constexpr):
        o = tl.arange(0, N)
        low, high = helper(tl.load(word_ptr + o), False, False)
        tl.store(low_ptr + o, low)
        tl.store(high_ptr + o, high)

    convert.fn.__globals__["helper"] = helper
    codes = torch.arange(65_536, dtype=torch.int32)
    outs = [torch.empty(65_536, dtype=torch.float16) for _ in range(2)]
    convert[(1,)](codes.to(torch.uint16), *outs, N=65_536)
    for shift, out in zip((0, 8), outs, strict=True):
        byte = (codes >> shift & 0xFF).to(torch.uint8)
        expected = byte.view(torch.float8_e4m3fn).double() * 2.0**-8
        assert torch.equal(out.isnan(), expected.isnan())
        known = ~expected.isnan()
        assert int(known.sum()) == 254 * 256
        assert torch.equal(out[known].double(), expected[known])
        assert torch.equal(out[known].signbit(), expected[known].signbit())


@forms
@splittings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "topk"), [(1, 6, 128), (2, 1, 100), (1, 20, 64)])
def test_heads_tokens_and_types(sparse_mla_fp8, tokens, heads, topk, dtype, splits, block_h):
    rng = random.Random(heads)
    lists = [[rng.randrange(300) for _ in range(topk)] for _ in range(tokens)]
    rows = rows_of(sorted({n for names in lists for n in names}))
    cache, q = cache_of(5, 64, rows), queries(tokens, heads, dtype)
    check(sparse_mla_fp8, q, cache, lists, lists, rows, splits=splits, block_h=block_h)


def test_a_wrong_layout_would_be_seen(sparse_mla_fp8):
    """The controls: scales in another order, even and odd columns exchanged, one code off by one."""
    names = list(range(40))
    rows = rows_of(names)
    q = queries(1, 6)

    def wrong(change):
        spoiled = {}
        for name, (packed, values) in rows.items():
            bytes_ = packed.clone()
            change(bytes_)
            spoiled[name] = (bytes_, values)
        indices = [names + [-1] * 24]
        with pytest.raises(AssertionError, match=r"out|lse"):
            check(sparse_mla_fp8, q, cache_of(1, 64, spoiled), indices, [names], rows)

    def scales(row):
        row[512:528] = row[512:528].roll(4)

    def columns(row):
        row[:512] = row[:512].view(-1, 2).flip(1).reshape(-1)

    def one_code(row):
        row[5] = row[5] ^ 0x40

    for change in (scales, columns, one_code):
        wrong(change)


@forms
def test_any_float32_is_a_scale(sparse_mla_fp8, block_h):
    """Not powers of two, and from 1e-20 to 1e3 within one row; no group drowns in rounding."""
    generator = torch.Generator().manual_seed(4)
    count = 48
    codes = torch.randint(0, 256, (count, 512), generator=generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    sizes = torch.tensor([1e-20, 1e-6, 1e-2, 1e3])
    scales = sizes * (1 + torch.rand(count, 4, generator=generator))
    scales[::5, 0] = 0.0
    packed, values = ds_mla_rows(
        codes, scales, torch.randn(count, 64, generator=generator).bfloat16()
    )
    rows = {n: (packed[n], values[n]) for n in range(count)}
    q = queries(2, 6)
    q[..., 384:512] *= 2.0**-18  # or one row's score would decide alone
    lists = [list(range(count))] * 2
    indices = [names + [-1] * 16 for names in lists]
    out, lse = run(sparse_mla_fp8, q, cache_of(1, 64, rows), indices, block_h=block_h)
    expected, expected_lse = sparse_mla_reference(
        q, {n: row for n, (_, row) in rows.items()}, lists, SCALE
    )
    assert_close(lse, expected_lse, 1e-4, "lse")
    for g in range(4):
        group = slice(g * 128, g * 128 + 128)
        assert_close(out[..., group], expected[..., group], 5e-3, f"group {g}")


@forms
@pytest.mark.parametrize("order", ["grow", "shrink"])
def test_scales_that_differ_from_step_to_step(sparse_mla_fp8, order, block_h):
    """From 1e-4 to 1e4 along the list, three steps of it, and queries of any size."""
    count = 96
    packed, values = ds_mla_rows(
        torch.full((count, 512), 0x38, dtype=torch.uint8).bitwise_xor_(
            torch.randint(0, 8, (count, 512), generator=torch.Generator().manual_seed(5)).to(
                torch.uint8
            )
        ),
        torch.logspace(-4, 4, count)[:, None].repeat(1, 4),
        torch.zeros(count, 64).bfloat16(),
    )
    rows = {n: (packed[n], values[n]) for n in range(count)}
    names = list(range(count)) if order == "grow" else list(range(count))[::-1]
    # The scores are all but equal, so that each row counts; and then those of the largest win.
    for size in (2.0**-40, 2.0**-12):
        q = queries(1, 6)
        q[..., :512] *= size
        check(sparse_mla_fp8, q, cache_of(2, 64, rows), [names], [names], rows, block_h=block_h)


@forms
@splittings
def test_padding_anywhere(sparse_mla_fp8, splits, block_h):
    lists, indices = PADDED_LISTS, PADDED_INDICES
    rows = rows_of(sorted({n for names in lists for n in names}))
    cache, q = cache_of(1, 64, rows), queries(5, 6)
    kwargs = {"splits": splits, "block_h": block_h}
    out, lse = check(sparse_mla_fp8, q, cache, indices, lists, rows, **kwargs)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_indices_that_name_no_row(sparse_mla_fp8, paged):
    """None may be read: each would fault on a card or bring in another request's rows."""
    page, blocks = 4, 6
    end = page * blocks
    bad = [INT_MIN, -123_456, -page, -1, end, end + 1, 10_000_000, INT_MAX]
    q = queries(2, 6)
    if not paged:
        rows = rows_of([2])
        indices = [(bad * 4)[:15] + [2] + bad * 2, bad * 4]
        check(sparse_mla_fp8, q, cache_of(blocks, page, rows), indices, [[2], []], rows)
        return
    # Position 2 of the second request lies in block 3; other entries name no block.
    table = torch.tensor([[INT_MIN, -1, 0, 0, 0, 0], [3, -1, blocks, INT_MAX, INT_MIN, 5]])
    row = 3 * page + 2
    indices = [(bad * 4)[:15] + [2] + bad * 2, [4, 5, 8, 12, 16, *bad]]
    indices = [given + [-1] * (40 - len(given)) for given in indices]
    rows = rows_of([row])
    check(
        sparse_mla_fp8,
        q,
        cache_of(blocks, page, rows),
        indices,
        [[row], []],
        rows,
        req_id=torch.tensor([1, 1], dtype=torch.int32),
        block_table=table.to(torch.int32),
    )


@splittings
def test_block_table_of_each_request(sparse_mla_fp8, splits):
    page = 8
    table, req_id, indices, lists = two_requests(page)
    rows = rows_of(sorted({n for names in lists for n in names}))
    check(
        sparse_mla_fp8,
        queries(3, 8),
        cache_of(40, page, rows),
        indices,
        lists,
        rows,
        splits=splits,
        req_id=torch.tensor(req_id, dtype=torch.int32),
        block_table=table,
    )


def test_a_nan_that_is_named_comes_through(sparse_mla_fp8):
    """As a code, as a scale and as a rope value: a broken row shows, in its own token alone."""
    rows = rows_of(list(range(8)))
    for name, where in ((1, slice(7, 8)), (2, slice(516, 520)), (3, slice(530, 532))):
        rows[name][0][where] = 0xFF
    lists = [[0, 1, 4], [0, 2], [3, 5], [6, 7]]
    indices = [names + [-1] * (32 - len(names)) for names in lists]
    out, lse = run(sparse_mla_fp8, queries(4, 6), cache_of(1, 8, rows), indices)
    for broken in range(3):
        assert out[broken].isnan().all()
        assert lse[broken].isnan().all()
    assert torch.isfinite(out[3]).all()


def test_strided_cache_and_queries(sparse_mla_fp8):
    """Padded pages, padded rows, and queries as the MLA layer hands them over."""
    names = [0, 5, 17, 30]
    rows = rows_of(names)
    padded = torch.full((8, 6, 704), 0xFF, dtype=torch.uint8)
    padded[:, :4, :656] = cache_of(8, 4, rows)
    heads, tokens = 6, 2
    q = queries(tokens, heads)
    nope = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    pe = torch.cat([torch.full((tokens, heads, 192), torch.nan).bfloat16(), q[..., 512:]], -1)
    indices = torch.tensor([names + [-1] * 28] * tokens, dtype=torch.int32)
    out, lse = sparse_mla_fp8.sparse_mla_fp8_forward(
        nope, pe[..., 192:], padded[:, :4, :656], indices, SCALE
    )
    values = {name: row for name, (_, row) in rows.items()}
    expected, expected_lse = sparse_mla_reference(q, values, [names] * tokens, SCALE)
    assert_close(out, expected, 5e-3, "out")
    assert_close(lse, expected_lse, 1e-5, "lse")


def test_rows_beyond_two_to_the_31_bytes(sparse_mla_fp8):
    blocks = 2**31 // (64 * 656) + 10
    cache = torch.empty(blocks, 64, 656, dtype=torch.uint8)  # touched pages alone become memory
    names = [(blocks - 1) * 64 + 63, (blocks - 3) * 64, 17]
    assert names[0] * 656 > 2**31
    rows = rows_of(names)
    for name in names:
        cache[name // 64, name % 64] = rows[name][0]
    check(sparse_mla_fp8, queries(1, 6), cache, [[*names, *[-1] * 29]], [names], rows)


def test_batch_invariant_results_do_not_depend_on_the_batch(sparse_mla_fp8, monkeypatch):
    rng = random.Random(5)
    lists = [[rng.randrange(64) for _ in range(96)] for _ in range(3)]
    rows = rows_of(list(range(64)))
    cache, q = cache_of(1, 64, rows), queries(3, 6)
    monkeypatch.setattr(sparse_mla_fp8, "_INVARIANT_TOKENS", 2)

    def call(part, **kwargs):
        return run(sparse_mla_fp8, q[part], cache, lists[part], config=None, **kwargs)

    together, together_lse = call(slice(0, 3), batch_invariant=True)
    alone, alone_lse = call(slice(2, 3), batch_invariant=True)
    assert torch.equal(together[2:3], alone)
    assert torch.equal(together_lse[2:3], alone_lse)
    # The control: other splits give other sums.
    other, other_lse = call(slice(2, 3), splits=1)
    assert not (torch.equal(other, alone) and torch.equal(other_lse, alone_lse))


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_the_table_serves_every_head_and_token_count(sparse_mla_fp8, capability):
    ops = sparse_mla_fp8
    for heads in range(1, 129):
        for tokens in (1, 2, 16, 64, 256, 2048, 16_384):
            config = ops.select_fp8_config(capability, heads, tokens)
            for topk in (512, 1024, 2048):
                splits = ops.select_splits(config, heads, tokens, topk, 188)
                assert 1 <= splits <= topk // config.block_n
            assert tokens < 2048 or splits == 1, "a large batch is one pass"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": torch.zeros(1, 64, 656)}, "cache must be uint8, got torch.float32"),
        ({"cache": torch.zeros(1, 64, 576, dtype=torch.uint8)}, "cache must be"),
        ({"cache": torch.zeros(1, 48, 656, dtype=torch.uint8)}, "power of two, got 48"),
        ({"cache": torch.zeros(1, 4, 660, dtype=torch.uint8)[..., :656]}, "multiples of 16"),
        ({"indices": torch.zeros(1, 32, dtype=torch.int64)}, "contiguous int32"),
        ({"req_id": torch.zeros(1, dtype=torch.int32)}, "go together"),
        ({"q": torch.zeros(1, 2, 576)}, "queries must be float16 or bfloat16"),
    ],
)
def test_wrong_arguments_are_named(sparse_mla_fp8, change, message):
    q = change.get("q", queries(1, 2))
    cache = change.get("cache", torch.zeros(1, 64, 656, dtype=torch.uint8))
    indices = change.get("indices", torch.zeros(1, 32, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        sparse_mla_fp8.sparse_mla_fp8_forward(
            q[..., :512], q[..., 512:], cache, indices, SCALE, req_id=change.get("req_id")
        )
