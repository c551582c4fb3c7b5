"""How fast a GGUF model loads from a cold cache, against a plain sequential read of the file.

    python gguf_load_rate.py FOLDER OUT.json [--gib 4]

Makes a file of GLM-5's dimensions with few layers and experts in FOLDER, drops it from the page
cache, reads it once with large reads; drops it again, and loads it as a worker does, to the GPU.
Reports seconds, bytes that this process read, and the growth of anonymous memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf_model

BASE = gguf_model.REAL_LAYERS | {"num_hidden_layers": 2, "vocab_size": 20480}
GIB_PER_EXPERT = 0.0235
GIB_FIXED = 0.45


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def counter(file: str, key: str) -> int:
    text = Path(f"/proc/self/{file}").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(key))


def sequential(path: Path) -> float:
    drop(path)
    buffer = bytearray(16 << 20)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - started


class Peak(threading.Thread):
    """The highest anonymous memory of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.highest = counter("status", "RssAnon") << 10
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            self.highest = max(self.highest, counter("status", "RssAnon") << 10)
            time.sleep(0.005)

    def grown(self) -> int:
        self.ended = True
        self.join()
        return self.highest - self.first


def replace_fill_model(old: Callable, new: Callable) -> None:
    """Put one in the other's place in each module that has taken it by name.

    v0.20.2 calls that of gguf_mla.load; the adapter of v0.33.0's plugin has imported it before a
    model is loaded, and calls its own.
    """
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("fill_model") is old:
            module.__dict__["fill_model"] = new


@contextmanager
def fill_measured(figures: dict[str, float]) -> Iterator[None]:
    """Add to the figures what filling a model takes that is loaded meanwhile.

    Plugins must be loaded: they are with the first config.

    Raises:
        RuntimeError: No model was filled by the function that is measured.
    """
    import torch
    from vllm.model_executor.model_loader.gguf_mla.load import fill_model

    def measured(*arguments, **options) -> None:
        peak = Peak()
        peak.start()
        bytes_before = counter("io", "read_bytes")
        started = time.perf_counter()
        fill_model(*arguments, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        figures["load_s"] = time.perf_counter() - started
        figures["load_read_gib"] = (counter("io", "read_bytes") - bytes_before) / 2**30
        figures["anonymous_growth_mib"] = peak.grown() / 2**20

    replace_fill_model(fill_model, measured)
    try:
        yield
    finally:
        replace_fill_model(measured, fill_model)
    if "load_s" not in figures:
        raise RuntimeError(
            "nothing was measured: this release loads the file without "
            f"{fill_model.__module__}.{fill_model.__name__}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    options = parser.parse_args()
    experts = max(8, round((options.gib - GIB_FIXED) / GIB_PER_EXPERT))
    config = BASE | {"n_routed_experts": experts}
    path = options.folder / "rate.gguf"
    if not path.exists():
        (options.folder / "config.json").write_text(json.dumps(config))
        gguf_model.write_gguf(path, config, "Q4_K")
    size = path.stat().st_size

    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.workspace import init_workspace_manager

    engine = EngineArgs(
        model=str(path), skip_tokenizer_init=True, max_model_len=512, enforce_eager=True
    ).create_engine_config()
    figures = {"gib": round(size / 2**30, 2)}
    with set_current_vllm_config(engine):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29571", 0)
        initialize_model_parallel(1, 1)
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
        init_workspace_manager(torch.device(engine.device_config.device))
        reads = [sequential(path)]
        drop(path)
        with fill_measured(figures):
            get_model(vllm_config=engine)
        reads.append(sequential(path))
    figures["sequential_s"] = min(reads)
    figures["share_of_sequential_rate"] = figures["sequential_s"] / figures["load_s"]
    options.out.write_text(json.dumps(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
