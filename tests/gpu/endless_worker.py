"""An engine whose worker waits for a kernel that hardly ends: `python endless_worker.py JOB.json WAITING`.

JOB holds `engine` (arguments of vllm.LLM) and `cycles` (of the GPU, how long the kernel takes). The worker
writes its process id to WAITING, then waits, as for a collective whose peer is dead.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def wait_for_the_gpu(_worker, cycles: int, waiting: str) -> None:
    """Runs in the worker's process."""
    import os
    import pathlib

    import torch

    torch.cuda._sleep(cycles)
    pathlib.Path(waiting).write_text(str(os.getpid()))
    torch.cuda.synchronize()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # collective_rpc takes a function only with it; nothing but this script talks to the worker.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    import vllm

    llm = vllm.LLM(**job["engine"], distributed_executor_backend="mp")
    llm.collective_rpc(wait_for_the_gpu, args=(job["cycles"], sys.argv[2]))


if __name__ == "__main__":
    main()
