"""What benchmarks/sparse_mla.py measures, on a card that takes a microsecond for everything."""

from __future__ import annotations

import json
import sys
from unittest.mock import MagicMock

import pytest

pytest.importorskip("triton")
bench = pytest.importorskip("sparse_mla", reason="needs torch")

OURS = {"ours", "ours_rows", "ours_invariant", "ours_fp8"}
UPSTREAMS = {"flashmla", "in_tree", "ours_converted"}


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run the command: what it asked the card for, and the figures that it wrote."""
    asked: list[str] = []

    def attempt(what, make, problems):
        asked.append(what)
        return None if "pool" in what else 1.0

    card = MagicMock(__version__="2")
    card.cuda.get_device_name.return_value = "a card"
    inputs = MagicMock()
    inputs.return_value.floor_bytes.return_value = 1
    replaced = {"torch": card, "SparseInputs": inputs, "attempt": attempt, "load": MagicMock(),
                "copy_bandwidth": lambda: 1e12, "ds_mla_pool": MagicMock(), "need_gpu": MagicMock(),
                }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(bench, name, value)

    def run(*arguments: str) -> tuple[set[str], dict]:
        file = tmp_path / "run.json"
        monkeypatch.setattr(sys, "argv", ["sparse_mla.py", "--json", str(file), *arguments])
        bench.main()
        return set(asked), json.loads(file.read_text())

    return run


def test_all_stand_beside_upstreams(measured, capsys):
    asked, run = measured()
    assert asked > OURS | UPSTREAMS | {"DeepGEMM prefill", "DeepGEMM decode", "indexer decode"}
    assert all(row["deep_gemm"] == 1.0 for row in run["indexer"])
    assert capsys.readouterr().out.count("| 1.00 |") == 3


def test_quick_measures_nothing_of_upstreams(measured, capsys):
    asked, run = measured("--quick")
    assert asked > OURS | {"indexer prefill", "indexer decode"}
    assert not asked & UPSTREAMS
    assert not [what for what in asked if "DeepGEMM" in what]
    assert all(row["deep_gemm"] is None and row["ours"] == 1.0 for row in run["indexer"])
    assert not UPSTREAMS & set().union(*run["sparse_mla"])
    # A ratio to what was not measured neither meets nor misses its target.
    table = capsys.readouterr().out.partition("| indexer |")[2]
    assert table.count("| - |") >= 3
    assert "MISSED" not in table
