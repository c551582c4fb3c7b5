"""A GGUF model under serving conditions: CUDA graphs, batches, prefix cache, MTP, two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from gguf_suite import (
    EAGER,
    ENGINE,
    GRAPHS,
    HERE,
    end_group,
    gguf_engine,
    relative_l2,
    still_running,
    top1,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NEW_TOKENS = 24
LIMITS = {"bf16": 0.04, "Q4_K_M": 0.10}
# Two right engines order logits differently where they are this close (nats).
TIE = 0.25


@pytest.fixture(scope="module")
def generate(gguf_models):
    # The second round finds the prompts in the prefix cache.
    return {"prompts": gguf_models.prompts(), "tokens": NEW_TOKENS, "rounds": 2}


def graphs(models, kind, **changes):
    return gguf_engine(models, models.file(kind), enable_prefix_caching=True, **GRAPHS, **changes)


@pytest.mark.parametrize("kind", LIMITS)
def test_decoding_with_cuda_graphs(kind, gguf_models, run_engine, generate, record_figure):
    """A batch of 8, decoded after prefill from the prefix cache, against the oracle."""
    result = run_engine(graphs(gguf_models, kind), generate=generate)
    assert result.facts["cached_tokens"] > 0
    assert "Graph capturing finished" in result.log
    sequences = [
        [*prompt, *tokens[:-1].tolist()]
        for prompt, tokens in zip(generate["prompts"], result.all("tokens"), strict=True)
    ]
    oracle = [logits[-NEW_TOKENS:] for logits in gguf_models.oracle(kind, sequences)]
    ours, right = np.concatenate(result.all("decode")), np.concatenate(oracle)
    record_figure(f"gguf {kind} decoding, graphs, batch of 8 relative L2", relative_l2(ours, right))
    record_figure(f"gguf {kind} decoding, graphs, batch of 8 top-1", top1(ours, right))
    assert relative_l2(ours, right) < LIMITS[kind]
    assert top1(ours, right) > 0.93


def same_until_a_tie(expected, logits, other) -> int:
    """Tokens in common; a difference where the two candidates are no tie fails."""
    for place, (a, b) in enumerate(zip(expected, other, strict=True)):
        if a != b:
            gap = logits[place][a] - logits[place][b]
            assert gap < TIE, f"position {place}: {b} instead of {a}, {gap:.2f} nats below it"
            return place
    return len(expected)


def test_mtp_gives_the_greedy_tokens(gguf_models, run_engine, generate, record_figure):
    plain = run_engine(graphs(gguf_models, "bf16"), generate=generate)
    config = {"method": "mtp", "num_speculative_tokens": 1}
    mtp = run_engine(
        graphs(gguf_models, "bf16", speculative_config=config, disable_log_stats=False),
        generate=generate,
    )
    counters = mtp.facts["counters"]
    record_figure("gguf MTP counters", str(counters))
    assert counters["vllm:spec_decode_num_draft_tokens"] > 0
    common = [
        same_until_a_tie(*run)
        for run in zip(plain.all("tokens"), plain.all("decode"), mtp.all("tokens"), strict=True)
    ]
    record_figure("gguf MTP tokens equal to greedy decoding", f"{sum(common)} of {8 * NEW_TOKENS}")
    assert sum(common) > 0.7 * 8 * NEW_TOKENS


def test_shards_in_a_folder(gguf_models, run_engine, record_figure):
    """A folder of shards serves what the single file serves."""
    shard = gguf_models.first_shard()
    tokens = gguf_models.tokens(256)
    engine = gguf_engine(gguf_models, shard.parent, **EAGER)
    (ours,), (right,) = (
        run_engine(engine, score=[tokens]).all("score"),
        gguf_models.oracle("q8_0", [tokens]),
    )
    record_figure("gguf q8_0 shards 256 relative L2", relative_l2(ours, right))
    assert relative_l2(ours, right) < 0.06


TWO_GPUS = {
    "TP=2": {"tensor_parallel_size": 2},
    "TP=2 Triton": {"tensor_parallel_size": 2, "attention_backend": "TRITON_MLA_SPARSE"},
    "PP=2": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize(
    ("kind", "how"), [("bf16", "TP=2"), ("q8_0", "TP=2 Triton"), ("bf16", "PP=2")]
)
def test_two_gpus(kind, how, gguf_models, run_engine, record_figure, monkeypatch):
    """Not Q4_K_M: the expert rows of 256 are one block of a K-quant, which cannot be cut."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if "Triton" in how:
        monkeypatch.setenv("VLLM_SPARSE_INDEXER_BACKEND", "triton")
    tokens = gguf_models.tokens(256)
    engine = gguf_engine(gguf_models, gguf_models.file(kind), **TWO_GPUS[how], **EAGER)
    (ours,), (right,) = (
        run_engine(engine, score=[tokens]).all("score"),
        gguf_models.oracle(kind, [tokens]),
    )
    record_figure(f"gguf {kind} {how} 256 relative L2", relative_l2(ours, right))
    assert relative_l2(ours, right) < {"bf16": 0.04, "q8_0": 0.06}[kind]


# About two minutes of an H200's clock: the kernel has an end, should nothing else end it.
CYCLES = 1 << 38


@pytest.mark.alone  # its kernel takes turns with those of the other engines on the card
def test_a_worker_ends_with_its_engine(gguf_models, tmp_path, record_figure):
    """A killed engine sends no signal, and a worker that waits for the GPU sees no end of a queue."""
    import psutil

    job, waiting, log = tmp_path / "job.json", tmp_path / "waiting", tmp_path / "engine.log"
    engine = ENGINE | EAGER | gguf_engine(gguf_models, gguf_models.file("bf16"))
    job.write_text(json.dumps({"engine": engine, "cycles": CYCLES}))
    command = [sys.executable, str(HERE / "endless_worker.py"), str(job), str(waiting)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 240
        while process.poll() is None and not (waiting.exists() and waiting.read_text()):
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        assert process.poll() is None, log.read_text()[-3000:]
        worker = psutil.Process(int(waiting.read_text()))
        core = psutil.Process(worker.ppid())
        assert core.pid != process.pid
        core.kill()
        killed = time.monotonic()
        # Without it, a worker that never waited for the GPU would look like one that was ended.
        assert still_running([worker], 5), "the worker ended as if it had waited for nothing"
        assert not still_running([worker], 30), "the worker has outlived its engine"
        record_figure("worker outlived its killed engine, s", round(time.monotonic() - killed, 1))
    finally:
        end_group(process)  # a worker would hold the GPU
        process.wait(30)
