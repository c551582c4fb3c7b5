"""Every configuration of the tables, compiled for the cards that it is meant for."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import triton
from aot import SHARED_LIMIT, Compiled
from loading import load_op

CARDS = [80, 86, 89, 90, 100, 120, 121]


def compile_all(tree: Path, jobs: list[dict], folder: Path) -> list[Compiled]:
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    # A process of its own: this one interprets.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "aot.py"
    run = subprocess.run(
        [sys.executable, script, tree, path], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [Compiled(**row) for row in json.loads(run.stdout)]


def sparse_job(capability: int, **changes) -> dict:
    job = {
        "op": "triton_sparse_mla",
        "call": "sparse_mla",
        "capability": capability,
        "dtype": "bfloat16",
        "heads": 8,
        "rope": 64,
        "paged": True,
        "tokens": 16,
        "splits": 1,
    } | changes
    shape = f"{job['heads']}x{job['tokens']}"
    job["label"] = f"{shape} {job['dtype']} rope {job['rope']} splits {job['splits']}"
    return job


def jobs_of_the_tables(ops, fp8_ops) -> list[dict]:
    """Every configuration that some head and token count gets, split and in one pass."""
    jobs = []
    for capability in CARDS:
        seen = set()
        # A launcher and kernels of their own, so jobs of their own.
        fp8 = {"op": "triton_sparse_mla_fp8", "call": "sparse_mla_fp8"}
        for heads in (1, 8, 16, 17, 32, 33, 64, 128):
            # A row for 129 tokens and more is split too, up to a GPU's multiprocessors.
            for tokens, splits in itertools.product((1, 8, 16, 64, 256, 2048), (1, 8)):
                for select, kernel in ((ops.select_config, {}), (fp8_ops.select_fp8_config, fp8)):
                    row = (select(capability, heads, tokens), splits, bool(kernel))
                    if row not in seen:
                        seen.add(row)
                        job = sparse_job(capability, heads=heads, tokens=tokens, splits=splits)
                        jobs.append(job | kernel)
        for heads in (8, 64):
            jobs.append(sparse_job(capability, heads=heads, dtype="float16"))
            jobs.append(sparse_job(capability, heads=heads, rope=0, paged=False))
        for changes in ({}, {"splits": 8}, {"dtype": "float16"}, {"paged": False}):
            jobs += [sparse_job(capability, heads=heads, **changes) | fp8 for heads in (8, 64)]
        indexer = {"op": "triton_mqa_logits", "capability": capability}
        jobs.append(indexer | {"call": "mqa_prefill", "label": "prefill"})
        for next_n in (1, 2, 4):
            label = f"decode next_n {next_n}"
            jobs.append(indexer | {"call": "mqa_paged", "next_n": next_n, "label": label})
    return jobs


@pytest.fixture(scope="session")
def compiled(tree: Path, tmp_path_factory) -> list[Compiled]:
    ops, fp8_ops = (load_op(tree, f"triton_sparse_mla{name}") for name in ("", "_fp8"))
    return compile_all(tree, jobs_of_the_tables(ops, fp8_ops), tmp_path_factory.mktemp("aot"))


def many_heads(row: Compiled) -> bool:
    return row.label[0].isdigit() and int(row.label.partition("x")[0]) > 16


def _spill(capability: int, row: Compiled) -> int:
    """Bytes a thread that may be spilled: for more than 16 heads, and there by few."""
    if not many_heads(row):
        return 0
    if capability in (90, 100):
        # Two programs on an SM, or a block of 64 heads, are worth more (measured on 9.0).
        return 128
    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    return 16 if newer and capability // 10 == 12 and row.kernel == "_sparse_mla_kernel" else 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", CARDS)
def test_fits_the_card(compiled, capability):
    """An over-limit kernel compiles without an error and fails at its first launch: so look."""
    rows = [row for row in compiled if row.capability == capability]
    names = {row.kernel for row in rows}
    assert len(names) == 5, names
    assert all(row.target.startswith(f"sm_{capability}") for row in rows)
    too_much = [row for row in rows if row.shared > SHARED_LIMIT[capability]]
    assert not too_much, too_much
    spilled = [row for row in rows if row.stack > _spill(capability, row)]
    assert not spilled, spilled
    # Rows begin at multiples of 16 bytes, and Triton has to know: copies of 4 are right, and slow.
    for kernel, least in (("_sparse_mla_kernel", 32), ("_sparse_mla_fp8_kernel", 10)):
        own = [row for row in rows if row.kernel == kernel]
        assert len(own) > 8
        assert all(row.wide_copies >= least for row in own), own


@pytest.mark.timeout(300)
def test_the_look_would_see_it(tree, tmp_path):
    """The control: a configuration too large for 12.0 compiles, and both figures tell."""
    config = {"block_h": 64, "block_n": 64, "num_warps": 4, "num_stages": 3}
    (row,) = compile_all(tree, [sparse_job(120, heads=64, config=config)], tmp_path)
    assert row.shared > SHARED_LIMIT[120]
    assert row.stack > 0
