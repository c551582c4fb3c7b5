"""One engine in a process of its own: `python sparse_engine.py JOB.json OUT.npz`.

JOB: model, backend, indexer, dtype, kv, eager, batched_tokens, speculative, capability (whose rows of the
tables to force), tokens (prompts for logits), requests (prompts to generate from), soak (seconds).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np


def force_rows(capability: int) -> None:
    """Make the kernels believe in another card's capability: its rows, and its byte conversion."""
    import torch
    from vllm.v1.attention.ops import (
        triton_mqa_logits,
        triton_sparse_mla,
        triton_sparse_mla_fp8,
    )

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for module in (triton_mqa_logits, triton_sparse_mla, triton_sparse_mla_fp8):
        module._device_properties = lambda _device: (capability, sms)


def start(job: dict):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_SPARSE_INDEXER_BACKEND"] = job["indexer"]
    from vllm import LLM

    if job.get("capability"):
        force_rows(job["capability"])
    more = {}
    if job.get("speculative"):
        more["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": job["speculative"],
        }
    return LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        attention_backend=job["backend"],
        dtype=job["dtype"],
        kv_cache_dtype=job.get("kv", "auto"),
        enforce_eager=job["eager"],
        max_model_len=8192,
        max_num_batched_tokens=job["batched_tokens"],
        max_num_seqs=64,
        # Given, so that nothing is measured: several engines can then share the card.
        kv_cache_memory_bytes=4 << 30,
        gpu_memory_utilization=0.1,
        max_logprobs=-1,
        enable_prefix_caching=True,
        moe_backend="triton",
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
        **more,
    )


def logits(llm, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [N - 1, vocabulary] after each but the last token."""
    from gguf_engine import table
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], parameters, use_tqdm=False)
    return table(output.prompt_logprobs, llm.llm_engine.model_config.get_vocab_size())[1:]


def generate(
    llm, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(
        max_tokens=count, temperature=0, logprobs=0, ignore_eos=True, detokenize=False
    )
    inputs = [TokensPrompt(prompt_token_ids=tokens) for tokens in prompts]
    tokens, scores = [], []
    for output in llm.generate(inputs, parameters, use_tqdm=False):
        answer = output.outputs[0]
        tokens.append(list(answer.token_ids))
        steps = zip(answer.token_ids, answer.logprobs, strict=True)
        scores.append([step[token].logprob for token, step in steps])
    return tokens, scores


def scored_again(llm, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
    """The answers' log-probabilities as a prompt: the prefill path over what decode wrote."""
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    inputs = [TokensPrompt(prompt_token_ids=p + a) for p, a in zip(prompts, answers, strict=True)]
    out = []
    for prompt, answer, output in zip(
        prompts, answers, llm.generate(inputs, parameters, use_tqdm=False), strict=True
    ):
        rows = output.prompt_logprobs[len(prompt) :]
        out.append([row[token].logprob for token, row in zip(answer, rows, strict=True)])
    return out


def soak(llm, prompts: list[list[int]], seconds: float) -> dict:
    """Mixed load until the time is over: rounds, NaN seen, growth of memory after a third of it.

    A batch of the largest size, for whose buffers the pool grows once, comes at some time.
    """
    import torch

    rounds, bad, first = 0, 0, None
    rng = np.random.default_rng(0)
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        chosen = [prompts[i] for i in rng.permutation(len(prompts))[: rng.integers(1, 65)]]
        _, scores = generate(llm, chosen, int(rng.integers(1, 48)))
        bad += sum(not np.isfinite(row).all() for row in scores)
        rounds += 1
        if first is None and time.monotonic() > began + seconds / 3:
            first = torch.cuda.memory_reserved()
    grown = torch.cuda.memory_reserved() - first if first is not None else 0
    return {"rounds": rounds, "bad": bad, "grown": grown, "seconds": seconds}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    began = time.monotonic()
    llm = start(job)
    out: dict[str, np.ndarray] = {"start_seconds": np.array(time.monotonic() - began)}
    for name, tokens in job.get("tokens", {}).items():
        out[f"logits_{name}"] = logits(llm, tokens)
    prompts = job.get("requests")
    if prompts:
        answers, scores = generate(llm, prompts, 24)
        repeated, again = generate(llm, prompts, 24)  # the prefix cache holds the prompts now
        few = list(range(0, len(prompts), 5))
        prefill = scored_again(llm, [prompts[i] for i in few], [answers[i] for i in few])
        out |= {
            "answers": np.array(answers),
            "scores": np.array(scores),
            "repeated": np.array(repeated),
            "again": np.array(again),
            "scored": np.array([scores[i] for i in few]),
            "prefill": np.array(prefill),
        }
    if job.get("soak"):
        result = soak(llm, prompts, job["soak"])
        out |= {f"soak_{name}": np.array(value) for name, value in result.items()}
    np.savez(sys.argv[2], **out)
    sys.stdout.flush()
    os._exit(0)  # the engine's own shutdown can take a minute


if __name__ == "__main__":
    main()
