"""The mission in one run: GLM-5 from each kind of GGUF file, on our backend and indexer, forced.

This is what a card that upstream leaves out runs. The numbers are the GGUF suite's, at the lengths
of the reference: 256 positions, and 4,096, where an indexer's fault first shows.
"""

from __future__ import annotations

import pytest
from gguf_suite import EAGER, GRAPHS, LENGTHS, gguf_engine, relative_l2, require_triton, top1

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LIMITS = {"bf16": 0.04, "q8_0": 0.06, "Q4_K_M": 0.10}


@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", LIMITS)
def test_mission(kind, dtype, mode, gguf_models, run_engine, record_figure, monkeypatch):
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_BACKEND", "triton")
    engine = gguf_engine(
        gguf_models,
        gguf_models.file(kind),
        dtype=dtype,
        attention_backend="TRITON_MLA_SPARSE",
        **(EAGER if mode == "eager" else GRAPHS),
    )
    sequences = [gguf_models.tokens(count) for count in LENGTHS]
    result = run_engine(engine, score=sequences)
    require_triton(result.log)
    for count, ours, right in zip(
        LENGTHS, result.all("score"), gguf_models.oracle(kind, sequences), strict=True
    ):
        distance, agreement = relative_l2(ours, right), top1(ours, right)
        record_figure(f"mission {kind} {dtype} {mode} {count} relative L2", distance)
        record_figure(f"mission {kind} {dtype} {mode} {count} top-1", agreement)
        assert distance < LIMITS[kind], count
        assert agreement > 0.93, count
