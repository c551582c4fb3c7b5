"""The whole engine at GLM-5's own dimensions: tokens a second, time to first token, where it goes.

    python benchmarks/engine.py [--json FILE] [--backends A,B] [--contexts 4096,32768]
                                [--batches 1,8,64,256] [--tokens 4000000] [--trace] [--gpus 0,1]

Needs one GPU with about 120 GB and an environment with the built wheel. One engine a backend, in a
process of its own, one after another on the first GPU named, or at once where each has one, which cells
of millions of tokens ask for: random weights in bfloat16, one dense layer and two of 256 experts, so that a
layer's share is that of the real model and only the head's is too large (the vocabulary is cut for
that). TRITON_MLA_SPARSE has its own indexer, FLASHMLA_SPARSE has DeepGEMM. A cell prefills every
request for real: a shared prefix would keep the rows that attention gathers in the L2 cache. The first
requests go on decoding until the last one is prefilled, and a step counts while all decode. Cells of more
than --tokens tokens, or than the KV cache holds, are left out and say so.

--trace adds to each cell what the kernels of one decode step took, by part of a layer.
engine_page.py makes the pictures of docs/performance.md from the stored run.
"""

# ruff: noqa: PLC0415
from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

from gguf_model import REAL_LAYERS

INDEXERS = {"TRITON_MLA_SPARSE": "triton", "FLASHMLA_SPARSE": "deep_gemm"}
STEPS = 32  # of decoding that are measured
STEP_TOKENS = 8192
KV_GIB = 40
SAYING = threading.Lock()  # one engine's line at a time
CONFIG = REAL_LAYERS | {"max_position_embeddings": 202752, "vocab_size": 8192}
# Parts of a layer by what their kernels are called; the first that matches counts. Experts stand before
# the indexer, whose top-k is no router's: vllm::moe::grouped_topk_fused_kernel.
PARTS = {
    "attention": (
        "sparse_mla",
        "flash_fwd_splitkv",
        "sparse_fwd",
        "sparse_attn",
        "flashmla",
        "merge_splits",
    ),
    "experts": ("moe", "expert", "grouped_topk", "sigmoid"),
    "indexer": ("mqa_logits", "topk", "top_k", "indexer", "fp8_quant", "cp_gather"),
    "cache and rope": ("cache", "rope", "rotary", "convert_req"),
    "dense matrices": ("gemm", "cublas", "nvjet", "cutlass", "sm90_xmma", "matmul"),
}


def part_of(kernel: str) -> str:
    name = kernel.lower()
    return next((part for part, keys in PARTS.items() if any(k in name for k in keys)), "rest")


def new_tokens(batch: int, context: int) -> int:
    """Of each request: the first one decodes in the steps that prefill the others, and in those measured."""
    prefill = math.ceil(batch * context / (STEP_TOKENS - batch))
    return prefill + STEPS + 8  # one more is under the profiler, a few may not be full


def start(backend: str, room: int):
    """:param room: the most tokens of a request, its prompt's and the new ones."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_SPARSE_INDEXER_BACKEND"] = INDEXERS[backend]
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # Compiled for minutes when an engine starts, and for top-k and top-p alone.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    import vllm

    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=backend,
        max_model_len=room,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=256,
        kv_cache_memory_bytes=KV_GIB << 30,
        gpu_memory_utilization=0.95,
        enable_prefix_caching=False,
        moe_backend="triton",
        compilation_config={"cudagraph_capture_sizes": [1, 8, 64, 256]},
        disable_log_stats=False,
    )


def cell(llm, batch: int, context: int, trace: bool) -> dict:
    """Time to the first token of all, and new tokens a second while all decode."""
    import numpy as np
    import vllm

    rng = np.random.default_rng(batch + context)
    prompts = [
        {"prompt_token_ids": rng.integers(2, CONFIG["vocab_size"], context).tolist()}
        for _ in range(batch)
    ]
    params = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens(batch, context),
        ignore_eos=True,
        detokenize=False,
    )
    engine = llm.llm_engine
    names = [f"{batch}-{context}-{i}" for i in range(batch)]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, params)
    began = time.perf_counter()
    first: dict[str, float] = {}
    steps: list[float] = []
    kernels: dict[str, float] = {}
    last = began
    while len(steps) < STEPS and engine.has_unfinished_requests():
        decoding = len(first) == batch
        tracing = trace and not kernels and decoding and len(steps) == STEPS // 2
        outputs = traced(engine, kernels) if tracing else engine.step()
        now = time.perf_counter()
        # One that has finished has a row in no later step.
        if decoding and not tracing and len(outputs) == batch:
            steps.append(now - last)
        for output in outputs:
            if output.outputs and output.outputs[0].token_ids:
                first.setdefault(output.request_id, now - began)
        last = now
    if len(steps) < STEPS:
        raise RuntimeError(f"{len(steps)} steps of {batch} requests at once, {STEPS} are measured")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    median = statistics.median(steps)
    return {
        "batch": batch,
        "context": context,
        "first_token_of_all_s": max(first.values()),
        "first_token_of_one_s": min(first.values()),
        "decode_step_ms": median * 1e3,
        "decode_tokens_per_s": batch / median,
        "prefill_tokens_per_s": batch * context / max(first.values()),
        **({"kernels_us": kernels} if trace else {}),
    }


def traced(engine, kernels: dict[str, float]):
    """One step under the profiler; adds microseconds of GPU time by part of a layer."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        outputs = engine.step()
        torch.cuda.synchronize()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            part = part_of(event.name)
            kernels[part] = kernels.get(part, 0.0) + event.device_time
            kernels.setdefault("names", {})[event.name[:80]] = part
    return outputs


def card() -> dict:
    import torch
    import triton
    from sparse_timing import copy_bandwidth

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_s": copy_bandwidth(),
    }


def end_with_the_run() -> None:
    """Watch standard input, which the run holds open: one that is killed leaves no engine on its GPU."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        print("the run that started this engine has ended, and so does it", file=sys.stderr)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(options: argparse.Namespace) -> None:
    """The child: one backend, a line of JSON a cell."""
    end_with_the_run()
    cells = [(context, batch) for context in options.contexts for batch in options.batches]
    room = max(context + new_tokens(batch, context) for context, batch in cells)
    llm = start(options.backend, room)
    capacity = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks * (
        llm.llm_engine.vllm_config.cache_config.block_size
    )
    print("CARD", json.dumps(card()), flush=True)
    cell(llm, 1, 1024, trace=False)  # compiles what a first request compiles
    for context, batch in cells:
        row: dict = {"backend": options.backend, "batch": batch, "context": context}
        total = batch * (context + new_tokens(batch, context))
        if total > min(capacity, options.tokens):
            row["left_out"] = f"{total} tokens; {min(capacity, options.tokens)} fit"
        else:
            row |= cell(llm, batch, context, options.trace)
        print("CELL", json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the engine's own shutdown can take a minute


def table(rows: list[dict]) -> str:
    lines = [
        f"{'backend':20}{'context':>9}{'batch':>7}{'first, s':>10}{'step, ms':>10}{'tok/s':>9}"
    ]
    for row in rows:
        head = f"{row['backend']:20}{row['context']:>9,}{row['batch']:>7}"
        if "left_out" in row:
            lines.append(f"{head}  left out: {row['left_out']}")
            continue
        lines.append(
            f"{head}{row['first_token_of_all_s']:>10.2f}{row['decode_step_ms']:>10.2f}"
            f"{row['decode_tokens_per_s']:>9.0f}"
        )
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def cards(text: str) -> list[int]:
    given = numbers(text)
    if len(set(given)) < len(given) or min(given) < 0:
        raise argparse.ArgumentTypeError(f"each of 0, 1, ... at most once, not {text}")
    return given


def names(text: str) -> list[str]:
    given = text.split(",")
    if unknown := set(given) - INDEXERS.keys():
        known = ", ".join(INDEXERS)
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))} here, but {known}")
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backends", type=names, default=list(INDEXERS))
    parser.add_argument("--contexts", type=numbers, default=[4096, 32768, 131072])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument(
        "--gpus", type=cards, default=[0], help="as many as backends run at once (default 0)"
    )
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        run(options)
        return
    from sparse_timing import need_folder, need_gpu

    need_folder(parser, options.json)
    need_gpu(parser, options.gpus)
    gpus = options.gpus[: len(options.backends)]  # the others have nothing to do
    stored: dict = {"at_once": len(gpus), "cells": []}
    turns = [options.backends[i :: len(gpus)] for i in range(len(gpus))]
    with ThreadPoolExecutor(len(gpus)) as pool:
        done = [
            pool.submit(follow, gpu, own, stored, options.json)
            for gpu, own in zip(gpus, turns, strict=True)
        ]
        try:
            wait(done)
        except KeyboardInterrupt:
            os._exit(130)  # without waiting for the engines, which end with this process
    for one in done:
        one.result()
    print(table(stored["cells"]))


def follow(gpu: int, backends: list[str], stored: dict, file: Path | None) -> None:
    """Run the backends on a GPU, one after another; add what they say to stored, and to the file."""
    for backend in backends:
        command = [sys.executable, __file__, *sys.argv[1:], "--backend", backend]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible(gpu)}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as child:
            assert child.stdout
            for line in child.stdout:
                with SAYING:
                    hear(line, stored, file)
        if child.returncode:
            raise SystemExit(f"{backend}: the engine ended with {child.returncode}")


def visible(gpu: int) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for this one of those that we see."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[gpu] if seen else str(gpu)


def hear(line: str, stored: dict, file: Path | None) -> None:
    if line.startswith("CARD "):
        said = json.loads(line.removeprefix("CARD "))
        # Of several cards the fastest gives the floor.
        stored["card"] = max(
            stored.get("card", said), said, key=lambda one: one["copy_bytes_per_s"]
        )
    elif line.startswith("CELL "):
        stored["cells"].append(json.loads(line.removeprefix("CELL ")))
        print(table(stored["cells"][-1:]).splitlines()[-1], flush=True)
        # After each cell: a run that is cut off keeps what it measured.
        if file:
            file.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
