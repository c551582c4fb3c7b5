"""How long a build takes and how much memory it needs, beside what it competes with.

    python benchmarks/build.py [--json FILE]

Downloads are made first and not measured. Everything runs in one session, each figure the median
of --repeat runs; the comparisons (wheel unpack + pack, upstream's own setup.py) run beside ours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def measured(command, env, cwd):
    """Run once; return seconds and the largest process's resident megabytes."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        said = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{said}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def median(command, env, cwd, repeat, before=lambda: None):
    runs = []
    for _ in range(repeat):
        before()
        runs.append(measured(command, env, cwd))
    return statistics.median(r[0] for r in runs), max(r[1] for r in runs)


class Bench:
    def __init__(self, folder: Path, repeat: int) -> None:
        self.folder, self.repeat = folder, repeat
        self.cache = folder / "cache"
        self.env = os.environ | {"VLLM_GLM5_CACHE": str(self.cache)}
        self.rows: list[dict[str, object]] = []

    def builder(self, *arguments):
        return [sys.executable, "-m", "builder", *arguments]

    def row(self, name, seconds, megabytes, target=""):
        self.rows.append({"what": name, "seconds": round(seconds, 2), "peak_mb": round(megabytes),
                          "target": target})  # fmt: skip
        print(f"{name:58} {seconds:8.2f} s {megabytes:7.0f} MB   {target}", flush=True)

    def forget(self, *names):
        for name in names:
            shutil.rmtree(self.cache / name, ignore_errors=True)
        shutil.rmtree(self.folder / "dist", ignore_errors=True)

    def release(self, tag, project, label):
        build = self.builder("--project", str(project), "--tag", tag, "--out", "dist")
        measured(build, self.env, self.folder)  # downloads
        everything = ("vllm.git", "wheels", "audits", "series", "work")
        seconds, mb = median(build, self.env, self.folder, self.repeat,
                             lambda: self.forget(*everything))  # fmt: skip
        self.row(f"{label}: whole first build, downloads cached", seconds, mb,
                 "at most 12 s, 200 MB" if tag == "v0.20.2" else "at most 200 MB")  # fmt: skip
        seconds, mb = median(build, self.env, self.folder, self.repeat)
        self.row(f"{label}: unchanged second run", seconds, mb, "at most 1.5 s")

    def wheel_alone(self, tag):
        """The repack itself against `wheel unpack` + `wheel pack` of the official wheel."""
        script = (
            "import sys\n"
            "from pathlib import Path\n"
            "from builder import pipeline, provenance, classify, fetch, repack, wheel_name\n"
            "from builder.locations import default_cache, default_project\n"
            f"pin, series, applied = pipeline.applied_series({tag!r}, default_project(),"
            " default_cache())\n"
            "official = fetch.fetch(pin, pin.wheel('x86_64'), default_cache())\n"
            "inputs = repack.WheelInputs(pin, official, applied,"
            " classify.touched_paths(applied), pin.version + '+glm5.0', {})\n"
            "import time; t = time.perf_counter()\n"
            "with open('alone.whl', 'w+b') as out: repack.repack(inputs, out)\n"
            "print(time.perf_counter() - t)\n"
        )
        runs = [
            float(subprocess.run([sys.executable, "-c", script], env=self.env, cwd=self.folder,
                                 capture_output=True, text=True, check=True).stdout)
            for _ in range(self.repeat)
        ]  # fmt: skip
        ours = statistics.median(runs)
        self.row(f"{tag}: repack, the wheel alone", ours, 0, "at most 1/3 of wheel unpack + pack")
        official = next(self.cache.glob(f"downloads/*/vllm-{tag[1:]}-*x86_64.whl"))
        venv = self.folder / "wheel-venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([f"{venv}/bin/pip", "install", "-q", "wheel"], check=True)
        shutil.rmtree(self.folder / "unpacked", ignore_errors=True)
        both = (
            f"{venv}/bin/wheel unpack -d unpacked {official} && "
            f"mkdir -p packed && {venv}/bin/wheel pack -d packed unpacked/*"
        )
        seconds, mb = measured(["bash", "-ec", both], self.env, self.folder)
        self.row(f"{tag}: wheel unpack + wheel pack", seconds, mb, f"{seconds / ours:.1f} x ours")

    def setup_py(self, tag):
        mine = self.builder("--tag", tag, "--mode", "setup-py", "--out", "dist-setup", "--no-stage")
        measured(mine, self.env, self.folder)  # makes the build environment
        seconds, mb = median(mine, self.env, self.folder, 1, lambda: self.forget("wheels"))
        python = next(self.cache.glob("environments/*/bin/python"))
        official = next(self.cache.glob(f"downloads/*/vllm-{tag[1:]}-*x86_64.whl"))
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "build"],
                       check=True)  # fmt: skip
        tree = self.folder / "own"
        subprocess.run(["git", "clone", "-q", "--shared", "-n", str(self.cache / "vllm.git"),
                        str(tree)], check=True)  # fmt: skip
        subprocess.run(["git", "checkout", "-q", tag], cwd=tree, check=True)
        stub = self.folder / "stub"
        for name, text in {
            "__init__.py": "from . import version\n",
            "version.py": "cuda = '13.0'\nhip = xpu = None\n",
            "utils/__init__.py": "",
            "utils/cpp_extension.py": "CUDA_HOME = ROCM_HOME = None\n",
        }.items():
            path = stub / "torch" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        env = self.env | {
            "PYTHONPATH": str(stub), "VLLM_VERSION_OVERRIDE": "0", "VLLM_USE_PRECOMPILED": "1",
            "VLLM_TARGET_DEVICE": "cuda", "VLLM_PRECOMPILED_WHEEL_LOCATION": str(official),
        }  # fmt: skip
        own = [str(python), "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check",
               "-o", str(self.folder / "own-dist")]  # fmt: skip
        theirs, theirs_mb = measured(own, env, tree)
        self.row(f"{tag}: --mode setup-py, audit included", seconds, mb, "at most 1.3 x upstream's")
        self.row(f"{tag}: upstream's own setup.py", theirs, theirs_mb,
                 f"ours is {seconds / theirs:.2f} x")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), options.repeat)
        seconds, mb = median(bench.builder("--help"), bench.env, name, 5)
        bench.row("python -m builder --help", seconds, mb, "at most 0.4 s")
        bench.release("v0.20.2", ROOT, "v0.20.2 (244 MB)")
        bench.wheel_alone("v0.20.2")
        bench.setup_py("v0.20.2")
        old = Path(name) / "old"
        (old / "upstream").mkdir(parents=True)
        (old / "patches" / "v0.16.0").mkdir(parents=True)
        (old / "patches" / "v0.16.0" / "series").touch()
        for command in (["pin", "v0.16.0"], ["revision", "--tag", "v0.16.0", "--raise"]):
            measured(bench.builder("--project", str(old), *command), bench.env, name)
        bench.release("v0.16.0", old, "v0.16.0 (508 MB, empty series)")
        if options.json:
            options.json.write_text(json.dumps(bench.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
