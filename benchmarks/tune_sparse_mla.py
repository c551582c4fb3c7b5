"""Measures launch parameters of the sparse MLA and indexer kernels and prints the best of each.

    VLLM_GLM5_TREE=<patched tree> python benchmarks/tune_sparse_mla.py [--seconds 170] [--json FILE]

Everything is compiled first, in parallel, for this card; then each row of the speed table takes every
candidate with several split counts. It stops at the time limit with what it has. --fp8 takes the kernel
over fp8_ds_mla rows instead, and leaves the indexer out.
"""

# ruff: noqa: PLC0415
from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from sparse_mla import ds_mla_pool
from sparse_timing import PAGE, WIDTH, SparseInputs, graph_time, load, need_folder, need_gpu

BROKEN = set(json.loads(os.environ.get("TUNE_BROKEN", "[]")))
ROWS = [(8, 1), (8, 16), (8, 64), (8, 256), (8, 2048), (64, 1), (64, 16), (64, 64), (64, 2048)]


def config(block_h, block_n, num_warps, num_stages, nested=False):
    return {
        "block_h": block_h,
        "block_n": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "nested": nested,
    }


FEW = [
    config(8, 16, 2, 3),
    config(8, 16, 2, 4),
    config(8, 32, 4, 2),
    config(8, 32, 4, 3),
    config(8, 32, 8, 3),
    config(8, 64, 4, 2),
    config(8, 64, 4, 3),
    config(8, 64, 8, 2),
    config(16, 16, 2, 3),
    config(16, 16, 2, 4),
    config(16, 16, 4, 3),
    config(16, 32, 4, 2),
    config(16, 32, 4, 3),
    config(16, 32, 8, 3),
    config(16, 64, 4, 2),
    config(16, 64, 4, 3),
    config(16, 64, 8, 2),
    config(16, 64, 8, 3),
]
MANY = [
    config(64, 64, 8, 2, nested=True),
    config(64, 32, 8, 3, nested=True),
    config(64, 32, 8, 3),
    config(32, 32, 4, 2),
    config(32, 32, 4, 3),
    config(32, 64, 8, 2),
    config(16, 16, 2, 3),
    config(16, 32, 4, 3),
]
STEPS = [(16, 2, 2), (16, 2, 3), (16, 4, 2), (16, 4, 3), (32, 4, 2), (32, 4, 3), (32, 8, 2)]
STEPS += [(32, 8, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3)]
FP8_FEW = [config(rows, *step) for rows, step in itertools.product((8, 16), STEPS)]
FP8_MANY = [
    config(16, 32, 4, 2),
    config(16, 32, 8, 2),
    config(32, 16, 4, 2),
    config(32, 16, 4, 3),
    config(32, 16, 8, 3),
    config(32, 32, 4, 2),
    config(32, 32, 4, 3),
    config(32, 32, 8, 2),
    config(32, 32, 8, 3),
    config(32, 64, 8, 2),
    config(32, 64, 8, 3),
    config(64, 32, 8, 2),
    config(64, 64, 8, 2),
]
INDEXER = [
    {"block_n": n, "block_q": q, "step_q": s, "num_warps": w, "num_stages": st}
    for n, q, s, w, st in itertools.product([128, 256], [64, 128], [2, 4], [4, 8], [2, 3])
]
DECODE = [
    {"pages": p, "decode_warps": w, "decode_stages": s, "programs_per_sm": n}
    for p, w, s, n in itertools.product([1, 2], [4, 8], [2, 3, 4], [4, 8, 16])
]


def compile_one(tree: str, job: dict) -> str:
    """In a worker: fill Triton's disk cache for this card."""
    from aot import compile_jobs

    try:
        compile_jobs(Path(tree), [job])
    except Exception as problem:  # noqa: BLE001
        return f"{job['label']}: {problem}"
    return ""


def compile_all(capability: int, limit: float, kernel: str, few: list, many: list) -> None:
    tree = os.environ.get("VLLM_GLM5_TREE")
    if not tree:
        print("VLLM_GLM5_TREE is not set: compiling as it goes")
        return
    jobs = []
    for heads, table in ((8, few), (64, many)):
        for candidate, splits in itertools.product(table, (1, 8)):
            jobs.append(
                {"op": f"triton_{kernel}", "call": kernel, "capability": capability,
                 "dtype": "bfloat16", "heads": heads, "rope": 64, "paged": True, "tokens": 16,
                 "splits": splits, "config": candidate, "label": str(candidate)}
            )  # fmt: skip
    start = time.monotonic()
    context = get_context("spawn")
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(compile_one, tree, job) for job in jobs]
        for future in futures:
            left = limit - (time.monotonic() - start)
            try:
                problem = future.result(timeout=max(left, 0.1))
            except TimeoutError:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            if problem:
                print("compile:", problem[:160])
    print(f"compiled {len(jobs)} in {time.monotonic() - start:.0f} s", flush=True)


def measure(calls, name, budget_us=15_000):
    """Median microseconds, or None. A candidate that breaks the CUDA context is noted, and the
    script starts again without it."""
    if name in BROKEN:
        return None
    try:
        return graph_time(calls, budget_us)
    except torch.AcceleratorError as problem:
        print(f"broken: {name}: {problem}".splitlines()[0], flush=True)
        left = json.dumps(sorted({*BROKEN, name}))
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TUNE_BROKEN": left})
    except Exception as problem:  # noqa: BLE001
        if "OutOfResources" not in type(problem).__name__:
            print(f"{name}: {problem}"[:200], flush=True)
        return None


def tune_sparse(ops, deadline: float, few: list, many: list, fp8=None) -> list[dict]:
    """:param fp8: the module of the kernel over fp8_ds_mla rows, where that one is meant."""
    pool = torch.randn(1 << 20, WIDTH, device="cuda", dtype=torch.bfloat16)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    packed = ds_mla_pool(pool) if fp8 else None
    results = []
    for heads, tokens in ROWS:
        inputs = SparseInputs(pool, heads, tokens)
        found = []
        for candidate in few if heads == 8 else many:
            if time.monotonic() > deadline:
                break
            made = ops.SparseMLAConfig(**candidate)
            blocks = tokens * -(-heads // made.block_h)
            counts = {
                max(1, min(32, n * sms // blocks, 2048 // made.block_n)) for n in (1, 2, 3, 4)
            }
            counts |= {c for c in (4, 8, 16, 32) if tokens == 1}
            for splits in sorted(counts):
                how = {"config": made, "splits": splits}
                calls = inputs.ours_fp8(fp8, packed, **how) if fp8 else inputs.ours(ops, **how)
                took = measure(calls, str(candidate))
                if took is not None:
                    found.append((took, splits, candidate))
        found.sort(key=lambda item: item[0])
        for took, splits, candidate in found[:4]:
            print(
                f"{heads} x {tokens}: {took:8.1f} us  splits {splits:2d}  {candidate}", flush=True
            )
        results.append({"heads": heads, "tokens": tokens, "all": found})
    return results


def tune_indexer(ops, deadline: float) -> list[dict]:
    results = []
    tokens, keys = 2048, 65_536
    q = torch.randn(tokens, 32, 128, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(keys, 128, device="cuda").to(torch.float8_e4m3fn)
    scale, weights = torch.rand(keys, device="cuda"), torch.randn(tokens, 32, device="cuda")
    ks = torch.zeros(tokens, device="cuda", dtype=torch.int32)
    arguments = (q, k, scale, weights, ks, torch.full_like(ks, keys))
    found = []
    for candidate in INDEXER:
        if time.monotonic() > deadline:
            break
        made = ops.MQALogitsConfig(**candidate)
        call = partial(ops.mqa_logits, *arguments, config=made)
        took = measure([call], f"prefill {candidate}")
        if took is not None:
            found.append((took, candidate))
    found.sort(key=lambda item: item[0])
    for took, candidate in found[:4]:
        print(f"indexer prefill: {took:8.1f} us {candidate}", flush=True)
    results.append({"what": "prefill", "all": found})
    results.append(tune_decode(ops, 64, 32_768, deadline))
    results.append(tune_decode(ops, 1, 131_072, deadline))
    return results


def tune_decode(ops, batch: int, length: int, deadline: float) -> dict:
    pages, sets = length // PAGE, 2
    cache = torch.randint(
        0, 120, (sets * batch * pages, PAGE, 1, 132), device="cuda", dtype=torch.uint8
    )
    tables = torch.randperm(len(cache), device="cuda").int().view(sets, batch, pages)
    q = torch.randn(batch, 1, 32, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(batch, 32, device="cuda")
    lens = torch.full((batch, 1), length, device="cuda", dtype=torch.int32)
    found = []
    for candidate in DECODE:
        if time.monotonic() > deadline:
            break
        made = ops.MQALogitsConfig(**candidate)
        calls = [
            partial(ops.paged_mqa_logits, q, cache, weights, lens, table, length, config=made)
            for table in tables
        ]
        took = measure(calls, f"decode {candidate}")
        if took is not None:
            found.append((took, candidate))
    found.sort(key=lambda item: item[0])
    for took, candidate in found[:4]:
        print(f"indexer decode {batch} x {length}: {took:8.1f} us {candidate}", flush=True)
    return {"what": f"decode {batch} x {length}", "all": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fp8", action="store_true", help="the kernel over fp8_ds_mla rows")
    args = parser.parse_args()
    need_folder(parser, args.json)
    need_gpu(parser)
    start = time.monotonic()
    torch.manual_seed(0)
    major, minor = torch.cuda.get_device_capability()
    capability = major * 10 + minor
    kernel = "sparse_mla_fp8" if args.fp8 else "sparse_mla"
    few, many = (FP8_FEW, FP8_MANY) if args.fp8 else (FEW, MANY)
    compile_all(capability, args.seconds * 0.4, kernel, few, many)
    ops = load("triton_sparse_mla")
    if args.fp8:
        fp8 = load("triton_sparse_mla_fp8")
        result = {kernel: tune_sparse(ops, start + args.seconds, few, many, fp8)}
        table = fp8.FP8_CONFIGS
    else:
        result = {
            kernel: tune_sparse(ops, start + args.seconds * 0.75, few, many),
            "indexer": tune_indexer(load("triton_mqa_logits"), start + args.seconds),
        }
        table = ops.CONFIGS
    if args.json:
        args.json.write_text(json.dumps(result))
    for _, _, current in table[ops.table_key(capability)]:
        print("in the table now:", asdict(current))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
