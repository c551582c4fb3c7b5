"""Say, as JSON on the last line, what this interpreter finds; run as a script.

``gpu``                  the cards that torch can use, each proved by an operation, and the versions
``package DIST NAME...`` where a distribution lies, and where each import package comes from
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path


def driver() -> str:
    """Return the kernel driver's version; torch knows only the CUDA version that it supports."""
    if program := shutil.which("nvidia-smi"):
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
        if said.returncode == 0 and said.stdout.strip():
            return said.stdout.split()[0]
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ""


def gpu() -> dict[str, object]:
    torch = importlib.import_module("torch")  # only this question needs it

    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        # A card that fell off the bus is still counted; it does not compute.
        assert torch.ones(8, device=f"cuda:{number}").sum().item() == 8  # noqa: S101
        properties = torch.cuda.get_device_properties(number)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append(
            {"name": properties.name, "capability": capability, "memory": properties.total_memory}
        )
    return {
        "gpus": gpus,
        "driver": driver(),
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
    }


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def package(distribution: str, names: list[str]) -> dict[str, object]:
    found = importlib.metadata.distribution(distribution)
    origins = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        origins[name] = os.path.realpath(spec.origin) if spec and spec.origin else ""
    site = os.path.realpath(str(found.locate_file("")))
    return {"version": found.version, "site": site, "origins": origins}


def main(question: str, *arguments: str) -> None:
    try:
        answer = gpu() if question == "gpu" else package(arguments[0], list(arguments[1:]))
    except Exception as error:  # noqa: BLE001 - torch, its libraries and the driver raise anything
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{json.dumps(answer)}")  # noqa: T201 - this is the answer


if __name__ == "__main__":
    main(*sys.argv[1:])
