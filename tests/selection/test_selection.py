"""The selection matrix of the patched release against upstream's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from jobs import NAME  # noqa: E402
from table import join, split, table  # noqa: E402

DOCS = HERE.parents[1] / "docs" / "selection.md"
pytestmark = pytest.mark.timeout(600)


def test_equal_wherever_upstream_has_an_answer(ours, upstreams):
    """On every card; and dense MLA models choose, or fail, exactly as before."""
    assert len(ours) == len(upstreams) > 300
    answered = 0
    for new, old in zip(ours, upstreams, strict=True):
        where = {key: value for key, value in new.items() if key != "answer"}
        if not old["answer"].startswith("ValueError"):
            answered += 1
            assert new["answer"] == old["answer"], where
        elif not new["sparse"]:
            # The remedy is all that may be new.
            assert new["answer"].startswith(old["answer"].split(" Reasons:")[0]), where
    assert answered > 100


def test_glm5_is_served_on_every_card_that_upstream_leaves_out(ours, upstreams):
    served = 0
    for new, old in zip(ours, upstreams, strict=True):
        plain = new["sparse"] and new["kv"] in ("auto", "bfloat16", "float16")
        if plain and new["card"].startswith(("8.", "12.")):
            assert old["answer"].startswith("ValueError"), (
                "upstream gained a backend: see the patch"
            )
            assert new["answer"] == NAME, new
            served += 1
    assert served >= 5 * 2 * 3 * 2


def test_the_reasons_of_upstream_stay_and_a_remedy_is_added(ours, upstreams):
    for new, old in zip(ours, upstreams, strict=True):
        if new["sparse"] and new["card"] == "12.0" and new["kv"] == "fp8" and not new["invariant"]:
            reasons = old["answer"].split("Reasons: {")[1].rstrip("}.")
            for reason in reasons.split("], "):
                assert reason.rstrip("]") in new["answer"]
            assert f"Remedy: --kv-cache-dtype auto makes {NAME} valid here." in new["answer"]


def test_forced_anywhere_and_refused_with_the_reason(decided):
    for row in decided["ours forced"]:
        fits = row["card"][0] >= 8 and row["head_size"] == 576
        if fits and row["kv"] == "auto":
            assert row["answer"] == NAME, row
            continue
        assert row["answer"].startswith("ValueError: Selected backend"), row
        if row["kv"] == "fp8":
            assert "kv_cache_dtype not supported" in row["answer"]
            remedy = f"Remedy: --kv-cache-dtype auto makes {NAME} valid here."
            assert (remedy in row["answer"]) == fits, row
        if row["card"][0] < 8:
            assert "compute capability not supported" in row["answer"]
            assert "Remedy" not in row["answer"], row


@pytest.mark.parametrize("card", ["8.0", "9.0", "12.0", "12.1"])
def test_a_checkpoints_fp8_cache_falls_back_and_a_users_does_not(decided, card):
    answers = decided[f"ours engine_args {card}"]
    assert [answer["kv"] for answer in answers] == ["auto", "fp8", "auto", "auto", "fp8"]
    warned = [bool(answer["log"]) for answer in answers]
    assert warned == [True, False, True, False, False]
    assert "using torch.bfloat16 instead" in answers[0]["log"][0]
    assert f"which {NAME} does not take" in answers[2]["log"][0]


def test_a_servable_checkpoint_cache_is_kept(decided):
    """On 10.0 FLASHINFER_MLA_SPARSE takes it: the control of the test above."""
    assert decided["ours engine_args 10.0"] == [{"kv": "fp8_e4m3", "log": []}]


@pytest.mark.parametrize("card", ["12.0", "12.1", "8.6"])
def test_glm5_in_full_size_constructs(decided, card):
    """743.9 B parameters on the meta device, indexer included, with no DeepGEMM kernels."""
    built = decided[f"ours construct {card}"]
    assert built["backends"] == [NAME]
    assert built["layers"] == 78
    assert built["block_size"] == 64
    assert round(built["parameters"] / 1e9, 1) == 743.9


def test_upstream_cannot_construct_it(decided):
    """The control, and the day when this fails is the day to look at dropping the patch."""
    assert "No valid attention backend" in decided["upstream construct 12.0"]["error"]


@pytest.mark.parametrize(
    ("card", "has_kernels"), [("9.0", True), ("10.0", True), ("8.9", False), ("12.0", False)]
)
def test_indexer_switch(decided, card, has_kernels):
    """Both negatives: kernels for the card, and an extension for this Python."""
    answers = decided[f"ours indexer {card}"]
    assert answers["auto importable"] == ("deep_gemm" if has_kernels else "triton")
    assert answers["auto missing"] == "triton"
    assert answers["triton importable"] == answers["triton missing"] == "triton"
    assert (answers["deep_gemm importable"] == "deep_gemm") == has_kernels
    for why in ("missing",) if has_kernels else ("missing", "importable"):
        error = answers[f"deep_gemm {why}"]
        assert error.startswith("RuntimeError: VLLM_SPARSE_INDEXER_BACKEND=deep_gemm")
        reason = "cannot be imported in this Python" if has_kernels else "no kernels for this GPU"
        assert reason in error


def test_docs_say_what_is_selected(ours, upstreams):
    tag, selected = os.environ["VLLM_GLM5_TAG"], table(ours, upstreams)
    written = split(DOCS.read_text())
    if os.environ.get("VLLM_GLM5_WRITE_DOCS"):
        written[tag] = selected
        DOCS.write_text(join(written))
    assert written[tag] == selected
    assert DOCS.read_text() == join(written)
