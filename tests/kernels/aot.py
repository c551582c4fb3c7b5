"""Compiles kernels ahead of time for a card that is not there.

The launchers of the real files run on meta tensors under a driver that names a target and
launches nothing: so what is compiled is, specialisation by specialisation, what a card would get.
Run as a script: `python aot.py TREE JOBS.json` prints one JSON list of Compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Shared memory that a program may opt in to, bytes, by capability: CUDA C++ Programming Guide,
# table "Technical Specifications per Compute Capability", less 1 KiB that the driver reserves.
SHARED_LIMIT = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
    121: 101_376,
}


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of one kernel.

    stack is the bytes of local memory per thread: spilled registers live there. wide_copies is the
    number of its instructions that copy 16 bytes to shared memory.
    """

    kernel: str
    capability: int
    label: str
    shared: int
    registers: int
    stack: int
    target: str
    wide_copies: int


class _Device:
    """A driver of a card that is not there."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def get_device_interface(self) -> Any:
        return self


@contextmanager
def compiling_for(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Inside, launching a kernel compiles it and appends (name, compiled kernel)."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    before = driver._active
    driver.set_active(_Device(capability))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = before


def said_of(cubin: bytes, tool: str, option: str) -> str:
    """What one of the binary tools that Triton brings along prints about machine code."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) that the bundled cuobjdump reads from the machine code."""
    text = said_of(cubin, "cuobjdump", "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"no resource usage in {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def record(name: str, kernel: Any, capability: int, label: str) -> Compiled:
    registers, stack = resource_usage(kernel.asm["cubin"])
    target = re.search(r"\.target (\S+)", kernel.asm["ptx"])
    assert target is not None
    return Compiled(
        name,
        capability,
        label,
        kernel.metadata.shared,
        registers,
        stack,
        target[1].rstrip(","),
        kernel.asm["ptx"].count("cp.async.cg.shared.global"),
    )


def sparse_mla(ops: Any, job: dict[str, Any]) -> None:
    """One call of the sparse MLA launcher: dtype, heads, rope, paged, splits."""
    import torch

    dtype = getattr(torch, job["dtype"])
    tokens, heads, rope, topk = job["tokens"], job["heads"], job["rope"], 2048
    meta = {"device": "meta"}
    # As the MLA layer hands them over: transposed from [H, T, 512], a slice of [T, H, 192 + 64].
    q_nope = torch.empty(heads, tokens, 512, dtype=dtype, **meta).transpose(0, 1)
    q_pe = torch.empty(tokens, heads, 192 + rope, dtype=dtype, **meta)[..., 192:]
    cache = torch.empty(1000, 64, 512 + rope, dtype=dtype, **meta)
    paged = {
        "req_id": torch.empty(tokens, dtype=torch.int32, **meta),
        "block_table": torch.empty(8, 100, dtype=torch.int32, **meta),
    }
    config = job.get("config")
    ops.sparse_mla_forward(
        q_nope,
        q_pe if rope else None,
        cache,
        torch.empty(tokens, topk, dtype=torch.int32, **meta),
        0.1,
        splits=job["splits"],
        config=ops.SparseMLAConfig(**config) if config else None,
        **(paged if job["paged"] else {}),
    )


def sparse_mla_fp8(ops: Any, job: dict[str, Any]) -> None:
    """One call of the launcher over fp8_ds_mla rows: dtype, heads, paged, splits."""
    import torch

    dtype = getattr(torch, job["dtype"])
    tokens, heads = job["tokens"], job["heads"]
    meta = {"device": "meta"}
    paged = {
        "req_id": torch.empty(tokens, dtype=torch.int32, **meta),
        "block_table": torch.empty(8, 100, dtype=torch.int32, **meta),
    }
    config = job.get("config")
    ops.sparse_mla_fp8_forward(
        torch.empty(heads, tokens, 512, dtype=dtype, **meta).transpose(0, 1),
        torch.empty(tokens, heads, 256, dtype=dtype, **meta)[..., 192:],
        torch.empty(1000, 64, 656, dtype=torch.uint8, **meta),
        torch.empty(tokens, 2048, dtype=torch.int32, **meta),
        0.1,
        splits=job["splits"],
        config=ops.SparseMLAConfig(**config) if config else None,
        **(paged if job["paged"] else {}),
    )


def mqa_prefill(ops: Any, job: dict[str, Any]) -> None:
    """One call of the indexer's prefill launcher."""
    import torch

    meta = {"device": "meta"}
    tokens, keys, heads = 256, 4096, 32
    ops.mqa_logits(
        torch.empty(tokens, heads, 128, dtype=torch.float8_e4m3fn, **meta),
        torch.empty(keys, 128, dtype=torch.float8_e4m3fn, **meta),
        torch.empty(keys, dtype=torch.float32, **meta),
        torch.empty(tokens, heads, dtype=torch.float32, **meta),
        torch.empty(tokens, dtype=torch.int32, **meta),
        torch.empty(tokens, dtype=torch.int32, **meta),
    )


def mqa_paged(ops: Any, job: dict[str, Any]) -> None:
    """One call of the indexer's decode launcher: next_n."""
    import torch

    meta = {"device": "meta"}
    batch, next_n, heads, blocks = 8, job["next_n"], 32, 1000
    ops.paged_mqa_logits(
        torch.empty(batch, next_n, heads, 128, dtype=torch.float8_e4m3fn, **meta),
        torch.empty(blocks, 64, 1, 132, dtype=torch.uint8, **meta),
        torch.empty(batch * next_n, heads, dtype=torch.float32, **meta),
        torch.empty(batch, next_n, dtype=torch.int32, **meta),
        torch.empty(batch, 512, dtype=torch.int32, **meta),
        32768,
    )


CALLS = {
    "triton_sparse_mla": {"sparse_mla": sparse_mla},
    "triton_sparse_mla_fp8": {"sparse_mla_fp8": sparse_mla_fp8},
    "triton_mqa_logits": {"mqa_prefill": mqa_prefill, "mqa_paged": mqa_paged},
}


def compile_jobs(tree: Path, jobs: list[dict[str, Any]]) -> list[Compiled]:
    from loading import load_op

    modules = {name: load_op(tree, name) for name in {job["op"] for job in jobs}}
    results = []
    for job in jobs:
        ops, capability = modules[job["op"]], job["capability"]
        ops._device_properties = lambda _device, cap=capability: (cap, 132)
        with compiling_for(capability) as compiled:
            CALLS[job["op"]][job["call"]](ops, job)
        assert compiled, "the launcher launched nothing"
        results += [record(name, kernel, capability, job["label"]) for name, kernel in compiled]
    return results


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    jobs = json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps([asdict(row) for row in compile_jobs(Path(sys.argv[1]), jobs)]))
