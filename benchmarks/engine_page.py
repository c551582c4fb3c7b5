"""The whole engine's part of docs/performance.md: tables and pictures from stored runs of engine.py.

A decode step's floor is what it must read, over the copy bandwidth of the same run: every dense weight
once, the experts of one request (random weights may send all to the same), and for each request and
layer the rows that attention gathers (1,152 bytes each, at most index_topk) and the indexer's keys (132
bytes a token).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

import kernels_page
from engine import CONFIG, PARTS
from gguf_model import shapes

ROW_BYTES, KEY_BYTES = 1152, 132
SPEED, SHARES = "performance-engine.svg", "performance-layer.svg"
ORDER = [*PARTS, "rest"]
HEAD = """\
## The whole engine on one {device}

A model with GLM-5's own layers, one dense and two of 256 experts, random weights in bfloat16, torch
{torch}, triton {triton}: TRITON_MLA_SPARSE with its own indexer beside FLASHMLA_SPARSE with DeepGEMM,
{place}, CUDA graphs, every request prefilled for real. The floor is what a
step must read, at the least, at the {copy:,.0f} GB/s that a copy reached in the same run; "kernels" is the
GPU's time of one step, by a trace. Written from {run}, a run of
`benchmarks/engine.py --trace`.
{notes}

![Time of a decode step against the floor]({speed})

![What a layer takes, by part]({shares})
"""


def floor_ms(batch: int, context: int, bandwidth: float) -> float:
    """Milliseconds that the bytes of a decode step take, at so many bytes a second."""
    hit = CONFIG["num_experts_per_tok"] / CONFIG["n_routed_experts"]
    total = 0.0
    for name, (shape, _) in shapes(CONFIG).items():
        share = hit if "_exps" in name else 0.0 if name == "token_embd.weight" else 1.0
        total += share * 2 * math.prod(shape)
    rows = min(context, CONFIG["index_topk"]) * ROW_BYTES + context * KEY_BYTES
    total += CONFIG["num_hidden_layers"] * batch * rows
    return total / bandwidth * 1e3


def measured(cells: list[dict], backend: str, context: int) -> list[dict]:
    return [
        row
        for row in cells
        if (row["backend"], row["context"]) == (backend, context) and "left_out" not in row
    ]


def kernels_ms(row: dict) -> str:
    """Milliseconds of all kernels of the traced step; a dash for a run without --trace."""
    parts = row.get("kernels_us", {})
    return f"{sum(parts.get(part, 0.0) for part in ORDER) / 1e3:.2f}" if parts else "-"


def table(cells: list[dict], bandwidth: float) -> list[str]:
    heads = ["context", "batch", "floor, ms a step"]
    backends = list(dict.fromkeys(row["backend"] for row in cells))
    for backend in backends:
        heads += [f"{backend}, ms a step", "kernels, ms", "tokens/s", "first token of all, s"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in cells):
        floor = floor_ms(batch, context, bandwidth)
        values = [f"{context:,}", str(batch), f"{floor:.2f}"]
        for backend in backends:
            own = [row for row in measured(cells, backend, context) if row["batch"] == batch]
            values += (
                [
                    f"{own[0]['decode_step_ms']:.2f}",
                    kernels_ms(own[0]),
                    f"{own[0]['decode_tokens_per_s']:,.0f}",
                    f"{own[0]['first_token_of_all_s']:.2f}",
                ]
                if own
                else ["left out", "", "", ""]
            )
        lines.append(f"| {' | '.join(values)} |")
    return lines


def draw_speed(cells: list[dict], bandwidth: float, path: Path) -> None:
    contexts = sorted({row["context"] for row in cells})
    figure, axes = plt.subplots(1, len(contexts), figsize=(11, 4.2), sharey=True, squeeze=False)
    for axis, context in zip(axes[0], contexts, strict=True):
        batches = sorted({row["batch"] for row in cells if row["context"] == context})
        floors = [floor_ms(batch, context, bandwidth) for batch in batches]
        axis.plot(batches, floors, "--", color="black", linewidth=1, label="floor (bytes)")
        for backend, mark in (("TRITON_MLA_SPARSE", "o-"), ("FLASHMLA_SPARSE", "x-")):
            own = measured(cells, backend, context)
            times = [row["decode_step_ms"] for row in own]
            axis.plot([row["batch"] for row in own], times, mark, label=backend)
        kernels_page.label(axis, batches, "requests", f"context {context:,}")
    axes[0][0].set_ylabel("milliseconds a decode step")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw_shares(cells: list[dict], path: Path) -> None:
    """Bars of GPU time a layer, by part; the head's share is in 'rest' and dense matrices."""
    traced = [row for row in cells if row.get("kernels_us")]
    layers = CONFIG["num_hidden_layers"]
    figure, axis = plt.subplots(figsize=(11, 0.32 * len(traced) + 1.6))
    traced.sort(key=lambda row: (row["context"], row["batch"], row["backend"]), reverse=True)
    names = [
        f"{row['backend'].removesuffix('_SPARSE')}, {row['batch']} x {row['context']:,}"
        for row in traced
    ]
    left = [0.0] * len(traced)
    for part in ORDER:
        widths = [row["kernels_us"].get(part, 0.0) / layers for row in traced]
        axis.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("microseconds of kernels a layer, one decode step")
    axis.legend(
        fontsize=8, ncols=len(ORDER), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def section(run: str, stored: dict, folder: Path) -> str:
    """Draw the pictures into the folder; return the Markdown that shows them."""
    card, cells = stored["card"], stored["cells"]
    bandwidth = card["copy_bytes_per_s"]
    draw_speed(cells, bandwidth, folder / SPEED)
    draw_shares(cells, folder / SHARES)
    # What whoever stored the run has to say of it.
    notes = "".join(f"\n{note}" for note in stored.get("notes", []))
    at_once = stored.get("at_once", 1) > 1
    place = "at the same time, each on a card of its own" if at_once else "one after the other"
    names = {"speed": SPEED, "shares": SHARES, "notes": notes, "place": place}
    head = HEAD.format(run=run, copy=bandwidth / 1e9, **names, **card)
    return "\n".join([head, *table(cells, bandwidth)]) + "\n"
