"""Timing on a GPU: medians of CUDA graph replays over rotating inputs.

A decode step replays one graph with the calls of all layers (78 of GLM-5), so a graph here holds many
calls too: launching it takes some 7 us on an H200, which two calls of 45 us would be charged with.
"""

# ruff: noqa: PLC0415
from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "kernels"), str(ROOT / "tests" / "gpu")]

TOPK, WIDTH, PAGE, SCALE = 2048, 576, 64, 0.0625
GRAPH_US = 2_000  # a graph is at least this long


def load(name: str):
    from sparse_ops import load as load_module

    return load_module(name)


def need_gpu(parser: argparse.ArgumentParser, gpus: Sequence[int] = (0,)) -> None:
    """End with a usage error where one of them is not there, before anything takes memory or time."""
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, and this Python's torch sees none")
    if max(gpus) >= (seen := torch.cuda.device_count()):
        parser.error(f"no GPU {max(gpus)}: this Python's torch sees {seen}, numbered from 0")


def need_folder(parser: argparse.ArgumentParser, file: Path | None) -> None:
    """End with a usage error where a file cannot be written for want of its folder."""
    if file and not file.parent.is_dir():
        parser.error(f"no folder {file.parent} for {file.name}: make it first")


def event_time(run: Callable[[], object], repeat: int) -> float:
    """Median microseconds of a call by events around it."""
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def graph_time(calls: list[Callable[[], object]], budget_us: float = 60_000) -> float:
    """Median microseconds per call of a graph that holds the calls in turn, GRAPH_US long at least."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = captured(calls)
    once = event_time(graph.replay, 3)
    rounds = math.ceil(GRAPH_US / max(once, 1))
    if rounds > 1:
        graph = captured(calls * rounds)
        once = event_time(graph.replay, 3)
    median = event_time(graph.replay, max(5, min(50, int(budget_us / max(once, 1)))))
    del graph
    return median / len(calls) / rounds


def copy_bandwidth() -> float:
    """Bytes per second that a device-to-device copy reads and writes."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    best = event_time(lambda: target.copy_(source), 9)
    return 2 * source.numel() * 4 / (best * 1e-6)


class SparseInputs:
    """One row of the table: a pool of rows, and lists enough that the L2 cache holds none of them.

    In a pool of 1 << 20 rows, 64 tokens' lists name an eighth of the rows: 6 % of the names are of a row
    that the same call reads already. In one of 1 << 23 rows it is 1 %.
    """

    def __init__(self, pool: torch.Tensor, heads: int, tokens: int) -> None:
        self.heads, self.tokens = heads, tokens
        self.cache = pool.view(-1, PAGE, WIDTH)
        rows = pool.shape[0]
        touched = tokens * TOPK * WIDTH * pool.element_size()
        self.sets = max(2, min(40, 200_000_000 // touched))
        shape = (self.sets, tokens, TOPK)
        self.indices = torch.randint(0, rows, shape, device="cuda", dtype=torch.int32)
        self.q = torch.randn(tokens, heads, WIDTH, device="cuda", dtype=pool.dtype)
        # As the MLA layer lays it out: [H, T, 512] transposed.
        self.q_nope = self.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        self.q_pe = self.q[..., 512:]
        # One request per token, whose table is a shuffle of the pool's pages.
        pages = rows // PAGE // 16
        self.table = torch.randint(
            0, rows // PAGE, (tokens, pages), device="cuda", dtype=torch.int32
        )
        self.local = torch.randint(0, pages * PAGE, shape, device="cuda", dtype=torch.int32)
        self.req_id = torch.arange(tokens, device="cuda", dtype=torch.int32)

    def floor_bytes(self) -> int:
        rows = self.tokens * TOPK * (WIDTH * 2 + 4)
        return rows + self.tokens * self.heads * (WIDTH + 512) * 2

    def ours_fp8(self, ops, packed: torch.Tensor, **kwargs) -> list[Callable[[], object]]:
        """The same lists over fp8_ds_mla rows, uint8 [rows, 656]."""
        cache = packed.view(-1, PAGE, packed.shape[1])
        kwargs |= {"req_id": self.req_id, "block_table": self.table}

        def bind(indices):
            return lambda: ops.sparse_mla_fp8_forward(
                self.q_nope, self.q_pe, cache, indices, SCALE, **kwargs
            )

        return [bind(self.local[i]) for i in range(self.sets)]

    def ours(self, ops, *, paged: bool = True, **kwargs) -> list[Callable[[], object]]:
        if paged:
            kwargs |= {"req_id": self.req_id, "block_table": self.table}
        lists = self.local if paged else self.indices

        def bind(indices):
            return lambda: ops.sparse_mla_forward(
                self.q_nope, self.q_pe, self.cache, indices, SCALE, **kwargs
            )

        return [bind(lists[i]) for i in range(self.sets)]
