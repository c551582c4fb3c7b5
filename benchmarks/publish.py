"""How long publishing to a real server takes and how much memory, beside plain twine.

    python benchmarks/publish.py WHEEL [--repeat 3] [--json FILE]

Both servers run on loopback; each run begins with an empty index. The two take turns, in changing
order, so that what else the machine does hits both; none pays for writing out what the run before it
left in memory, 700 MB on devpi. Targets: at most 64 MB, and 1.3 times twine's seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.publish import servers  # noqa: E402
from tests.publish.release import Release  # noqa: E402

# ru_maxrss of a child begins with its parent's pages: the process tells its own peak at its end.
PEAK = """
import atexit, re, runpy, sys
def peak():
    status = open("/proc/self/status").read()
    print("PEAK", re.search(r"VmHWM:\\s+(\\d+) kB", status)[1], file=sys.stderr)
atexit.register(peak)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def measured(command, env):
    """Run a module once; return seconds and its own peak of resident megabytes."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, command)], env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    return seconds, int(done.stderr.rsplit("PEAK", 1)[1]) / 1024


@contextlib.contextmanager
def pypiserver(folder):
    with servers.pypiserver(folder) as url:

        def fresh():
            for package in (folder / "packages").iterdir():
                package.unlink()
            return url

        yield fresh


@contextlib.contextmanager
def devpi(folder):
    folder.mkdir()
    with servers.devpi(folder) as server:
        owner = server.user(servers.USER)
        state = {"made": 0}

        def fresh():
            if state["made"]:
                server.call("PATCH", f"{owner[0]}/stable", owner, type="stage", volatile=True)
                server.call("DELETE", f"{owner[0]}/stable", owner)
            state["made"] += 1
            return server.index(owner, "stable")

        yield fresh


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    env = os.environ | {
        "TWINE_USERNAME": servers.USER,
        "TWINE_PASSWORD": servers.PASSWORD,
        "PYTHONPATH": str(ROOT),
        "PIP_INDEX_URL": "https://public.invalid/simple",
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        release = Release(folder)
        wheel = folder / "dist" / options.wheel.name
        wheel.parent.mkdir()
        wheel.symlink_to(options.wheel.absolute())
        report = release.report(wheel)
        for kind, start in (("pypiserver", pypiserver), ("devpi", devpi)):
            runs = {"twine": [], "builder": []}
            with start(folder / kind) as fresh:
                for turn in range(options.repeat):
                    for tool in list(runs)[:: -1 if turn % 2 else 1]:
                        url = fresh()
                        commands = {
                            "twine": [
                                "twine", "upload", "--non-interactive", "--disable-progress-bar",
                                "--repository-url", url, wheel,
                            ],
                            "builder": [
                                "builder", "--project", release.root, "publish", wheel,
                                "--report", report, "--index", url,
                            ],
                        }  # fmt: skip
                        os.sync()
                        runs[tool].append(measured(commands[tool], env))
            seconds = {k: statistics.median(r[0] for r in v) for k, v in runs.items()}
            peak = {k: max(r[1] for r in v) for k, v in runs.items()}
            ratio = seconds["builder"] / seconds["twine"]
            rows.append({"server": kind, "seconds": seconds, "peak_mb": peak, "ratio": ratio})
            print(
                f"{kind:10}  twine {seconds['twine']:6.2f} s {peak['twine']:4.0f} MB   "
                f"builder {seconds['builder']:6.2f} s {peak['builder']:4.0f} MB   "
                f"{ratio:.2f} times",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
