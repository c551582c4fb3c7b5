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

TAG = os.environ.get("VLLM_GLM5_TAG", "v0.20.2")
# Takes an FP8 cache only, makes "auto" one, and is reported to hang under load.
FLASHINFER = "FLASHINFER_MLA_SPARSE_SM120"
# Keeps, on 12.x, a cache that is asked for by the name of its format.
FLASHINFER_IS_THERE = TAG == "v0.33.0"
# The row widths of the backend, and whether DeepGEMM has kernels for SM12x, taken by name.
HEAD_SIZES = {"v0.33.0": (576, 512)}.get(TAG, (576,))
DEEP_GEMM_HAS_SM12X = TAG == "v0.33.0"
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
            overtaken = old["answer"] == FLASHINFER and new["kv"] != "fp8_ds_mla"
            assert new["answer"] == (NAME if overtaken else old["answer"]), where
        elif not new["sparse"]:
            # The remedy is all that may be new.
            assert new["answer"].startswith(old["answer"].split(" Reasons:")[0]), where
    assert answered > 100


def test_glm5_is_served_on_every_card_that_upstream_leaves_out(ours, upstreams):
    """Also with an fp8 cache by any of its names, and on the others where upstream has nothing."""
    served = elsewhere = 0
    for new, old in zip(ours, upstreams, strict=True):
        if not new["sparse"] or new["kv"] == "fp8_e5m2":
            continue
        if new["card"].startswith(("8.", "12.")):
            assert old["answer"].startswith("ValueError") or (
                old["answer"] == FLASHINFER and new["card"].startswith("12.")
            ), "upstream gained a backend: see the patch"
            native = old["answer"] == FLASHINFER and new["kv"] == "fp8_ds_mla"
            assert new["answer"] == (FLASHINFER if native else NAME), new
            served += 1
        elif old["answer"].startswith("ValueError"):
            assert new["answer"] == NAME, new
            elsewhere += 1
    assert served >= 5 * 2 * 6 * 2
    assert elsewhere


def test_the_native_backend_keeps_the_fp8_cache_that_it_takes(ours):
    picked = {
        (row["card"], row["dtype"], row["kv"]): row["answer"]
        for row in ours
        if row["sparse"] and row["heads"] == 8 and not row["invariant"] and row["block"] is None
    }
    assert picked["9.0", "bfloat16", "fp8"] == "FLASHMLA_SPARSE"
    assert picked["9.0", "bfloat16", "fp8_ds_mla"] == "FLASHMLA_SPARSE"
    assert picked["9.0", "float16", "fp8"] == NAME
    assert picked["10.0", "bfloat16", "fp8_e4m3"] == "FLASHINFER_MLA_SPARSE"
    by_name = {dtype: picked["12.0", dtype, "fp8_ds_mla"] for dtype in ("bfloat16", "float16")}
    native = FLASHINFER if FLASHINFER_IS_THERE else NAME
    assert by_name == {"bfloat16": native, "float16": NAME}


def test_the_reasons_of_upstream_stay_and_a_remedy_is_added(ours, upstreams):
    for new, old in zip(ours, upstreams, strict=True):
        if new["sparse"] and new["card"] == "12.0" and new["kv"] == "fp8_e5m2":
            reasons = old["answer"].split("Reasons: {")[1].rstrip("}.")
            for reason in reasons.split("], "):
                assert reason.rstrip("]") in new["answer"]
            assert f"Remedy: --kv-cache-dtype fp8 makes {NAME} valid here." in new["answer"]


def test_forced_anywhere_and_refused_with_the_reason(decided):
    for row in decided["ours forced"]:
        fits = row["card"][0] >= 8 and row["head_size"] in HEAD_SIZES
        if fits and row["kv"] != "fp8_e5m2":
            assert row["answer"] == NAME, row
            continue
        assert row["answer"].startswith("ValueError: Selected backend"), row
        if row["kv"] == "fp8_e5m2":
            assert "kv_cache_dtype not supported" in row["answer"]
            remedy = f"Remedy: --kv-cache-dtype fp8 makes {NAME} valid here."
            assert (remedy in row["answer"]) == fits, row
        if row["card"][0] < 8:
            assert "compute capability not supported" in row["answer"]
            assert "Remedy" not in row["answer"], row


@pytest.mark.parametrize("card", ["8.0", "9.0", "12.0", "12.1"])
def test_a_checkpoints_fp8_cache_is_kept(decided, card):
    """Under the name that the best backend of the card takes: FLASHMLA_SPARSE knows "fp8" alone."""
    answers = decided[f"ours engine_args {card}"]
    # From v0.33.0 on FLASHINFER_MLA_SPARSE_SM90 takes it as it is.
    best = "fp8" if card == "9.0" and not FLASHINFER_IS_THERE else "fp8_e4m3"
    kept = [answer["kv"] for answer in answers[:4]]
    assert kept == [best, "fp8_e4m3", "fp8_ds_mla", "fp8_e4m3"]
    assert not any(answer["log"] for answer in answers[:4])
    assert [(answer["kv"], answer["log"]) for answer in answers[7:]] == [("auto", []), ("fp8", [])]


@pytest.mark.parametrize("card", ["8.0", "9.0", "12.0", "12.1"])
def test_a_checkpoints_cache_of_4_bits_falls_back_and_a_users_does_not(decided, card):
    fallen, forced, asked = answers = decided[f"ours engine_args {card}"][4:7]
    if fallen["kv"].startswith("ValueError"):
        # From v0.23.0 on upstream refuses 4 bits for MLA before anything is selected.
        assert TAG != "v0.20.2"
        assert all("nvfp4 KV cache is not supported with MLA" in answer["kv"] for answer in answers)
        return
    assert fallen["kv"] == forced["kv"] == "auto"
    assert "no sparse MLA backend takes" in fallen["log"][0]
    assert "using torch.bfloat16 instead" in fallen["log"][0]
    assert f"which {NAME} does not take" in forced["log"][0]
    assert asked == {"kv": "nvfp4", "log": []}


def test_a_checkpoints_fp8_cache_under_a_forced_native_backend(decided):
    (answer,) = decided["ours engine_args 9.0 forced"]
    assert answer == {"kv": "fp8", "log": []}


def test_a_servable_checkpoint_cache_is_kept(decided):
    """On 10.0 FLASHINFER_MLA_SPARSE takes it by its own name."""
    assert decided["ours engine_args 10.0"] == [{"kv": "fp8_e4m3", "log": []}]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_fp8_layer_writes_and_reads_packed_rows(decided, dtype):
    """The op is handed bfloat16 whatever the model's type: it takes float16 for whole numbers."""
    layer = decided[f"ours fp8_layer {dtype}"]
    assert layer["backends"] == [NAME, NAME]
    # Where the format by its name prefers another backend, the name asked for has to stay.
    asked = "fp8_e4m3" if FLASHINFER_IS_THERE else "fp8_ds_mla"
    assert layer["kv"] == [asked, "fp8_ds_mla", "fp8_ds_mla"]
    assert layer["shape"] == [10, 64, 656]
    assert layer["bytes_a_token"] == 656
    assert layer["written"] == {
        "latent": ["torch.bfloat16", 3, 512],
        "rope": ["torch.bfloat16", 3, 64],
        "cache": ["torch.uint8", 10, 64, 656],
        "kv_cache_dtype": "fp8_ds_mla",
    }
    assert layer["reads"] == "sparse_mla_fp8_forward"
    assert layer["compiled"] == ["_merge_splits_kernel", "_sparse_mla_fp8_kernel"]


def test_no_pass_writes_a_cache_that_the_backend_converts(decided):
    """It asks no implementation; one of the model's type it may write (control). Not in v0.20.2."""
    writer = "MLARoPEKVCacheCatFusionPass"
    passes = decided["ours cache_writers 12.0"]
    for kv in ("auto", "bfloat16"):
        assert (writer in passes[kv]) == (TAG != "v0.20.2")
    assert writer not in passes["fp8"]
    if TAG == "v0.33.0":
        assert 'kv_cache_dtype="float16" is incompatible' in passes["float16"]
    else:
        assert writer not in passes["float16"]
        assert "NoOpEliminationPass" in passes["float16"]
    assert "NoOpEliminationPass" in passes["fp8"]


@pytest.mark.parametrize("card", ["12.0", "12.1", "8.6"])
def test_glm5_in_full_size_constructs(decided, card):
    """743.9 B parameters on the meta device, indexer included, with no DeepGEMM kernels."""
    built = decided[f"ours construct {card}"]
    assert built["backends"] == [NAME]
    assert built["layers"] == 78
    assert built["block_size"] == 64
    assert round(built["parameters"] / 1e9, 1) == 743.9


# Read behind conditions that do not hold here: Intel's AMX, and a dense prefill.
AMX = {"_w_uk_packed", "_w_uv_packed", "_w_scale"}
DENSE_PREFILL = {
    "masked_mha_workspace_fits", "prefill_max_seq_len", "topk_tokens", "num_decodes",
    "num_decode_tokens", "num_prefills", "prefill", "decode", "forward_mha",
}  # fmt: skip


def test_the_layer_reads_nothing_that_ours_have_not(decided):
    """An attribute that a base class gained ended a release's engines at their start."""
    lacking = decided["ours construct 12.0"]["lacking"]
    assert {"forward_mqa", "num_actual_tokens"} <= set(lacking["read"])
    assert set(lacking["implementation"]) <= AMX | DENSE_PREFILL
    assert set(lacking["metadata"]) <= DENSE_PREFILL
    if TAG == "v0.33.0":
        assert {"record_logical_topk_ready", "prefill"} <= set(lacking["read"])
        assert not lacking["metadata"]
        assert set(lacking["implementation"]) <= AMX | {"masked_mha_workspace_fits"}


def test_upstream_cannot_construct_it(decided):
    """The control, and the day when this fails is the day to look at dropping the patch."""
    assert "No valid attention backend" in decided["upstream construct 8.6"]["error"]


def test_rows_of_512_are_selected_as_those_of_576(decided):
    """GLM-5.3-Flash; the releases before it have no such model."""
    for what, before in decided["upstream rows_of_512"].items():
        new = decided["ours rows_of_512"][what]
        if before.startswith("ValueError") or before == FLASHINFER:
            assert new == NAME if 512 in HEAD_SIZES else new.startswith("ValueError"), what
        else:
            assert new == before, what


@pytest.mark.parametrize(
    ("card", "unasked", "has_kernels"),
    [
        ("9.0", "deep_gemm", True),
        ("10.0", "deep_gemm", True),
        ("8.9", "triton", False),
        ("12.0", "triton", DEEP_GEMM_HAS_SM12X),
    ],
)
def test_indexer_switch(decided, card, unasked, has_kernels):
    """Both negatives: kernels for the card, and an extension for this Python."""
    answers = decided[f"ours indexer {card}"]
    assert answers["auto importable"] == unasked
    assert answers["auto missing"] == "triton"
    assert answers["triton importable"] == answers["triton missing"] == "triton"
    assert (answers["deep_gemm importable"] == "deep_gemm") == has_kernels
    for why in ("missing",) if has_kernels else ("missing", "importable"):
        error = answers[f"deep_gemm {why}"]
        assert error.startswith("RuntimeError: VLLM_SPARSE_INDEXER_BACKEND=deep_gemm")
        reason = "cannot be imported" if has_kernels else "no kernels for this GPU"
        assert reason in error


def test_docs_say_what_is_selected(ours, upstreams):
    selected = table(ours, upstreams)
    written = split(DOCS.read_text())
    if os.environ.get("VLLM_GLM5_WRITE_DOCS"):
        written[TAG] = selected
        DOCS.write_text(join(written))
    assert written[TAG] == selected
    assert DOCS.read_text() == join(written)
