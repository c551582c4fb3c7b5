"""Threads that are the first to compute in a forked process: `python forked_threads.py with|without FORKS`.

As in a forked worker, "with" the loader's own preparation or "without" it. Prints how many processes were
forked until torch ended one, or 0 if it ended none. TorchScript starts the threads: Python's begin one after
another.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import List  # noqa: UP035 - what TorchScript knows

import torch
from vllm.model_executor.model_loader.gguf_mla.weights import Dequantizer

THREADS = 8


@torch.jit.script
def fused(part: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.transpose(1, 2), part.transpose(1, 2)], dim=1)


@torch.jit.script
def at_once(part: torch.Tensor, count: int) -> List[torch.Tensor]:  # noqa: UP006
    futures = torch.jit.annotate(List[torch.jit.Future[torch.Tensor]], [])  # noqa: UP006
    for _ in range(count):
        futures.append(torch.jit.fork(fused, part))
    out = torch.jit.annotate(List[torch.Tensor], [])  # noqa: UP006
    for future in futures:
        out.append(torch.jit.wait(future))
    return out


def child(prepared: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_interop_threads(THREADS)
    parts = [torch.zeros(1, 1, 1), torch.zeros(4, 300, 512, dtype=torch.bfloat16)]
    with Dequantizer() if prepared else contextlib.nullcontext():
        for part in parts:  # the first starts the threads, which begin the second together
            at_once(part, THREADS)


def main() -> None:
    # vLLM's executor does so before it forks its workers.
    torch.get_num_threads()
    torch.set_num_threads(1)
    for count in range(1, int(sys.argv[2]) + 1):
        if not (process := os.fork()):
            child(sys.argv[1] == "with")
            os._exit(0)
        if os.waitpid(process, 0)[1]:
            print(count)
            return
    print(0)


if __name__ == "__main__":
    main()
