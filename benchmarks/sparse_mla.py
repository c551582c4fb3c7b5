"""Speed of the sparse MLA and indexer kernels beside upstream's, in one process.

    VLLM_GLM5_TREE=<patched tree> python benchmarks/sparse_mla.py [--json FILE] [--quick]

Columns in microseconds: the floor (bytes over the measured copy bandwidth), FLASHMLA_SPARSE padded to
64 heads, v0.20.2's in-tree Triton kernel (XPU), this backend with the block table looked up in the
kernel, in a pool of 9.7 GB instead of 1.2 GB, with the separate conversion of upstream, and over an
fp8_ds_mla cache. All are medians of CUDA graph replays. The indexer's kernels stand beside DeepGEMM. With
--quick nothing of upstream's is measured: no such column, no conversion, no DeepGEMM, and no ratio to it.
"""

# ruff: noqa: PLC0415
from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import triton
from sparse_timing import (
    PAGE,
    SCALE,
    TOPK,
    WIDTH,
    SparseInputs,
    copy_bandwidth,
    graph_time,
    load,
    need_folder,
    need_gpu,
)

# (heads, tokens): the most that this backend may take, microseconds on an H200.
TARGETS = {
    (8, 1): 16, (8, 16): 24, (8, 64): 55, (8, 256): 180, (8, 2048): 1400,
    (64, 1): 18, (64, 16): 45, (64, 64): 85, (64, 2048): 1900,
}  # fmt: skip
# Of the copy bandwidth of the same run, at least: 8 heads, from 64 tokens on.
SHARE = 0.75
# Of DeepGEMM's time.
INDEXER_TARGETS = {"prefill": 2.2, "decode": 1.3}
# Rows of the pools: 1.2 GB, and 9.7 GB, as a server's cache may have.
NEAR, FAR = 1 << 20, 1 << 23
TRACE = "--trace" in sys.argv
T = TypeVar("T")


def attempt(what: str, make: Callable[[], T], problems: dict[str, str]) -> T | None:
    """What is made, a time mostly, or None with the problem noted: a missing peer must not cost the table."""
    try:
        return make()
    except Exception as problem:  # noqa: BLE001
        problems.setdefault(what, f"{type(problem).__name__}: {str(problem)[:200]}")
        if TRACE:
            traceback.print_exc()
        torch.cuda.synchronize()
        return None


def flash_mla(inputs: SparseInputs) -> float:
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    padded = torch.zeros(inputs.tokens, 64, WIDTH, device="cuda", dtype=inputs.q.dtype)
    padded[:, : inputs.heads] = inputs.q
    rows = inputs.cache.view(-1, 1, WIDTH)
    calls = [
        lambda i=i: flash_mla_sparse_fwd(padded, rows, inputs.indices[i].unsqueeze(1), SCALE)
        for i in range(inputs.sets)
    ]
    return graph_time(calls)


def in_tree_triton(inputs: SparseInputs) -> float:
    from vllm.v1.attention.ops.xpu_mla_sparse import triton_bf16_mla_sparse_interface

    rows = inputs.cache.view(-1, 1, WIDTH)
    calls = [
        lambda i=i: triton_bf16_mla_sparse_interface(
            inputs.q, rows, inputs.indices[i].unsqueeze(1), sm_scale=SCALE
        )
        for i in range(inputs.sets)
    ]
    return graph_time(calls)


def ours_converted(ops, inputs: SparseInputs) -> float:
    from vllm.v1.attention.backends.mla.sparse_utils import (
        triton_convert_req_index_to_global_index as convert,
    )

    def bind(local):
        def run():
            rows = convert(
                inputs.req_id, inputs.table, local, BLOCK_SIZE=PAGE, NUM_TOPK_TOKENS=TOPK
            )
            return ops.sparse_mla_forward(inputs.q_nope, inputs.q_pe, inputs.cache, rows, SCALE)

        return run

    return graph_time([bind(inputs.local[i]) for i in range(inputs.sets)])


def ds_mla_pool(pool: torch.Tensor) -> torch.Tensor:
    """The pool's rows as fp8_ds_mla, uint8 [rows, 656]."""
    from sparse_ops import ds_mla_rows

    parts = pool.split(1 << 16)
    return torch.cat([ds_mla_rows(part[:, :512], part[:, 512:]) for part in parts])


def most(heads: int, tokens: int, floor: float) -> float:
    """Microseconds that this backend may take where the bytes take `floor`."""
    target = TARGETS[heads, tokens]
    return min(target, floor / SHARE) if heads == 8 and tokens >= 64 else target


def sparse_table(ops, quick: bool, problems: dict[str, str]) -> tuple[float, list[dict]]:
    bandwidth = copy_bandwidth()
    pool = torch.randn(NEAR, WIDTH, device="cuda", dtype=torch.bfloat16)
    fp8_ops = load("triton_sparse_mla_fp8")
    packed = ds_mla_pool(pool)
    rows = []
    for heads, tokens in TARGETS:
        inputs = SparseInputs(pool, heads, tokens)
        floor = inputs.floor_bytes() / bandwidth * 1e6
        row: dict = {"heads": heads, "tokens": tokens, "target": most(heads, tokens, floor)}
        row["floor"] = floor
        peers: dict[str, Callable[[SparseInputs], float]] = {
            "ours": lambda i: graph_time(i.ours(ops)),
            "ours_rows": lambda i: graph_time(i.ours(ops, paged=False)),
            "ours_invariant": lambda i: graph_time(i.ours(ops, batch_invariant=True)),
            "ours_fp8": lambda i: graph_time(i.ours_fp8(fp8_ops, packed)),
        }
        if not quick:
            peers["ours_converted"] = lambda i: ours_converted(ops, i)
            peers |= {"flashmla": flash_mla, "in_tree": in_tree_triton}
        for name, peer in peers.items():
            row[name] = attempt(name, partial(peer, inputs), problems)
        rows.append(row)
        print(row, flush=True)
    far = partial(far_times, ops, [(row["heads"], row["tokens"]) for row in rows])
    times = attempt("a pool of 9.7 GB", far, problems) or [None] * len(rows)
    for row, took in zip(rows, times, strict=True):
        row["ours_far"] = took
    return bandwidth, rows


def far_times(ops, shapes: list[tuple[int, int]]) -> list[float]:
    """Microseconds of this backend where hardly any row is named twice, and few pages are near."""
    pool = torch.empty(FAR, WIDTH, device="cuda", dtype=torch.bfloat16).normal_()
    return [graph_time(SparseInputs(pool, heads, tokens).ours(ops)) for heads, tokens in shapes]


def indexer_prefill(ops, tokens: int, keys: int, quick: bool, problems: dict[str, str]) -> dict:
    q = torch.randn(tokens, 32, 128, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(keys, 128, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(keys, device="cuda")
    weights = torch.randn(tokens, 32, device="cuda")
    ks = torch.zeros(tokens, device="cuda", dtype=torch.int32)
    ke = torch.full_like(ks, keys)

    def deep_gemm() -> float:
        from sparse_ops import deep_gemm_options
        from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

        options = deep_gemm_options(fp8_fp4_mqa_logits, keys)
        return graph_time(
            [lambda: fp8_fp4_mqa_logits((q, None), (k, scale), weights, ks, ke, **options)]
        )

    def triton() -> float:
        return graph_time([lambda: ops.mqa_logits(q, k, scale, weights, ks, ke)])

    row = {"what": "prefill", "shape": f"{tokens} x {keys}"}
    row["ours"] = attempt("indexer prefill", triton, problems)
    row["bytes"] = attempt(
        "indexer prefill, bytes",
        lambda: graph_time(
            [lambda: ops.mqa_logits(q, k, scale, weights, ks, ke, native_fp8=False)]
        ),
        problems,
    )
    row["deep_gemm"] = None if quick else attempt("DeepGEMM prefill", deep_gemm, problems)
    row["tflops"] = tokens * keys * 32 * 128 * 2 / (row["ours"] or 1e30) / 1e6
    return row


def indexer_decode(ops, batch: int, length: int, quick: bool, problems: dict[str, str]) -> dict:
    pages = length // PAGE
    sets = max(2, min(8, 300_000_000 // (batch * length * 132)))
    blocks = sets * batch * pages
    cache = torch.randint(0, 120, (blocks, PAGE, 1, 132), device="cuda", dtype=torch.uint8)
    flat = cache.view(blocks, -1)
    flat[:, PAGE * 128 :] = torch.rand(blocks, PAGE, device="cuda").view(torch.uint8)
    q = torch.randn(batch, 1, 32, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(batch, 32, device="cuda")
    lens = torch.full((batch, 1), length, device="cuda", dtype=torch.int32)
    order = torch.randperm(blocks, device="cuda").to(torch.int32)
    tables = order.view(sets, batch, pages)

    def triton() -> float:
        return graph_time(
            [
                lambda i=i: ops.paged_mqa_logits(q, cache, weights, lens, tables[i], length)
                for i in range(sets)
            ]
        )

    def deep_gemm() -> float:
        from sparse_ops import deep_gemm_options
        from vllm.utils import deep_gemm as module

        sms = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = module.get_paged_mqa_logits_metadata(lens, PAGE, sms)
        options = deep_gemm_options(module.fp8_fp4_paged_mqa_logits, length)
        return graph_time(
            [
                lambda i=i: module.fp8_fp4_paged_mqa_logits(
                    (q, None), cache, weights, lens, tables[i], schedule,
                    max_model_len=length, **options,
                )
                for i in range(sets)
            ]
        )  # fmt: skip

    row = {"what": "decode", "shape": f"{batch} x {length}"}
    row["ours"] = attempt("indexer decode", triton, problems)
    row["deep_gemm"] = None if quick else attempt("DeepGEMM decode", deep_gemm, problems)
    row["gbytes_per_s"] = batch * length * 132 / (row["ours"] or 1e30) / 1e3
    return row


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def report(bandwidth: float, rows: list[dict], indexer: list[dict]) -> None:
    print(f"\n{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.0f} GB/s, microseconds")
    columns = [
        "floor",
        "flashmla",
        "in_tree",
        "ours",
        "ours_far",
        "ours_rows",
        "ours_converted",
        "ours_invariant",
        "ours_fp8",
        "target",
    ]
    print("| heads x tokens | " + " | ".join(columns) + " | |")
    print("| --- " * (len(columns) + 2) + "|")
    for row in rows:
        met = row["ours"] is not None and row["ours"] <= row["target"]
        cells = " | ".join(show(row.get(column)) for column in columns)
        print(f"| {row['heads']} x {row['tokens']} | {cells} | {'met' if met else 'MISSED'} |")
    print("| indexer | shape | DeepGEMM | ours | ratio | at most | |")
    print("| --- " * 7 + "|")
    for row in indexer:
        ratio = row["ours"] / row["deep_gemm"] if row["ours"] and row["deep_gemm"] else None
        limit = INDEXER_TARGETS[row["what"]]
        met = "-" if ratio is None else ("met" if ratio <= limit else "MISSED")
        shown = "-" if ratio is None else f"{ratio:.2f}"
        cells = f"{row['shape']} | {show(row['deep_gemm'])} | {show(row['ours'])} | {shown}"
        print(f"| {row['what']} | {cells} | {limit} | {met} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="leave upstream's kernels out")
    parser.add_argument("--trace", action="store_true", help="print what stopped a peer")
    args = parser.parse_args()
    need_folder(parser, args.json)
    need_gpu(parser)
    torch.manual_seed(0)
    problems: dict[str, str] = {}
    bandwidth, rows = sparse_table(load("triton_sparse_mla"), args.quick, problems)
    ops = load("triton_mqa_logits")
    indexer = [
        indexer_prefill(ops, 2048, 65_536, args.quick, problems),
        indexer_decode(ops, 64, 32_768, args.quick, problems),
        indexer_decode(ops, 1, 131_072, args.quick, problems),
    ]
    report(bandwidth, rows, indexer)
    for what, problem in problems.items():
        print(f"not measured: {what}: {problem}")
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_s": bandwidth,
        "sparse_mla": rows,
        "indexer": indexer,
        "problems": problems,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    else:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
