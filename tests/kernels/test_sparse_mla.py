"""Arithmetic of the sparse MLA kernels in Triton's interpreter, against float64."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from references import (  # noqa: E402
    PADDED_INDICES,
    PADDED_LISTS,
    assert_close,
    sparse_mla_reference,
    two_requests,
)

SCALE = 0.06
# The loop in each of its forms: 8 heads a program take the one that exchanges heads and rows.
FORMS = {"flat": {}, "nested": {"nested": True}, "transposed": {"block_h": 8}}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def queries(tokens: int, heads: int, rope: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, 512 + rope, dtype=torch.float16, generator=generator)


def poisoned_cache(blocks: int, page: int, width: int, named: set[int], seed: int = 1):
    """NaN everywhere but in the rows that some list names."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((blocks, page, width), torch.nan, dtype=torch.float16)
    for row in named:
        cache[row // page, row % page] = torch.randn(width, generator=generator)
    return cache


def config_of(ops, *, block_h=16, nested=False):
    return ops.SparseMLAConfig(block_h, 32, 4, 2, nested=nested)


def run(ops, q, cache, indices, *, splits=1, block_h=16, nested=False, **kwargs):
    config = config_of(ops, block_h=block_h, nested=nested)
    rope = cache.shape[-1] - 512
    return ops.sparse_mla_forward(
        q[..., :512],
        q[..., 512:] if rope else None,
        cache,
        torch.tensor(indices, dtype=torch.int32),
        SCALE,
        config=config,
        splits=splits,
        **kwargs,
    )


def check(ops, q, cache, indices, lists, **kwargs):
    page = cache.shape[1]
    rows = {n: cache[n // page, n % page] for names in lists for n in names}
    out, lse = run(ops, q, cache, indices, **kwargs)
    expected, expected_lse = sparse_mla_reference(q, rows, lists, SCALE)
    assert out.dtype == q.dtype
    assert_close(out, expected, 1e-3, "out")
    assert_close(lse, expected_lse, 1e-5, "lse")
    return out, lse


@forms
@pytest.mark.parametrize("splits", [1, 3], ids="splits{}".format)
@pytest.mark.parametrize(
    ("tokens", "heads", "rope", "topk"),
    [(1, 6, 64, 128), (2, 1, 64, 100), (2, 12, 0, 96), (1, 20, 64, 64), (1, 64, 64, 64)],
)
def test_heads_tokens_and_widths(sparse_mla, tokens, heads, rope, topk, splits, form):
    rng = random.Random(heads)
    lists = [[rng.randrange(300) for _ in range(topk)] for _ in range(tokens)]
    cache = poisoned_cache(5, 64, 512 + rope, {n for names in lists for n in names})
    q = queries(tokens, heads, rope)
    check(sparse_mla, q, cache, lists, lists, splits=splits, **form)


@forms
@pytest.mark.parametrize("splits", [1, 4], ids="splits{}".format)
def test_padding_anywhere(sparse_mla, splits, form):
    lists, indices = PADDED_LISTS, PADDED_INDICES
    cache = poisoned_cache(1, 64, 576, {n for names in lists for n in names})
    q = queries(5, 6)
    out, lse = check(sparse_mla, q, cache, indices, lists, splits=splits, **form)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()


@forms
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_indices_that_name_no_row(sparse_mla, paged, form):
    """None may be read: each would fault on a card or bring in another request's rows."""
    page, blocks = 4, 6
    end = page * blocks
    bad = [INT_MIN, -123_456, -page, -1, end, end + 1, 10_000_000, INT_MAX]
    indices = [(bad * 4)[:15] + [2] + bad * 2, bad * 4]
    lists = [[2], []]
    q = queries(2, 6)
    if not paged:
        cache = poisoned_cache(blocks, page, 576, {2})
        check(sparse_mla, q, cache, indices, lists, **form)
        return
    # Position 2 of the second request lies in block 3; other entries name no block.
    table = torch.tensor([[INT_MIN, -1, 0, 0, 0, 0], [3, -1, blocks, INT_MAX, INT_MIN, 5]])
    row = 3 * page + 2
    indices[1] = [4, 5, 8, 12, 16, *bad]
    indices = [row_ + [-1] * (40 - len(row_)) for row_ in indices]
    cache = poisoned_cache(blocks, page, 576, {row})
    out, lse = run(
        sparse_mla,
        q,
        cache,
        indices,
        req_id=torch.tensor([1, 1], dtype=torch.int32),
        block_table=table.to(torch.int32),
        **form,
    )
    expected, expected_lse = sparse_mla_reference(q, {row: cache[3, 2]}, [[row], []], SCALE)
    assert_close(out, expected, 1e-3, "out")
    assert_close(lse, expected_lse, 1e-5, "lse")


@forms
@pytest.mark.parametrize("splits", [1, 2], ids="splits{}".format)
def test_block_table_of_each_request(sparse_mla, splits, form):
    page = 8
    table, req_id, indices, lists = two_requests(page)
    cache = poisoned_cache(40, page, 576, {n for names in lists for n in names})
    check(
        sparse_mla,
        queries(3, 8),
        cache,
        indices,
        lists,
        splits=splits,
        **form,
        req_id=torch.tensor(req_id, dtype=torch.int32),
        block_table=table,
    )


@forms
def test_block_numbers_beyond_16_bits(sparse_mla, form):
    """The nested form reads the block table by halves: both must count, and their signs."""
    page, blocks = 1, 70_000
    names = [69_999, 65_536 + 5, 40_000, 5]  # upper half set; lower half with its sign bit; plain
    cache = poisoned_cache(blocks, page, 512, set(names))
    table = torch.tensor([[*names, 65_535 + blocks, -1]], dtype=torch.int32)
    q = queries(1, 6, rope=0)
    out, lse = run(
        sparse_mla,
        q,
        cache,
        [[0, 1, 2, 3, 4, 5] + [-1] * 26],
        **form,
        req_id=torch.tensor([0], dtype=torch.int32),
        block_table=table,
    )
    rows = {n: cache[n, 0] for n in names}
    expected, expected_lse = sparse_mla_reference(q, rows, [names], SCALE)
    assert_close(out, expected, 1e-3, "out")
    assert_close(lse, expected_lse, 1e-5, "lse")


@forms
def test_strided_cache_and_queries(sparse_mla, form):
    """Padded pages, padded rows, and queries as the MLA layer hands them over."""
    names = {0, 5, 17, 30}
    dense = poisoned_cache(8, 4, 576, names)
    padded = torch.full((8, 6, 640), torch.nan, dtype=torch.float16)
    padded[:, :4, :576] = dense
    cache = padded[:, :4, :576]
    heads, tokens = 6, 2
    q = queries(tokens, heads)
    nope = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    pe = torch.cat([torch.full((tokens, heads, 192), torch.nan).half(), q[..., 512:]], -1)[
        ..., 192:
    ]
    indices = [sorted(names) + [-1] * 28] * tokens
    out, lse = sparse_mla.sparse_mla_forward(
        nope,
        pe,
        cache,
        torch.tensor(indices, dtype=torch.int32),
        SCALE,
        config=config_of(sparse_mla, **form),
    )
    rows = {n: dense[n // 4, n % 4] for n in names}
    expected, expected_lse = sparse_mla_reference(q, rows, [sorted(names)] * tokens, SCALE)
    assert_close(out, expected, 1e-3, "out")
    assert_close(lse, expected_lse, 1e-5, "lse")


@forms
def test_rows_beyond_two_to_the_31_elements(sparse_mla, form):
    """An int32 element offset would wrap from row 3,728,271 on."""
    blocks = 2**31 // (64 * 576) + 10
    cache = torch.empty(blocks, 64, 576, dtype=torch.float16)  # touched pages alone become memory
    names = [(blocks - 1) * 64 + 63, (blocks - 3) * 64, 17]
    assert names[0] * 576 > 2**31
    for n in names:
        cache[n // 64, n % 64] = torch.randn(576, generator=torch.Generator().manual_seed(n % 97))
    indices = [[*names, *[-1] * 29]]
    check(sparse_mla, queries(1, 6), cache, indices, [names], **form)


@pytest.mark.parametrize("heads", [6, 12])
def test_batch_invariant_results_do_not_depend_on_the_batch(sparse_mla, heads):
    """In the form for up to 8 heads, and in the one for more."""
    rng = random.Random(5)
    lists = [[rng.randrange(64) for _ in range(128)] for _ in range(5)]
    cache = poisoned_cache(1, 64, 576, {n for names in lists for n in names})
    q = queries(5, heads)
    indices = torch.tensor(lists, dtype=torch.int32)

    def both(**kwargs):
        def call(part):
            return sparse_mla.sparse_mla_forward(
                q[part, :, :512], q[part, :, 512:], cache, indices[part], SCALE, **kwargs
            )

        return call(slice(0, 5)), call(slice(2, 3))

    (together, together_lse), (alone, alone_lse) = both(batch_invariant=True)
    assert torch.equal(together[2:3], alone)
    assert torch.equal(together_lse[2:3], alone_lse)
    # The control: left to itself, one token is split and five are not, and the sums differ.
    (_, together_lse), (_, alone_lse) = both()
    assert not torch.equal(together_lse[2:3], alone_lse)


def test_a_large_invariant_batch_is_cut_into_slabs(sparse_mla, monkeypatch):
    monkeypatch.setattr(sparse_mla, "_INVARIANT_TOKENS", 2)
    lists = [[t] for t in range(5)]
    cache = poisoned_cache(1, 64, 576, set(range(5)))
    out, lse = sparse_mla.sparse_mla_forward(
        queries(5, 2)[..., :512],
        queries(5, 2)[..., 512:],
        cache,
        torch.tensor([[t] + [-1] * 31 for t in range(5)], dtype=torch.int32),
        SCALE,
        batch_invariant=True,
    )
    expected, expected_lse = sparse_mla_reference(queries(5, 2), cache[0], lists, SCALE)
    assert_close(out, expected, 1e-3, "out")
    assert_close(lse, expected_lse, 1e-5, "lse")


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_the_table_serves_every_head_and_token_count(sparse_mla, capability):
    for heads in range(1, 129):
        for tokens in (1, 2, 16, 64, 256, 2048, 16_384):
            config = sparse_mla.select_config(capability, heads, tokens)
            assert config.block_h * 512 <= 64 * 512, "accumulators beyond the register file"
            for topk in (512, 1024, 2048):
                splits = sparse_mla.select_splits(config, heads, tokens, topk, 188)
                assert 1 <= splits <= topk // config.block_n
            assert tokens < 2048 or splits == 1, "a large batch is one pass"


def test_older_cards_are_refused(sparse_mla):
    with pytest.raises(ValueError, match=r"8\.0 or later, but got 7\.5"):
        sparse_mla.select_config(75, 8, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": torch.zeros(1, 64, 576)}, "float16 or bfloat16, got torch.float32"),
        ({"cache": torch.zeros(1, 64, 512, dtype=torch.float16)}, "cache must be"),
        ({"cache": torch.zeros(1, 48, 576, dtype=torch.float16)}, "power of two, got 48"),
        ({"indices": torch.zeros(1, 32, dtype=torch.int64)}, "contiguous int32"),
        ({"req_id": torch.zeros(1, dtype=torch.int32)}, "go together"),
    ],
)
def test_wrong_arguments_are_named(sparse_mla, change, message):
    q = queries(1, 2)
    cache = change.get("cache", torch.zeros(1, 64, 576, dtype=torch.float16))
    indices = change.get("indices", torch.zeros(1, 32, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        sparse_mla.sparse_mla_forward(
            q[..., :512], q[..., 512:], cache, indices, SCALE, req_id=change.get("req_id")
        )
