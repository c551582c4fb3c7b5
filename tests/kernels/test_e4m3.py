"""Patch 0011: e4m3 below capability 8.9, in the releases whose fused kernels quantize."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from fused import FUSED  # noqa: E402
from loading import OPS, load_op  # noqa: E402


@pytest.fixture(scope="module")
def quantizes(tree) -> bool:
    """Whether the release has the kernels at all; where it has them, the patch is there."""
    has = (tree / FUSED).exists()
    assert (tree / OPS / "triton_e4m3.py").exists() == has
    return has


def test_every_value_rounds_as_pytorch_rounds_it(interpreted, tree, quantizes):
    """All bfloat16 up to 448, each code, each value between two codes and its neighbours."""
    if not quantizes:
        return
    tl = triton.language
    convert = load_op(tree, "triton_e4m3").float32_to_e4m3

    @triton.jit
    def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
        o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + o, mask=o < n, other=0.0)
        tl.store(out_ptr + o, convert(x), mask=o < n)

    kernel.fn.__globals__.update(tl=tl, convert=convert)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(between, between + step) for step in (-1, 1)]
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = torch.cat([codes, between, *near, bits.view(torch.bfloat16).float()])
    x = x[x.abs() <= 448]
    out = torch.empty(x.shape, dtype=torch.uint8)
    kernel[(triton.cdiv(len(x), 4096),)](x, out, len(x), BLOCK=4096)
    assert len(x) > 30_000
    assert torch.equal(out, x.to(torch.float8_e4m3fn).view(torch.uint8))
    special = torch.tensor([torch.nan, 449.0, torch.inf, -torch.inf])
    kernel[(1,)](special, out, 4, BLOCK=4)
    assert out[:4].tolist() == [0x7F, 0x7E, 0x7E, 0xFE]
