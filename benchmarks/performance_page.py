"""Writes docs/performance.md and its pictures from stored runs.

    pip install -e '.[bench]'
    python benchmarks/performance_page.py docs/reports/MODEL.json \\
        [--kernels docs/reports/KERNELS.json] [--engine docs/reports/ENGINE.json]

MODEL.json is a run of sm120_model.py, KERNELS.json one of sparse_mla.py, ENGINE.json one of engine.py.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import engine_page
import kernels_page
import matplotlib as mpl
from kernels_page import number
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PICTURE = "performance-sm120.svg"
HEAD = """\
# What the kernels take, and what a model predicts for SM120

Written by `python benchmarks/performance_page.py {command}`
from a stored run of `benchmarks/sm120_model.py`; times in microseconds, top-k 2048. Only what is called
"measured" was measured, on an H200 ({how}). **All other times of
the model are predictions**: no card of compute capability 12.x has been at hand.

The model compiles each kernel for the card, reads its resources and instructions from the machine code,
and takes the largest of four limits: bytes over the copy bandwidth, instructions over the schedulers'
slots, multiplications over the tensor cores' rate, and the instructions of a warp one after another.
Its three constants are fitted to the nine measured times: a launch {launch:.1f} us, a load
{latency:.2f} us, {cycles:.1f} cycles from one instruction of a warp to its next. For an RTX PRO 6000 it
takes the same constants, 188 multiprocessors at 2.6 GHz, 1.59 TB/s (0.89 of the data sheet's 1.79, as
on the H200) and 1,024 operations of the tensor cores a cycle and multiprocessor.

![Predicted and measured times against the floor]({picture})
"""

# Of a run that was fitted to a stored run of the kernels; and of the one before there was any.
HOW = "[below](#the-kernels-beside-upstreams-on-one-nvidia-h200)"
HOW_BEFORE = "[how](reports/2026-11-29-sparse-mla-speed.md)"
FP8 = """
The fp8 cache moves 0.57 of the bytes, and converts each code twice, once for the scores and once for the
sum. The lower figure takes only bytes, slots and tensor cores for limits; the upper one lets conversions
wait for each other as the other instructions do, which they need not. Up to 16 heads a GPU (tensor
parallelism of 4 or 8) both are at or below the time of the bfloat16 cache from 16 tokens on; with more
heads, prefill may be slower than from a bfloat16 cache.
"""


def shape(row: dict) -> str:
    return f"{row['heads']} x {row['tokens']}"


def limit_of(row: dict) -> str:
    times = row["microseconds"]
    return max(("bytes", "issue", "tensor", "serial"), key=times.__getitem__)


def picked(rows: list[dict], card: str, cache: str) -> list[dict]:
    return [row for row in rows if (row["card"], row["cache"]) == (card, cache)]


def check_table(rows: list[dict]) -> list[str]:
    """How well the model says what an H200 was measured to take."""
    lines = [
        "| heads x tokens | floor (bytes) | predicted | measured | predicted / measured | limit |"
    ]
    lines.append("| --- " * 6 + "|")
    ratios = []
    for row in picked(rows, "H200", "bfloat16"):
        times, real = row["microseconds"], row["measured"]
        ratios.append(times["time"] / real)
        cells = [shape(row), number(times["bytes"]), number(times["time"]), number(real)]
        lines.append(f"| {' | '.join(cells)} | {ratios[-1]:.2f} | {limit_of(row)} |")
    spread = math.exp(math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios))) - 1
    worst = max(*ratios, 1 / min(ratios)) - 1
    lines.append("")
    lines.append(
        f"Off by {spread:.0%} in the mean (root of the squared logarithms), {worst:.0%} at worst: "
        "read the predictions below with that width."
    )
    return lines


def prediction_table(
    rows: list[dict], card: str, measured: dict[str, float] | None = None
) -> list[str]:
    """What the model says of both caches; `measured`: of the fp8 cache, by shape."""
    heads = ["heads x tokens", "bfloat16: floor (bytes)", "predicted", "limit"]
    heads += ["fp8: floor (bytes)", "predicted, between", "limit"]
    heads += ["measured"] if measured else []
    lines = [f"| {' | '.join(heads)} |"]
    lines.append("| --- " * len(heads) + "|")
    pairs = zip(picked(rows, card, "bfloat16"), picked(rows, card, "fp8"), strict=True)
    for plain, packed in pairs:
        a, b = plain["microseconds"], packed["microseconds"]
        lines.append(
            f"| {shape(plain)} | {number(a['bytes'])} | {number(a['time'])} | {limit_of(plain)} "
            f"| {number(b['bytes'])} | {number(b['least'])} and {number(b['time'])} "
            f"| {limit_of(packed)} |"
            + (f" {number(measured.get(shape(plain)))} |" if measured else "")
        )
    return lines


def inside(rows: list[dict], measured: dict[str, float]) -> list[str]:
    """How many measured times of the fp8 cache lie between the two that are predicted."""
    if not measured:
        return []
    these = [row for row in picked(rows, "H200", "fp8") if shape(row) in measured]
    bounds = {shape(row): [row["microseconds"][key] for key in ("least", "time")] for row in these}
    between = sum(least <= measured[name] <= most for name, (least, most) in bounds.items())
    return [f"\n{between} of the {len(bounds)} measured times lie between the two."]


def resource_table(rows: list[dict]) -> list[str]:
    """Each compiled kernel once, with the instructions of a step of its loop."""
    heads = ["card", "cache", "heads x tokens", "warps", "registers", "shared bytes"]
    heads += ["programs on an SM", "instructions a step", "of them"]
    lines = [f"| {' | '.join(heads)} |"]
    lines.append("| --- " * 9 + "|")
    seen = set()
    for row in rows:
        kernel = row["kernel"]
        key = json.dumps([row["card"], row["cache"], kernel])
        if key in seen:
            continue
        seen.add(key)
        names = ("HMMA", "HGMMA", "LDGSTS", "LDSM", "F2FP", "HADD2", "PRMT", "BAR")
        mix = ", ".join(f"{kernel['loop'][n]} {n}" for n in names if n in kernel["loop"])
        cells = [row["card"], row["cache"], shape(row), kernel["warps"], kernel["registers"]]
        cells += [f"{kernel['shared']:,}", row["occupancy"], sum(kernel["loop"].values()), mix]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def draw(rows: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for axis, card in zip(axes, ("H200", "RTX PRO 6000"), strict=True):
        for cache, color in (("bfloat16", "tab:blue"), ("fp8", "tab:orange")):
            these = picked(rows, card, cache)
            times = [row["microseconds"] for row in these]
            shift = 0.0 if cache == "bfloat16" else 0.25
            places = [i + shift for i in range(len(these))]
            label = f"{cache}, floor (bytes)"
            for heads in sorted({row["heads"] for row in these}):
                own = [i for i, row in enumerate(these) if row["heads"] == heads]
                floors = [times[i]["bytes"] for i in own]
                line = {"color": color, "linewidth": 1, "label": label}
                axis.plot([places[i] for i in own], floors, "--", **line)
                label = "_"  # one entry in the legend
            label = f"{cache}, predicted"
            if cache == "fp8":
                least, most = ([time[key] for time in times] for key in ("least", "time"))
                axis.vlines(places, least, most, color=color, linewidth=5, alpha=0.6, label=label)
            else:
                predicted = [time["time"] for time in times]
                axis.plot(places, predicted, "o", color=color, fillstyle="none", label=label)
            measured = [(i, row["measured"]) for i, row in enumerate(these) if "measured" in row]
            if measured:
                label = f"{cache}, measured"
                axis.plot(*zip(*measured, strict=True), "x", color="black", label=label)
            names = [shape(row) for row in these]
            axis.set_xticks(range(len(these)), names, rotation=45, ha="right")
        axis.set_yscale("log")
        axis.set_title(f"{card}{'' if card == 'H200' else ' (predictions)'}")
        axis.set_xlabel("heads x tokens")
        axis.grid(visible=True, which="major", axis="y", alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("microseconds")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def page(command: str, stored: dict, fp8: dict[str, float], more: str) -> str:
    rows, fitted = stored["rows"], stored["constants"]
    parts = [
        HEAD.format(
            command=command,
            how=HOW if "measured" in stored else HOW_BEFORE,
            picture=PICTURE,
            launch=fitted["launch"] * 1e6,
            latency=fitted["latency"] * 1e6,
            cycles=fitted["cycles"],
        ),
        "## How well it says what an H200 takes (bfloat16 cache)\n",
        *check_table(rows),
        "\n## What it predicts for an RTX PRO 6000\n",
        *prediction_table(rows, "RTX PRO 6000"),
        FP8,
        "## What it predicts for an H200 with the fp8 cache\n",
        "FLASHMLA_SPARSE serves bfloat16 models there; this is for float16, and for batch invariance.\n",
        *prediction_table(rows, "H200", fp8),
        *inside(rows, fp8),
        "\n## Resources\n",
        "From the machine code; no kernel spills on 12.0.\n",
        *resource_table(rows),
    ]
    return "\n".join(parts) + "\n" + more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="JSON of benchmarks/sm120_model.py")
    parser.add_argument("--kernels", type=Path, help="JSON of benchmarks/sparse_mla.py")
    parser.add_argument("--engine", type=Path, help="JSON of benchmarks/engine.py")
    args = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "performance"  # the same run gives the same file
    stored = json.loads(args.run.read_text())
    draw(stored["rows"], DOCS / PICTURE)
    command, more, fp8 = f"docs/reports/{args.run.name}", "", {}
    for option, part in (("kernels", kernels_page), ("engine", engine_page)):
        if file := getattr(args, option):
            command += f" \\\n--{option} docs/reports/{file.name}"
            run = json.loads(file.read_text())
            more += "\n" + part.section(f"`docs/reports/{file.name}`", run, DOCS)
            if option == "kernels":
                fp8 = {
                    shape(row): row["ours_fp8"] for row in run["sparse_mla"] if row.get("ours_fp8")
                }
    (DOCS / "performance.md").write_text(page(command, stored, fp8, more))


if __name__ == "__main__":
    main()
