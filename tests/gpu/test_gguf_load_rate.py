"""Loading reads each byte once and takes little host memory; the rate goes into the report."""

from __future__ import annotations

import json

import pytest
from gguf_suite import call

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(600)]

# gate, up and down of the generated file are one size each; the largest slice of one rank is one.
LARGEST_SLICE_SHARE = 1 / 3


def test_load_rate(tmp_path, record_figure):
    out = tmp_path / "figures.json"
    call("gguf_load_rate.py", tmp_path, out, limit=400)
    (tmp_path / "rate.gguf").unlink()
    figures = json.loads(out.read_text())
    for name, value in figures.items():
        record_figure(f"gguf load {name}", round(value, 3))
    assert figures["gib"] >= 3.9
    assert figures["load_read_gib"] <= 1.05 * figures["gib"]
    assert figures["anonymous_growth_mib"] <= 2 * LARGEST_SLICE_SHARE * figures["gib"] * 1024
