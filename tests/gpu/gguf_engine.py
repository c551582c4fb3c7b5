"""Runs one engine in a process of its own: a second engine in a process trips vLLM's profiling.

    python gguf_engine.py JOB.json OUT.npz

JOB holds `engine` (arguments of vllm.LLM), `score` (token lists whose logits are wanted at every
position) and `generate` (prompts, tokens, rounds: greedy decoding of all prompts as one batch).
OUT holds score_I [tokens, vocabulary], and for the last round tokens_I and decode_I
[new tokens, vocabulary], all log-probabilities in float32, and the JSON string `facts`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def table(flat, vocab: int):
    """Log-probabilities [positions, vocabulary] of vLLM's flat form; NaN where it has none."""
    import numpy as np

    out = np.full((len(flat.start_indices), vocab), np.nan, np.float32)
    ids, values = np.asarray(flat.token_ids), np.asarray(flat.logprobs, np.float32)
    for row, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        out[row, ids[start:end]] = values[start:end]
    return out


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not {"tensor_parallel_size", "pipeline_parallel_size"} & job["engine"].keys():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import numpy as np
    import torch
    import vllm

    started = time.perf_counter()
    llm = vllm.LLM(**job["engine"])
    config = llm.llm_engine.model_config
    vocab = config.get_vocab_size()
    facts = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "dtype": str(config.dtype),
        "ready_s": round(time.perf_counter() - started, 1),
    }
    out = {}

    def run(prompts, **options):
        params = vllm.SamplingParams(
            temperature=0.0,
            logprobs=vocab,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            **options,
        )
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    for i, tokens in enumerate(job.get("score", [])):
        (result,) = run([tokens], max_tokens=1, prompt_logprobs=vocab)
        # Row n of the prompt's is the distribution of token n, so the last comes from decoding.
        prompt = table(result.prompt_logprobs, vocab)[1:]
        last = table(result.outputs[0].logprobs, vocab)
        out[f"score_{i}"] = np.concatenate([prompt, last])
    if generate := job.get("generate"):
        for _ in range(generate.get("rounds", 1)):
            results = run(generate["prompts"], max_tokens=generate["tokens"])
        for i, result in enumerate(results):
            out[f"tokens_{i}"] = np.asarray(result.outputs[0].token_ids)
            out[f"decode_{i}"] = table(result.outputs[0].logprobs, vocab)
        facts["cached_tokens"] = sum(result.num_cached_tokens or 0 for result in results)
    if not job["engine"].get("disable_log_stats", True):
        facts["counters"] = {
            metric.name: metric.value
            for metric in llm.get_metrics()
            if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")
        }
    np.savez(sys.argv[2], facts=json.dumps(facts), **out)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
