"""A model of the sparse MLA kernels' time, from their machine code, for a card that is not there.

    VLLM_GLM5_TREE=<patched tree> python benchmarks/sm120_model.py --measured KERNELS.json --json FILE

Compiles each shape for 9.0 and 12.0 (no GPU is needed, but torch, triton and scipy), reads registers,
shared memory and instructions from the machine code, and predicts the time as the largest of

    bytes     rows, lists, queries and results over the copy bandwidth
    issue     instructions over the schedulers' slots
    tensor    multiplications over the tensor cores' rate
    serial    instructions of one warp after another, as many warps side by side as fit

plus a launch for each kernel and the loads that wait for each other. Three constants (a launch, a
load's latency, cycles from an instruction to the next of its warp) are fitted to what an H200 was
measured to take (KERNELS.json, a run of sparse_mla.py of the same tree); the same constants then
predict an RTX PRO 6000. Nothing of that card's column was measured. Conversions of e4m3 depend on each
other less than the instructions that the constants were fitted to, so "serial" is about the most that the
fp8 kernel should take (of nine times measured on an H200 two were longer, by up to 8 %).
"""

# ruff: noqa: PLC0415
from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "kernels"))

TOPK = 2048
SHAPES = [(8, 1), (8, 16), (8, 64), (8, 256), (8, 2048), (64, 1), (64, 16), (64, 64), (64, 2048)]
ROW_BYTES = {"bfloat16": 1152, "fp8": 656}


@dataclass(frozen=True)
class Card:
    """What the model knows of a card.

    bandwidth is bytes/s that a copy reaches; clock in Hz; tensor is floating-point operations of
    16-bit types a cycle and multiprocessor: warp-wide and warpgroup-wide instructions.
    """

    name: str
    capability: int
    multiprocessors: int
    clock: float
    bandwidth: float
    tensor: tuple[float, float]
    shared: int  # bytes a multiprocessor
    warps: int  # that a multiprocessor can hold


# H200: bandwidth measured; 989 dense TFLOP/s by warpgroup instructions are 4,096 a cycle, of which
# warp instructions reach about 62 % on Hopper (Luo et al., arXiv:2402.13499).
H200 = Card("H200", 90, 132, 1.83e9, 4.26e12, (2540, 4096), 228 << 10, 64)
# RTX PRO 6000: 1.79 TB/s by its data sheet, of which the H200 reaches 0.89 of its own; 503.8 dense
# TFLOP/s of 16-bit types with float32 sums (RTX Blackwell PRO architecture paper) are 1,024 a cycle.
RTX_PRO_6000 = Card("RTX PRO 6000", 120, 188, 2.6e9, 0.89 * 1.79e12, (1024, 1024), 100 << 10, 48)


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: its resources, and the instructions of its loop and around it."""

    warps: int
    registers: int
    shared: int
    loop: dict[str, int]
    around: int
    loop_flops: float
    warpgroup: bool

    @property
    def loop_length(self) -> int:
        return sum(self.loop.values())

    def occupancy(self, card: Card) -> int:
        """Programs of this kernel on one multiprocessor."""
        registers = 256 * math.ceil(self.registers * 32 / 256) * self.warps
        by_registers = (64 << 10) // registers
        by_shared = card.shared // (self.shared + 1024)
        return max(1, min(by_registers, by_shared, card.warps // self.warps))


@dataclass(frozen=True)
class Work:
    """A launch: programs, steps of each, bytes that have to move, kernels one after another."""

    programs: int
    steps: int
    bytes: float
    kernels: int


def instructions(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """(mnemonics in order, {label: index of its first instruction}) by the bundled nvdisasm."""
    from aot import said_of

    text = said_of(cubin, "nvdisasm", "-c")
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(found)
        code = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?);", line)
        if code:
            found.append(code[1].strip())
    return found, labels


def longest_loop(found: list[str], labels: dict[str, int]) -> tuple[int, int]:
    """(first, last) instruction of the longest body that a branch leads back to."""
    best = (0, -1)
    for last, code in enumerate(found):
        target = re.search(r"\.L_x_\d+", code) if code.startswith("BRA") else None
        first = labels.get(target[0], last) if target else last
        if first < last and last - first > best[1] - best[0]:
            best = (first, last)
    return best


def flops(code: str) -> float:
    """Operations of one warp's tensor core instruction."""
    warp = re.match(r"HMMA\.(\d{2})(\d)(\d+)", code)
    if warp:
        return 2.0 * math.prod(map(int, warp.groups()))
    group = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", code)
    return 2.0 * math.prod(map(int, group.groups())) / 4 if group else 0.0


def kernel_of(compiled: Any) -> Kernel:
    from aot import resource_usage

    cubin = compiled.asm["cubin"]
    found, labels = instructions(cubin)
    first, last = longest_loop(found, labels)
    body = found[first : last + 1]
    mix = Counter(re.split(r"[. ]", code)[0] for code in body if not code.startswith("NOP"))
    around = sum(not code.startswith("NOP") for code in found) - sum(mix.values())
    return Kernel(
        compiled.metadata.num_warps,
        resource_usage(cubin)[0],
        compiled.metadata.shared,
        dict(mix.most_common()),
        around,
        sum(map(flops, body)),
        any(code.startswith("HGMMA") for code in body),
    )


def compile_shape(ops: Any, card: Card, cache: str, heads: int, tokens: int) -> tuple[Kernel, Work]:
    """The attention kernel that this card gets for this shape, and what it is launched for."""
    import aot

    fp8 = cache == "fp8"
    select = ops.select_fp8_config if fp8 else ops.select_config
    config = select(card.capability, heads, tokens)
    splits = ops.select_splits(config, heads, tokens, TOPK, card.multiprocessors)
    splits, length = ops._split(TOPK, splits, config)  # noqa: SLF001
    ops._device_properties = lambda _: (card.capability, card.multiprocessors)  # noqa: SLF001
    job = {"dtype": "bfloat16", "heads": heads, "tokens": tokens, "rope": 64, "paged": True}
    with aot.compiling_for(card.capability) as compiled:
        (aot.sparse_mla_fp8 if fp8 else aot.sparse_mla)(ops, job | {"splits": splits})
    blocks = math.ceil(heads / config.block_h)
    rows = tokens * TOPK * (ROW_BYTES[cache] + 4)
    work = Work(
        programs=tokens * splits * blocks,
        steps=math.ceil(length / config.block_n),
        bytes=rows + tokens * heads * (576 + 512) * 2,
        kernels=len(compiled),
    )
    return kernel_of(compiled[0][1]), work


@dataclass(frozen=True)
class Constants:
    """Fitted: seconds of a launch and of a load, cycles from a warp's instruction to its next."""

    launch: float
    latency: float
    cycles: float


def predict(card: Card, kernel: Kernel, work: Work, constants: Constants) -> dict[str, float]:
    """Seconds by each limit, the prediction, and "least", the prediction without "serial"."""
    side_by_side = kernel.occupancy(card)
    busy = min(card.multiprocessors, work.programs)
    waves = math.ceil(work.programs / (card.multiprocessors * side_by_side))
    one = kernel.around + work.steps * kernel.loop_length
    operations = work.programs * work.steps * kernel.loop_flops * kernel.warps
    tensor = card.tensor[kernel.warpgroup]
    limits = {
        "bytes": work.bytes / card.bandwidth,
        "issue": work.programs * kernel.warps * one / (4 * busy * card.clock),
        "tensor": operations / (tensor * busy * card.clock),
        "serial": waves * one * constants.cycles / card.clock,
    }
    # A list entry, its block and its row: three loads that wait for each other.
    fixed = work.kernels * constants.launch + 3 * constants.latency
    floor = max(limits["bytes"], limits["issue"], limits["tensor"])
    return limits | {"fixed": fixed, "least": fixed + floor, "time": fixed + max(limits.values())}


def measured(path: Path) -> dict[tuple[int, int], float]:
    """{(heads, tokens): microseconds on an H200} of a stored run of sparse_mla.py."""
    rows = json.loads(path.read_text())["sparse_mla"]
    return {(row["heads"], row["tokens"]): row["ours"] for row in rows if row["ours"]}


def fit(rows: list[tuple[Kernel, Work, float]]) -> Constants:
    """The constants whose predictions come nearest to the measured seconds, by their logarithm."""
    from scipy.optimize import differential_evolution

    def distance(x: Any) -> float:
        constants = Constants(*x)
        return sum(
            math.log(predict(H200, kernel, work, constants)["time"] / seconds) ** 2
            for kernel, work, seconds in rows
        )

    bounds = [(0.5e-6, 5e-6), (0.3e-6, 1.5e-6), (1.0, 20.0)]
    return Constants(*map(float, differential_evolution(distance, bounds, seed=0).x))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", type=Path, required=True, help="JSON of sparse_mla.py")
    parser.add_argument("--json", type=Path, required=True, help="write the run to this file")
    args = parser.parse_args()
    if not os.environ.get("VLLM_GLM5_TREE"):
        parser.error("VLLM_GLM5_TREE must name a patched tree")
    times = measured(args.measured)
    lacking = [f"{heads} x {tokens}" for heads, tokens in SHAPES if (heads, tokens) not in times]
    if lacking:
        parser.error(f"{args.measured} has no time of {', '.join(lacking)}")
    from loading import load_op

    tree = Path(os.environ["VLLM_GLM5_TREE"])
    modules = {
        "bfloat16": load_op(tree, "triton_sparse_mla"),
        "fp8": load_op(tree, "triton_sparse_mla_fp8"),
    }
    compiled = {
        (card.name, cache, heads, tokens): compile_shape(ops, card, cache, heads, tokens)
        for card in (H200, RTX_PRO_6000)
        for cache, ops in modules.items()
        for heads, tokens in SHAPES
    }
    known = [(*compiled[H200.name, "bfloat16", *shape], times[shape] * 1e-6) for shape in SHAPES]
    constants = fit(known)
    rows = []
    for (name, cache, heads, tokens), (kernel, work) in compiled.items():
        card = H200 if name == H200.name else RTX_PRO_6000
        limits = predict(card, kernel, work, constants)
        row = {"card": name, "cache": cache, "heads": heads, "tokens": tokens}
        row |= {"microseconds": {key: round(value * 1e6, 2) for key, value in limits.items()}}
        if name == H200.name and cache == "bfloat16":
            row["measured"] = round(times[heads, tokens], 1)
        row |= {"work": asdict(work), "kernel": asdict(kernel), "occupancy": kernel.occupancy(card)}
        rows.append(row)
        print({key: row[key] for key in row if key not in ("kernel", "work")}, flush=True)
    result = {
        "cards": [asdict(H200), asdict(RTX_PRO_6000)],
        "constants": asdict(constants),
        "measured": args.measured.name,
        "rows": rows,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
