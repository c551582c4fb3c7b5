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
"measured" was measured, on an H200 ([below](#the-kernels-beside-upstreams-on-one-nvidia-h200)). **All other times of
the model are predictions**: no card of compute capability 12.x has been at hand. They are of the
attention kernel of one layer, of which GLM-5 has 78; what the experts, the indexer and the links between
cards take there, and so a server's tokens a second, nothing here predicts.

The model compiles each kernel for the card, reads its resources and instructions from the machine code,
and takes the largest of four limits: bytes over the copy bandwidth, instructions over the schedulers'
slots, multiplications over the tensor cores' rate, and the instructions of a warp one after another.
Its three constants are fitted to the nine measured times: a launch {launch:.1f} us, a load
{latency:.2f} us, {cycles:.1f} cycles from one instruction of a warp to its next. For an RTX PRO 6000 it
takes the same constants, 188 multiprocessors at 2.6 GHz, 1.59 TB/s (0.89 of the data sheet's 1.79, as
4.26 are of the H200's) and 1,024 operations of the tensor cores a cycle and multiprocessor.

The page needs `pip install -e '.[bench]'`; the run needs no GPU, but the release's torch and triton, and
scipy: `python -m builder edit --tag v0.20.2`, then with `VLLM_GLM5_TREE=vllm-v0.20.2` the command in
`benchmarks/sm120_model.py`.

![Predicted and measured times against the floor]({picture})
"""

FP8 = """
The fp8 cache moves 0.57 of the bytes, and converts each code twice, once for the scores and once for the
sum. The lower figure takes only bytes, slots and tensor cores for limits; the upper one lets conversions
wait for each other as the other instructions do. Longer than the bfloat16 cache takes (heads x tokens)
are the lower one {lower} and the upper one {upper}.
"""
RESOURCES = """\
From the machine code by Triton 3.6. On 12.0 `tests/kernels/test_compilation.py` allows no spill by
that one, and up to 16 bytes a thread by v0.33.0's Triton 3.8 above 16 heads.
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


def fp8_words(rows: list[dict]) -> str:
    """What the fp8 cache's two figures for an RTX PRO 6000 are, and where it does not pay."""
    plain, packed = (picked(rows, "RTX PRO 6000", cache) for cache in ("bfloat16", "fp8"))
    pairs = list(zip(plain, packed, strict=True))

    def above(key: str) -> str:
        slower = [
            shape(one)
            for one, other in pairs
            if other["microseconds"][key] > one["microseconds"]["time"]
        ]
        return f"at {', '.join(slower)}" if slower else "nowhere"

    return FP8.format(lower=above("least"), upper=above("time"))


def inside(rows: list[dict], measured: dict[str, float]) -> list[str]:
    """How many measured times of the fp8 cache lie between the two that are predicted."""
    if not measured:
        return []
    these = [row for row in picked(rows, "H200", "fp8") if shape(row) in measured]
    bounds = {shape(row): [row["microseconds"][key] for key in ("least", "time")] for row in these}
    between = sum(least <= measured[name] <= most for name, (least, most) in bounds.items())
    text = f"{between} of the {len(bounds)} measured times lie between the two."
    above = [measured[name] / most for name, (_, most) in bounds.items() if measured[name] > most]
    if above:
        text += f" {len(above)} lie above the upper one, by up to {max(above) - 1:.0%}."
    return ["", text, *beside(rows, measured)]


def beside(rows: list[dict], measured: dict[str, float]) -> list[str]:
    """What the fp8 cache was measured to take of the bfloat16 cache's time, by heads."""
    ratios: dict[int, list[float]] = {}
    for row in picked(rows, "H200", "bfloat16"):
        if shape(row) in measured and row.get("measured"):
            ratios.setdefault(row["heads"], []).append(measured[shape(row)] / row["measured"])
    spans = [f"at {heads} heads {min(own):.2f} to {max(own):.2f}" for heads, own in ratios.items()]
    if not spans:
        return []
    return [f"Times of the fp8 over the bfloat16 cache, both measured: {', '.join(spans)}."]


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


def draw(rows: list[dict], fp8: dict[str, float], path: Path) -> None:
    """`fp8`: what an H200 was measured to take from an fp8 cache, by shape."""
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
                # Where the two figures are the same the bar has no length.
                for ends in (least, most):
                    axis.plot(places, ends, "_", color=color, markersize=7, markeredgewidth=1.5)
            else:
                predicted = [time["time"] for time in times]
                axis.plot(places, predicted, "o", color=color, fillstyle="none", label=label)
            known = fp8 if (card, cache) == ("H200", "fp8") else {}
            real = [row.get("measured", known.get(shape(row))) for row in these]
            measured = [(x, y) for x, y in zip(places, real, strict=True) if y]
            if measured:
                mark = "x" if cache == "bfloat16" else "+"
                label = f"{cache}, measured"
                axis.plot(*zip(*measured, strict=True), mark, color="black", label=label)
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
            picture=PICTURE,
            launch=fitted["launch"] * 1e6,
            latency=fitted["latency"] * 1e6,
            cycles=fitted["cycles"],
        ),
        "## How well it says what an H200 takes (bfloat16 cache)\n",
        *check_table(rows),
        "\n## What it predicts for an RTX PRO 6000\n",
        *prediction_table(rows, "RTX PRO 6000"),
        fp8_words(rows),
        "## What it predicts for an H200 with the fp8 cache\n",
        "FLASHMLA_SPARSE serves bfloat16 models there; this is for float16, and for batch invariance.\n",
        *prediction_table(rows, "H200", fp8),
        *inside(rows, fp8),
        "\n## Resources\n",
        RESOURCES,
        *resource_table(rows),
    ]
    return "\n".join(parts) + "\n" + more


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="JSON of benchmarks/sm120_model.py")
    parser.add_argument("--kernels", type=Path, help="JSON of benchmarks/sparse_mla.py")
    parser.add_argument("--engine", type=Path, help="JSON of benchmarks/engine.py")
    args = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "performance"  # the same run gives the same file
    stored = json.loads(args.run.read_text())
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
    draw(stored["rows"], fp8, DOCS / PICTURE)
    text = DOCS / "performance.md"
    text.write_text(page(command, stored, fp8, more))
    print(f"written {text} and its pictures")


if __name__ == "__main__":
    main()
