"""One engine over several GPUs: `python many_gpus.py JOB.json OUT.npz`.

JOB: `engine` (arguments of vllm.LLM), `tokens` (one prompt whose logits are wanted), `throughput`
(requests, prompt tokens, new tokens; none if its ranks share a card). OUT: `score` [tokens,
vocabulary], log-probabilities in float32, and the JSON string `facts`, with what each rank's process
read and held. With several ranks also `without_attention` and `without_anything`: the same after the
last rank's attention heads, and then all else that it adds, were silenced.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

if RANKS := int(os.environ.get("RANKS_THAT_SHARE_A_CARD", "0")):
    # Here, since each rank's process is started by reading this file anew.
    from shared_card import share

    share(RANKS)

# What ends a rank's share of attention, and of the experts and the other MLPs.
ATTENTION, MLPS = ["o_proj."], ["down_proj.", "w2_"]


def process_facts(_worker) -> dict[str, float]:
    """Runs in each rank's process: GiB that it read from the disk, and the most that it held.

    The latter (VmHWM) includes what it touched of the mapped files: those are mapped until the
    model is loaded.
    """
    import pathlib

    def value(file: str, key: str) -> int:
        lines = pathlib.Path(f"/proc/self/{file}").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

    return {
        "read_gib": value("io", "read_bytes:") / 2**30,
        "peak_host_gib": value("status", "VmHWM:") / 2**20,
    }


def silence_last_rank(worker, modules: list[str]) -> int:
    """Runs in each rank's process: make the last one's weights of some modules zeros; how many."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    if get_tensor_model_parallel_rank() != get_tensor_model_parallel_world_size() - 1:
        return 0
    # A block of zeros stands for zeros in every quantization here: its scale is one of them.
    weights = [
        parameter.data
        for name, parameter in worker.get_model().named_parameters()
        if any(module in name for module in modules) and not name.endswith("qweight_type")
    ]
    for weight in weights:
        weight.zero_()
    return len(weights)


def decode_rate(llm, requests: int, prompt: int, new: int) -> float:
    """New tokens a second of a batch, prefill left out: two runs of different length."""
    import vllm

    vocab = llm.llm_engine.model_config.get_vocab_size()
    rng = np.random.default_rng(3)
    prompts = [
        {"prompt_token_ids": rng.integers(2, vocab, prompt).tolist()} for _ in range(requests)
    ]
    seconds = []
    for count in (2, 1, new):  # the first warms up, a step of decoding included
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return requests * (new - 1) / (seconds[2] - seconds[1])


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # collective_rpc takes a function only with it; nothing but this script talks to the workers.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    import vllm
    from gguf_engine import table
    from gguf_load_rate import drop

    for shard in Path(job["engine"]["model"]).parent.glob("*.gguf"):
        drop(shard)  # what a rank reads from the page cache is not counted as read
    began = time.perf_counter()
    llm = vllm.LLM(**job["engine"])
    facts = {"ready_s": round(time.perf_counter() - began, 1)}
    facts["ranks"] = llm.collective_rpc(process_facts)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    params = vllm.SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=vocab, flat_logprobs=True, detokenize=False
    )

    def score() -> np.ndarray:
        (result,) = llm.generate([{"prompt_token_ids": job["tokens"]}], params, use_tqdm=False)
        return table(result.prompt_logprobs, vocab)[1:]

    out = {"score": score()}
    if job["throughput"]:
        facts["decode_tokens_per_s"] = decode_rate(llm, *job["throughput"])
    if len(facts["ranks"]) > 1:
        for name, modules in (("without_attention", ATTENTION), ("without_anything", MLPS)):
            done = llm.collective_rpc(silence_last_rank, args=(modules,))
            assert done[-1] and not any(done[:-1]), done
            out[name] = score()
    np.savez(sys.argv[2], facts=json.dumps(facts), **out)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
