"""Arithmetic of the indexer's logits kernels in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from references import assert_close, block_flat, mqa_reference  # noqa: E402

H, D, PAGE = 32, 128, 64
NAN_BYTE = 0x7F


def e4m3(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)


def floats(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_e4m3_code_converts_exactly(mqa):
    """All 256 bytes, the zeros of both signs, the subnormals and the two NaN among them."""
    import triton
    import triton.language as tl

    helper = mqa._e4m3_to_f16

    @triton.jit
    def convert(byte_ptr, out_ptr):
        o = tl.arange(0, 256)
        tl.store(out_ptr + o, helper(tl.load(byte_ptr + o)))

    convert.fn.__globals__["helper"] = helper
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=torch.float16)
    convert[(1,)](codes, out)
    expected = codes.view(torch.float8_e4m3fn).double() * 2.0**-8
    assert torch.equal(out.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(out[known].double(), expected[known])
    assert torch.equal(out[known].signbit(), expected[known].signbit())


@pytest.mark.parametrize("native", [False, True], ids=["bytes", "native"])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 65), (7, 200), (9, 130)])
def test_prefill_within_its_ranges(mqa, tokens, keys, native):
    q, k = e4m3(tokens, H, D, seed=1), e4m3(keys, D, seed=2)
    scale, weights = floats(keys, seed=3).abs(), floats(tokens, H, seed=4)
    ks = torch.tensor([(5 * m) % 20 for m in range(tokens)], dtype=torch.int32)
    ke = torch.tensor([min(keys, 40 + 30 * m) for m in range(tokens)], dtype=torch.int32)
    # What lies beyond every range is what a workspace held before: it must reach nothing.
    k.view(torch.uint8)[int(ke.max()) :] = NAN_BYTE
    config = mqa.MQALogitsConfig(block_n=64, block_q=4, step_q=2)
    out = mqa.mqa_logits(q, k, scale, weights, ks, ke, config=config, native_fp8=native)
    expected = mqa_reference(q, k, scale, weights)
    columns = torch.arange(keys)
    inside = (columns >= ks[:, None]) & (columns < ke[:, None])
    assert out.shape == (tokens, keys)
    assert_close(out[inside], expected[inside], 1e-6, "logits")


def paged_case(lens: list[int], next_n: int, blocks: int = 30, pages: int = 6):
    batch = len(lens)
    q = e4m3(batch, next_n, H, D, seed=1)
    weights = floats(batch * next_n, H, seed=2)
    values, scales = e4m3(blocks, PAGE, D, seed=3), floats(blocks, PAGE, seed=4).abs()
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(blocks, generator=generator)[: batch * pages]
    table = order.view(batch, pages).to(torch.int32)
    ends = torch.tensor(lens)[:, None] - next_n + 1 + torch.arange(next_n)
    return q, weights, values, scales, table, ends.to(torch.int32)


def paged_expected(q, weights, values, scales, table):
    batch, next_n = q.shape[:2]
    rows = []
    for b in range(batch):
        blocks = table[b].long()
        rows.append(
            mqa_reference(
                q[b],
                values[blocks].view(torch.uint8).reshape(-1, D).view(torch.float8_e4m3fn),
                scales[blocks].reshape(-1),
                weights.view(batch, next_n, H)[b],
            )
        )
    return torch.cat(rows)


@pytest.mark.parametrize("shape", ["per_row", "per_request", "column"])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_paged_decode(mqa, next_n, shape):
    """Block-flat pages; lengths of each row, or of each request in either shape."""
    lens = [next_n, 100, 384]
    q, weights, values, scales, table, ends = paged_case(lens, next_n)
    requests = torch.tensor(lens, dtype=torch.int32)
    given = {"per_row": ends, "per_request": requests, "column": requests[:, None]}[shape]
    out = mqa.paged_mqa_logits(q, block_flat(values, scales), weights, given, table, 384)
    expected = paged_expected(q, weights, values, scales, table)
    assert out.shape == (3 * next_n, 384)
    assert out.is_contiguous()
    for row, end in enumerate(ends.flatten().tolist()):
        assert_close(out[row, :end], expected[row, :end], 1e-6, f"row {row}")


def test_paged_decode_reads_no_page_beyond_a_length(mqa):
    """Stale table entries may name anything; a graph's padded rows have length 0."""
    q, weights, values, scales, table, _ = paged_case([70, 0, 64], 1)
    table[0, 2:] = 2**31 - 1
    table[1] = -(2**31)
    table[2, 1:] = -1
    lens = torch.tensor([[70], [0], [64]], dtype=torch.int32)
    out = mqa.paged_mqa_logits(q, block_flat(values, scales), weights, lens, table, 1000)
    expected = paged_expected(q, weights, values, scales, table.clamp(0, 29))
    assert_close(out[0, :70], expected[0, :70], 1e-6, "row 0")
    assert_close(out[2, :64], expected[2, :64], 1e-6, "row 2")


def test_rows_of_an_uneven_batch_do_not_contaminate_others(mqa):
    """Packing pads q with NaN, and hands the weights over unpacked: fewer rows than q has."""
    q, weights, values, scales, table, ends = paged_case([90, 100], 2)
    q.view(torch.uint8)[1, 1] = NAN_BYTE
    out = mqa.paged_mqa_logits(q, block_flat(values, scales), weights[:3], ends, table, 384)
    expected = paged_expected(q, weights, values, scales, table)
    for row in range(3):
        end = int(ends.flatten()[row])
        assert_close(out[row, :end], expected[row, :end], 1e-6, f"row {row}")


def test_strided_pages(mqa):
    q, weights, values, scales, table, ends = paged_case([130, 384], 1)
    dense = block_flat(values, scales)
    padded = torch.full((30, 3 * PAGE * 132), NAN_BYTE, dtype=torch.uint8)
    padded[:, : PAGE * 132] = dense.view(30, -1)
    strided = padded.as_strided((30, PAGE, 1, 132), (3 * PAGE * 132, 132, 132, 1))
    out = mqa.paged_mqa_logits(q, strided, weights, ends, table, 384)
    assert torch.equal(out[1], mqa.paged_mqa_logits(q, dense, weights, ends, table, 384)[1])


def test_every_capability_has_a_configuration(mqa):
    for capability in (80, 86, 87, 89, 90, 100, 103, 110, 120, 121):
        assert mqa.select_config(capability).block_n % 64 == 0
    with pytest.raises(ValueError, match=r"8\.0 or later, but got 7\.5"):
        mqa.select_config(75)
