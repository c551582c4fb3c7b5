"""The kernels' part of docs/performance.md: a table and a picture from a stored run of sparse_mla.py."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

PICTURE = "performance-kernels.svg"
# The run's key, what the page calls it, and how it is drawn.
KERNELS = {
    "flashmla": ("FLASHMLA_SPARSE, padded to 64 heads", "s"),
    "in_tree": ("upstream's Triton kernel for XPU", "^"),
    "ours_converted": ("ours, indices converted before", "+"),
    "ours_invariant": ("ours, batch invariant", "d"),
    "ours": ("ours", "o"),
    "ours_far": ("ours, pool of 9.7 GB", "."),
    "ours_fp8": ("ours, fp8_ds_mla", "x"),
}
HEAD = """\
## The kernels beside upstream's on one {device}

Medians of replays of CUDA graphs of 2 ms or more in one process, top-k 2048, random indices into a pool
of 1.2 GB, in microseconds; the floor is the bytes at the {copy:,.0f} GB/s that a copy reached in the same
run. Written from {run}, a run of `benchmarks/sparse_mla.py`.

![Times of the attention kernels against the floor]({picture})
"""
BELOW = """
The floor counts a row each time that it is named. The lists of 2,048 tokens name each row of the pool of
1.2 GB four times, some of these while the L2 cache may hold it still: a time can be below the floor.
"""


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def attention_table(rows: list[dict]) -> list[str]:
    present = [key for key in KERNELS if any(row.get(key) for row in rows)]
    heads = ["heads x tokens", "floor", *(KERNELS[key][0] for key in present), "floor / ours"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows:
        values = [number(row["floor"]), *(number(row.get(key)) for key in present)]
        share = f"{row['floor'] / row['ours']:.0%}" if row.get("ours") else "-"
        lines.append(f"| {row['heads']} x {row['tokens']} | {' | '.join(values)} | {share} |")
    return lines


def indexer_table(rows: list[dict]) -> list[str]:
    lines = ["| indexer | requests x keys | DeepGEMM | ours | ours / DeepGEMM |"]
    lines.append("| --- " * 5 + "|")
    for row in rows:
        both = row.get("ours") and row.get("deep_gemm")
        ratio = f"{row['ours'] / row['deep_gemm']:.2f}" if both else "-"
        cells = [row["what"], row["shape"], number(row.get("deep_gemm")), number(row.get("ours"))]
        lines.append(f"| {' | '.join(cells)} | {ratio} |")
    return lines


def label(axis: Axes, values: list[int], what: str, title: str) -> None:
    """Both axes by their logarithm, with these values of x named."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(values, values)
    axis.set_xlabel(what)
    axis.set_title(title)
    axis.grid(visible=True, which="major", axis="y", alpha=0.3)


def draw(rows: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    for axis, heads in zip(axes, sorted({row["heads"] for row in rows}), strict=True):
        own = [row for row in rows if row["heads"] == heads]
        tokens = [row["tokens"] for row in own]
        axis.plot(tokens, [row["floor"] for row in own], "--", color="black", label="floor (bytes)")
        for key, (name, mark) in KERNELS.items():
            seen = [(row["tokens"], row[key]) for row in own if row.get(key)]
            if seen:
                axis.plot(*zip(*seen, strict=True), f"{mark}-", linewidth=1, label=name)
        label(axis, tokens, "tokens", f"{heads} heads")
    axes[0].set_ylabel("microseconds")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def section(run: str, stored: dict, folder: Path) -> str:
    """Draw the picture into the folder; return the Markdown that shows it."""
    draw(stored["sparse_mla"], folder / PICTURE)
    copy = stored["copy_bytes_per_s"] / 1e9
    head = HEAD.format(run=run, copy=copy, picture=PICTURE, device=stored["device"])
    rows = stored["sparse_mla"]
    below = any((row.get(key) or math.inf) < row["floor"] for row in rows for key in KERNELS)
    words = [BELOW] if below else [""]
    tables = [*attention_table(rows), *words, *indexer_table(stored["indexer"])]
    return "\n".join([head, *tables]) + "\n"
