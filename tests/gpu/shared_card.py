"""Lets the ranks of one engine share a card, for tests of TP=4 and TP=8 where there are not so many.

NCCL takes each card once: collectives go through the host here, by gloo. So only eager mode is possible,
and no speed is measured. All else is what a rank on a card of its own runs: what it loads, its heads and
its kernels.

Imported, it does nothing. `python shared_card.py serve MODEL ...` is the `vllm` command with ranks that
share, as many as RANKS_THAT_SHARE_A_CARD says.
"""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import (
    DeviceCommunicatorBase,
)


class HostCommunicator(DeviceCommunicatorBase):
    """The collectives of tensor parallelism, through the memory of the host."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        host = input_.float().cpu()
        dist.all_reduce(host, group=self.cpu_group)
        return host.to(input_.device, input_.dtype)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        host = input_.float().cpu()  # exact for what a model's tensors hold
        parts = [torch.empty_like(host) for _ in range(self.world_size)]
        dist.all_gather(parts, host, group=self.cpu_group)
        return torch.cat(parts, dim=dim).to(input_.device, input_.dtype)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        gathered = self.all_gather(input_, dim)
        return gathered if self.rank_in_group == dst else None


def share(ranks: int) -> None:
    """Put this process's vLLM on the first card, whichever rank it will be."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    platform = type(current_platform)
    platform.dist_backend = "gloo"
    # vLLM looks it up by its name.
    platform.get_device_communicator_cls = classmethod(
        lambda _: f"{HostCommunicator.__module__}.{HostCommunicator.__qualname__}"
    )
    init_device = Worker.init_device

    def on_the_first_card(self) -> None:
        self.local_rank = 0
        with mock.patch("torch.accelerator.device_count", return_value=ranks):
            init_device(self)

    Worker.init_device = on_the_first_card


if __name__ in ("__main__", "__mp_main__"):  # the latter in each process that a server starts
    share(int(os.environ["RANKS_THAT_SHARE_A_CARD"]))

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
