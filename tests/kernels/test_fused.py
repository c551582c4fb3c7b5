"""Upstream's fused kernels of a GLM-5 step (from v0.29 on) with patch 0011, for every card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fused import FUSED, ROWS, latents  # noqa: E402

HERE = Path(__file__).parent
KERNELS = ["_fused_norm_rope_kernel", "_fused_q_kernel"]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def fused(tree):
    if not (tree / FUSED).exists():
        return None
    return tree


def said_by(tree: Path, stub: Path, what: str, *capabilities: int):
    """What fused.py prints, in a process that does not interpret unless it says so itself."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    python = os.environ.get("VLLM_GLM5_PYTHON", sys.executable)
    done = subprocess.run(
        [python, HERE / "fused.py", tree, stub, what, *map(str, capabilities)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_they_compile_on_every_card(fused, tmp_path):
    """With a 16-bit cache, with fp8_ds_mla, and without any, as the memory profile launches them."""
    cards = (80, 86, 89, 90, 100, 120, 121)
    if fused:
        assert said_by(fused, tmp_path, "compile", *cards) == {str(card): KERNELS for card in cards}


def test_upstreams_do_not(fused, tmp_path):
    if fused:
        base = Path(os.environ["VLLM_GLM5_BASE_TREE"])
        answers = said_by(base, tmp_path, "compile", 80, 89)
        assert "fp8e4nv not supported in this architecture" in answers["80"]
        assert answers["89"] == KERNELS


@pytest.mark.parametrize("capability", [120, 121])
def test_the_one_in_cute_compiles_for_12x(fused, tmp_path, capability):
    """Its gate is "10.0 or newer", so bfloat16 models get it there."""
    if fused:
        assert said_by(fused, tmp_path, "cute", capability) == f"sm_{capability}a"


@pytest.fixture(scope="module")
def written(fused, tmp_path_factory) -> dict[str, dict[str, list[str]]]:
    """Rows by card and type: 8.0 converts by integer arithmetic, 9.0 by Triton's own type."""
    return said_by(fused, tmp_path_factory.mktemp("stub"), "rows", 80, 90) if fused else {}


def check(rows: list[str], dtype) -> None:
    """Rows against float64: scales to the bit, codes to half a step, rope to bfloat16's rounding."""
    kv_c, weight, k_pe, cos_sin = latents(dtype)
    table = torch.tensor([list(bytes.fromhex(row)) for row in rows], dtype=torch.uint8)
    named = torch.zeros(64, dtype=torch.bool)
    named[: 2 * (ROWS - 1) : 2] = True
    assert (table[~named] == 0xFF).all(), "a slot that nothing names was written"
    row = table[named]
    x = kv_c[:-1].double()
    x = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    groups = x.view(-1, 4, 128)
    scales = (groups.abs().amax(-1) / 448).clamp_min(1e-4).log2().ceil().exp2()
    assert torch.equal(row[:, 512:528].contiguous().view(torch.float32).double(), scales)
    codes = row[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    values = codes.view(-1, 4, 128) * scales[..., None]
    step = torch.maximum(groups.abs() * 2.0**-4, scales[..., None] * 2.0**-10)
    assert ((values - groups).abs() <= step * (1 + 1e-4)).all(), "codes"
    even, odd = k_pe[:-1, 0::2].double(), k_pe[:-1, 1::2].double()
    cos, sin = cos_sin[: ROWS - 1].double().split(32, 1)
    rope = torch.stack([even * cos - odd * sin, odd * cos + even * sin], 2).view(-1, 64)
    tail = row[:, 528:].contiguous().view(torch.bfloat16).double()
    torch.testing.assert_close(tail, rope, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rows_are_what_the_format_says(written, dtype):
    for rows in written.values():
        check(rows[str(dtype)], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_card_writes_the_same_bytes(written, dtype):
    if written:
        assert written["80"][str(dtype)] == written["90"][str(dtype)]


def test_wrong_rows_would_be_seen(written):
    """The controls: a code rounded the other way, scales in another order, an unrotated tail."""
    if not written:
        return
    dtype = torch.bfloat16

    def spoiled(change):
        rows = [bytearray.fromhex(row) for row in written["80"][str(dtype)]]
        change(rows[4])
        return [bytes(row).hex() for row in rows]

    def code(row):
        row[3] += 1 if row[3] & 0x7F < 0x7E else -1

    def scales(row):
        row[512:528] = row[516:528] + row[512:516]

    def tail(row):
        row[528:656] = latents(dtype)[2][2].view(torch.uint8).numpy().tobytes()

    check(spoiled(lambda row: None), dtype)
    for change in (code, scales, tail):
        with pytest.raises(AssertionError):
            check(spoiled(change), dtype)
