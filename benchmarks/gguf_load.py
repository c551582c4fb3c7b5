"""How fast a GGUF file loads from a cold cache, and what each rank of it reads.

    python benchmarks/gguf_load.py FOLDER [--gib 4] [--json FILE]

Needs a GPU and an environment with the built wheel. Makes a file of GLM-5's dimensions in FOLDER (few
layers and experts), drops it from the page cache, reads it with large plain reads, drops it again and
loads it as a worker does. Target: at least 70 % of the rate of the plain read, growth of anonymous
memory at most twice the largest slice.

A rank of TP=8 asks for half of the file, not an eighth: the cut through `ffn_down_exps` goes through
its rows, and leaves 144 bytes in every 1,152, less than a page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig
from vllm.model_executor.model_loader.gguf_mla.plan import LoadPlan
from vllm.model_executor.model_loader.gguf_mla.weights import needed_ranges
from vllm.transformers_utils.gguf_file import GGUFSet

SUITE = Path(__file__).resolve().parent.parent / "tests" / "gpu"


def rank_bytes(path: Path, config_folder: Path) -> dict[int, float]:
    """GiB that one rank asks for, by tensor parallel size."""
    files, config = GGUFSet.of(path), AutoConfig.from_pretrained(config_folder)
    out = {}
    for size in (1, 2, 4, 8):
        plan = LoadPlan(files, config, tp_size=size)
        ranges = [needed_ranges(plan, slot, 0, size) for slot in plan.slots.values()]
        out[size] = sum(length for each in ranges for _, length in each) / 2**30
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    out = options.folder / "figures.json"
    subprocess.run(
        [sys.executable, SUITE / "gguf_load_rate.py", options.folder, out, "--gib",
         str(options.gib)], check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    figures = json.loads(out.read_text())
    ranks = rank_bytes(options.folder / "rate.gguf", options.folder)
    rows = {
        "file, GiB": figures["gib"],
        "plain read, s": figures["sequential_s"],
        "load, s": figures["load_s"],
        "share of the plain read's rate (at least 0.70)": figures["share_of_sequential_rate"],
        "read by the process while loading, GiB": figures["load_read_gib"],
        "growth of anonymous memory, MiB": figures["anonymous_growth_mib"],
        **{f"asked for by one rank of TP={size}, GiB": value for size, value in ranks.items()},
    }
    for name, value in rows.items():
        print(f"{name:50} {value:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
