"""How long it takes to try the series on a cached release, and to rebase it where nothing conflicts.

    python benchmarks/rebase.py [--json FILE] [--onto v0.23.0 ...]

Downloads and the import of each release are made first and not measured. The rebase without
conflicts runs with those patches dropped that conflict there: what is measured is the way, from the
start of Python to the series in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from builder.locations import default_cache

ROOT = Path(__file__).resolve().parent.parent
FROM = "v0.20.2"


class Bench:
    def __init__(self, folder: Path, repeat: int) -> None:
        self.project, self.repeat = folder / "project", repeat
        self.cache = folder / "cache"  # of its own, but for the downloads
        self.cache.mkdir()
        downloads = default_cache().downloads
        downloads.mkdir(parents=True, exist_ok=True)
        (self.cache / "downloads").symlink_to(downloads)
        for name in ("upstream", "patches"):
            shutil.copytree(ROOT / name, self.project / name)
        for other in (self.project / "patches").glob("v*"):
            if other.name != FROM:
                shutil.rmtree(other)
        self.rows: list[dict[str, object]] = []

    def run(self, *arguments):
        """Run once; return seconds, seconds of processor time with all children, and stdout."""
        began, used = time.perf_counter(), processor_seconds()
        process = subprocess.run(
            [sys.executable, "-m", "builder", "--project", str(self.project), *arguments],
            capture_output=True, text=True, check=False,
            env=os.environ | {"VLLM_GLM5_CACHE": str(self.cache)},
        )  # fmt: skip
        if process.returncode:
            raise SystemExit(f"{arguments}: {process.stderr}")
        return time.perf_counter() - began, processor_seconds() - used, process.stdout

    def row(self, what, runs, target):
        seconds, processor = (statistics.median(run[n] for run in runs) for n in (0, 1))
        megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        self.rows.append({"what": what, "seconds": round(seconds, 2), "target": target,
                          "processor_seconds": round(processor, 2), "peak_mb": round(megabytes)})  # fmt: skip
        print(f"{what:36} {seconds:6.2f} s, {processor:5.2f} s of a processor {megabytes:5.0f} MB   "
              f"{target}", flush=True)  # fmt: skip

    def release(self, tag):
        if not (self.project / "upstream" / f"{tag}.toml").exists():
            self.run("pin", tag)
        said = self.run("upstream", "--tag", FROM, "--onto", tag, "--json")[2]
        patches = json.loads(said)["releases"][0]["patches"]
        tried = [self.run("upstream", "--tag", FROM, "--onto", tag) for _ in range(self.repeat)]
        self.row(f"try {len(patches)} patches on {tag}", tried, "at most 3 s")
        applies = ("clean", "moved", "merged")
        number = [p["patch"].rpartition("/")[2][:4] for p in patches if p["state"] not in applies]
        drop = [word for n in number for word in ("--drop", n)]
        runs = []
        for _ in range(self.repeat):
            shutil.rmtree(self.project / "patches" / tag, ignore_errors=True)
            shutil.rmtree(self.cache / "series", ignore_errors=True)
            self.run("series", "--tag", FROM)
            runs.append(self.run("rebase", "--from", FROM, "--onto", tag, *drop))
        shutil.rmtree(self.project / "patches" / tag)
        self.row(f"rebase {len(patches) - len(number)} patches to {tag}", runs, "at most 5 s")


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--onto", action="append")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), options.repeat)
        for tag in options.onto or ["v0.21.0", "v0.23.0", "v0.33.0"]:
            bench.release(tag)
    if options.json:
        options.json.write_text(json.dumps(bench.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
