"""The engine computes what the GGUF file says: prompt logits against an oracle in float32."""

from __future__ import annotations

import pytest
from gguf_suite import EAGER, LENGTHS, gguf_engine, relative_l2, top1

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# Measured with upstream's v0.20.2 and safetensors of the same weights on an H200: 0.0257 over 256
# and 0.0275 over 4,096 positions. llama.cpp on the quantized files: 0.025 (Q8_0), 0.029 (Q4_K_M).
LIMITS = {"bf16": 0.04, "q8_0": 0.06, "Q4_K_M": 0.10}
INDEX_TOPK = 2048


def measure(models, result, kind, label, record_figure):
    sequences = [models.tokens(count) for count in LENGTHS]
    figures = {}
    for count, ours, right in zip(
        LENGTHS, result.all("score"), models.oracle(kind, sequences), strict=True
    ):
        figures[count] = relative_l2(ours, right), top1(ours, right)
        record_figure(f"gguf {label} {count} relative L2", figures[count][0])
        record_figure(f"gguf {label} {count} top-1", figures[count][1])
        if count > INDEX_TOPK:
            late = relative_l2(ours[INDEX_TOPK:], right[INDEX_TOPK:])
            record_figure(f"gguf {label} {count} relative L2 past {INDEX_TOPK}", late)
    return figures


@pytest.fixture(scope="module")
def score(gguf_models):
    return [gguf_models.tokens(count) for count in LENGTHS]


@pytest.fixture(scope="module")
def control(gguf_models, run_engine, score, record_figure):
    """Safetensors of the BF16 file's weights: what a right engine scores in this precision."""
    result = run_engine({"model": str(gguf_models.checkpoint("bf16"))} | EAGER, score=score)
    return measure(gguf_models, result, "bf16", "control (safetensors)", record_figure)


@pytest.mark.parametrize("kind", LIMITS)
def test_prompt_logits(kind, gguf_models, run_engine, score, control, record_figure):
    engine = gguf_engine(gguf_models, gguf_models.file(kind), **EAGER)
    result = run_engine(engine, score=score)
    record_figure(f"gguf {kind} engine", str(result.facts))
    figures = measure(gguf_models, result, kind, kind, record_figure)
    for count, (distance, agreement) in figures.items():
        assert distance < LIMITS[kind], count
        assert agreement > 0.93, count
        if kind == "bf16":
            assert distance < 1.1 * control[count][0], count


def test_a_wrong_model_is_seen(gguf_models, run_engine, record_figure):
    """The measure tells gate and up exchanged from numerical noise."""
    tokens = gguf_models.tokens(LENGTHS[0])
    engine = gguf_engine(gguf_models, gguf_models.with_swapped_gate_and_up(), **EAGER)
    (ours,) = run_engine(engine, score=[tokens]).all("score")
    (right,) = gguf_models.oracle("bf16", [tokens])
    record_figure("gguf gate and up exchanged 256 relative L2", relative_l2(ours, right))
    assert relative_l2(ours, right) > 2 * LIMITS["Q4_K_M"]


def test_float16(gguf_models, run_engine, record_figure):
    """float16 keeps DeepSeek's overflow rescue; of this release's sparse backends ours takes it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if "TRITON_MLA_SPARSE" not in AttentionBackendEnum.__members__:
        pytest.skip("this wheel has no sparse MLA backend for float16")
    tokens = gguf_models.tokens(LENGTHS[0])
    engine = gguf_engine(
        gguf_models,
        gguf_models.file("q8_0"),
        dtype="float16",
        attention_backend="TRITON_MLA_SPARSE",
        **EAGER,
    )
    result = run_engine(engine, score=[tokens])
    (ours,), (right,) = result.all("score"), gguf_models.oracle("q8_0", [tokens])
    record_figure("gguf q8_0 float16 256 relative L2", relative_l2(ours, right))
    assert result.facts["dtype"] == "torch.float16"
    assert relative_l2(ours, right) < LIMITS["q8_0"]
    assert top1(ours, right) > 0.93
