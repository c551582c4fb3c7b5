"""GLM-5's own per-layer dimensions over every GPU of the machine, from GGUF shards.

Takes as many GPUs as it finds: TP=2, 4 and 8 where there are so many. Our backend and indexer are
forced, 64 heads are cut to 32, 16 and 8 a rank. Needs 30 GB of disk and as much GPU memory on one
card for TP=1, which is the oracle here: the file's numbers themselves are test_gguf_logits.py's.

VLLM_GLM5_SHARED_RANKS=4,8 adds these sizes where there are fewer GPUs, with all ranks on the first one
(shared_card.py), which then needs 64 GB.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import gguf_model
import numpy as np
import pytest
from gguf_suite import (
    HERE,
    call,
    end_group,
    least_saved,
    relative_l2,
    require_end,
    require_triton,
    top1,
    typical_distance,
)

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(900)]

CONFIG = gguf_model.REAL_LAYERS | {"vocab_size": 2048}
KINDS = {"Q8_0": 0.06, "Q4_K": 0.10}
PROMPT = 2304  # past index_topk
# Where a softmax of random weights still has few keys to choose from, so that a head's write is large.
EARLY = 160
TOP1 = 0.93
# Through a proxy, which a GPU machine may need for the rest, 127.0.0.1 is the proxy's.
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def sizes() -> list[int]:
    return [size for size in (2, 4, 8) if size <= gpus()]


def shared_sizes() -> list[int]:
    asked = os.environ.get("VLLM_GLM5_SHARED_RANKS", "")
    words = [word.strip() for word in asked.split(",") if word.strip()]
    if wrong := [word for word in words if word not in ("2", "4", "8")]:
        raise ValueError(
            f"VLLM_GLM5_SHARED_RANKS={asked!r} names {', '.join(wrong)}: "
            "give the sizes 2, 4 or 8, commas between them"
        )
    return sorted({int(word) for word in words if 0 < gpus() < int(word)})


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """The kind, the first shard and the bytes of all."""
    if not sizes() + shared_sizes():
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp(f"real-{request.param}")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    gguf_model.write_gguf(folder / "real.gguf", CONFIG, request.param, per_shard=16)
    shards = sorted(folder.glob("*.gguf"))
    assert len(shards) > 1
    yield request.param, shards[0], sum(shard.stat().st_size for shard in shards)
    for shard in shards:  # tens of gigabytes
        shard.unlink()


@pytest.fixture(scope="module")
def at(model, tmp_path_factory, record_figure):
    """Run the model at a tensor parallel size, once: its log-probabilities, facts and log."""
    kind, shard, _ = model
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(size: int):
        if size in done:
            return done[size]
        engine = {
            "model": str(shard),
            "tensor_parallel_size": size,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "attention_backend": "TRITON_MLA_SPARSE",
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 64,
            "max_logprobs": -1,
            "kv_cache_memory_bytes": 4 << 30,
            "gpu_memory_utilization": 0.3,
            "moe_backend": "triton",
            "seed": 0,
            "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64]},
        }
        shared = size in shared_sizes()
        if shared:
            engine |= {
                "enforce_eager": True,
                "distributed_executor_backend": "mp",
                "kv_cache_memory_bytes": 1 << 30,
                "gpu_memory_utilization": 0.05,
            }
        tokens = np.random.default_rng(5).integers(2, CONFIG["vocab_size"], PROMPT).tolist()
        job, out = folder / f"{size}.json", folder / f"{size}.npz"
        throughput = [] if shared else [64, 64, 65]
        job.write_text(json.dumps({"engine": engine, "tokens": tokens, "throughput": throughput}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANKS_THAT_SHARE_A_CARD", str(size if shared else 0))
            log = call("many_gpus.py", job, out, limit=420)
        arrays = np.load(out)
        facts = json.loads(str(arrays["facts"]))
        name = f"real dimensions {kind} TP={size}"
        if shared:
            name += " on one card"
        for key in ("ready_s", "decode_tokens_per_s"):
            if key in facts:
                record_figure(f"{name} {key}", facts[key])
        for key in ("read_gib", "peak_host_gib"):
            values = [round(rank[key], 2) for rank in facts["ranks"]]
            record_figure(f"{name} {key} by rank", str(values))
        loads = [float(s) for s in re.findall(r"Loaded \d+ tensors of .* in ([\d.]+) s\.", log)]
        assert loads, "the log does not say how long a rank loaded"
        record_figure(f"{name} load_s by rank", str(loads))
        done[size] = dict(arrays), facts, log
        return done[size]

    return run


@pytest.fixture(autouse=True)
def our_indexer(monkeypatch):
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_BACKEND", "triton")


@pytest.mark.parametrize("size", sizes() + shared_sizes() or [2])
def test_each_size_computes_what_one_card_does(size, model, at, record_figure):
    kind, _, file_bytes = model
    alone, alone_facts, _ = at(1)
    ours, facts, log = at(size)
    right, found = alone["score"], ours["score"]
    require_triton(log)
    name = f"real dimensions {kind} TP={size}"
    distance, agreement = relative_l2(found, right), top1(found, right)
    record_figure(f"{name} against TP=1 relative L2", distance)
    record_figure(f"{name} against TP=1 top-1", agreement)
    assert distance < KINDS[kind]
    assert agreement > TOP1
    # One of eight ranks that adds nothing to attention moves the logits by less than the bounds
    # above. A sum in another order moves a few positions far, a wrong rank moves them all.
    typical = typical_distance(found, right), typical_distance(found[:EARLY], right[:EARLY])
    controls = (
        typical_distance(ours["without_anything"], right),
        typical_distance(ours["without_attention"][:EARLY], right[:EARLY]),
    )
    words = f"all positions, first {EARLY}"
    record_figure(f"{name} typical position ({words})", str(np.round(typical, 4).tolist()))
    record_figure(f"{name} with a silent rank ({words})", str(np.round(controls, 4).tolist()))
    assert all(2 * one < other for one, other in zip(typical, controls, strict=True))
    # Ranks that computed the same would pass too: each must have touched a part, not the whole.
    assert len(facts["ranks"]) == size
    (alone_rank,) = alone_facts["ranks"]
    for rank in facts["ranks"]:
        saved = alone_rank["peak_host_gib"] - rank["peak_host_gib"]
        assert saved > least_saved(size, file_bytes / 2**30)


def test_another_prompt_is_far_away(model, at):
    """The negative control of the distance above: rows of the same run, one position off."""
    alone = at(1)[0]["score"]
    assert relative_l2(alone[1:], alone[:-1]) > 3 * KINDS[model[0]]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(url: str, body: dict, limit: float) -> str:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with DIRECTLY.open(request, timeout=limit) as answer:
            return f"{answer.status} {answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except (OSError, http.client.HTTPException) as error:  # an answer that was broken off
        return f"{type(error).__name__} {error}"


@pytest.mark.parametrize("size", sorted({max(sizes(), default=2), *shared_sizes()}))
def test_a_killed_rank_ends_the_server(size, gguf_models, tmp_path, record_figure, monkeypatch):
    """An error and an end within a minute, for the request under way as for the process.

    Ranks that share a card wait for a dead one on the host, where the connection breaks; of those that
    wait on a card of their own, only a run on several can tell.
    """
    import psutil

    if size not in sizes() + shared_sizes():
        pytest.skip("needs two GPUs")
    shared = size in shared_sizes()
    if shared:
        monkeypatch.setenv("RANKS_THAT_SHARE_A_CARD", str(size))
    vllm = [str(HERE / "shared_card.py")] if shared else ["-m", "vllm.entrypoints.cli.main"]
    port, log = free_port(), tmp_path / "server.log"
    command = [
        sys.executable, *vllm, "serve",
        str(gguf_models.file("q8_0")), "--hf-config-path", str(gguf_models.config_folder),
        "--tensor-parallel-size", str(size), "--distributed-executor-backend", "mp",
        "--tokens-only", "--skip-tokenizer-init",
        "--attention-backend", "TRITON_MLA_SPARSE", "--moe-backend", "triton",
        "--max-model-len", "4352", "--kv-cache-memory-bytes", str(1 << 30),
        "--gpu-memory-utilization", "0.05", "--enforce-eager",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 240
        while server.poll() is None and time.monotonic() < deadline:
            try:
                with DIRECTLY.open(f"{url}/health", timeout=5) as answer:
                    assert answer.status == 200
                break
            except OSError:
                time.sleep(1)
        else:
            pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}", pytrace=False)

        def body(count: int) -> dict:
            sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
            return {"token_ids": gguf_models.tokens(256)[:64], "sampling_params": sampling}

        # Without it, an endpoint that refuses everything would look like a request that failed.
        assert post(f"{url}/inference/v1/generate", body(4), 60).startswith("200 ")
        answers: list[str] = []
        client = threading.Thread(
            target=lambda: answers.append(post(f"{url}/inference/v1/generate", body(4096), 120)),
            daemon=True,
        )
        client.start()
        time.sleep(1)
        assert not answers, "the long request ended before the rank was killed"
        processes = psutil.Process(server.pid).children(recursive=True)
        ranks = [process for process in processes if "Worker_TP1" in " ".join(process.cmdline())]
        assert len(ranks) == 1, [process.cmdline() for process in processes]
        ranks[0].kill()
        # No bound: vLLM's launcher returns as after an orderly end, with 0 (its issue 48966).
        status = require_end(server, processes, 60)
        where = f"TP={size} on one card" if shared else f"TP={size}"
        record_figure(f"exit status of a server whose rank was killed, {where}", status)
        client.join(30)
        assert answers, "the client still waits"
        assert not answers[0].startswith("200 "), answers[0][:300]
        assert re.search(r"Worker proc \S+ died unexpectedly", log.read_text())
    finally:
        end_group(server)  # what outlives the server holds its GPUs
        server.wait(30)
