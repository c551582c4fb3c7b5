"""vLLM's real configs, model classes and loaders without a GPU and without an engine."""

from __future__ import annotations

import os
import sys
import tomllib
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from unittest import mock


def start(tree: Path, stub_folder: Path):
    """Import vLLM from the tree; returns the faked platform's class (`faked`: capability)."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import no_gpu
    import overlay

    overlay.install(tree)
    declare_plugins(tree, stub_folder)
    platform = no_gpu.fake_cuda((9, 0), stub_folder)
    platform.device_type = "cpu"

    from torch.overrides import TorchFunctionMode

    class CudaIsCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    CudaIsCpu().__enter__()
    import torch
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cpu"))

    # The test model's head sizes fit no kernel, and none is run.
    @classmethod
    def backend(cls, selected_backend, attn_selector_config, num_heads=None):
        sparse = attn_selector_config.use_sparse
        name = "flashmla_sparse.FlashMLASparse" if sparse else "triton_mla.TritonMLA"
        return f"vllm.v1.attention.backends.mla.{name}Backend"

    platform.get_attn_backend_cls = backend
    return platform


def declare_plugins(tree: Path, folder: Path) -> None:
    """Make the tree's plugins known where the installed vLLM is not the built wheel."""
    group = "vllm.general_plugins"
    with (tree / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["entry-points"][group]
    installed = {entry.name for entry in metadata.entry_points(group=group)}
    missing = {name: place for name, place in declared.items() if name not in installed}
    if missing:
        info = folder / "tree_under_test-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.4\nName: tree-under-test\nVersion: 0\n")
        lines = "".join(f"{name} = {place}\n" for name, place in missing.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        sys.path.append(str(folder))


def engine_config(model: Path | str, hf_config_path: Path | None, **changes):
    """A VllmConfig as the engine would make it, for the CPU."""
    from vllm.config import DeviceConfig
    from vllm.engine.arg_utils import EngineArgs

    given = {
        "model": str(model),
        "hf_config_path": hf_config_path and str(hf_config_path),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "enforce_eager": True,
        "moe_backend": "triton",
    }
    config = EngineArgs(**(given | changes)).create_engine_config()
    config.device_config = DeviceConfig("cpu")
    return config


@contextmanager
def ranks(
    config, rank: int = 0, size: int = 1, stage: int = 0, stages: int = 1, data_parallel: int = 1
):
    """Process groups in which this is a tensor parallel rank of `size`, in a pipeline's stage.

    It is in the first of `data_parallel` ranks.
    """
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        if not state.model_parallel_is_initialized():
            import torch.distributed

            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            state.init_distributed_environment(1, 0, "local://", 0, backend="gloo")
            state.initialize_model_parallel(1, 1)
        # Loading needs no communication: a rank is its number.
        group = mock.Mock(wraps=state._TP, world_size=size, rank_in_group=rank)
        pipeline = mock.Mock(
            wraps=state._PP, world_size=stages, rank_in_group=stage,
            is_first_rank=stage == 0, is_last_rank=stage == stages - 1,
        )  # fmt: skip
        replicas = mock.Mock(wraps=state._DP, world_size=data_parallel, rank_in_group=0)
        with (
            mock.patch.object(state, "_TP", group),
            mock.patch.object(state, "_PP", pipeline),
            mock.patch.object(state, "_DP", replicas),
        ):
            yield


def load(config, *, draft: bool = False, **place: int):
    """The model (or its MTP draft) as a worker loads it."""
    from vllm.model_executor.model_loader import get_model

    draft_config = config.speculative_config.draft_model_config if draft else None
    with ranks(config, **place):
        return get_model(vllm_config=config, model_config=draft_config)


def parameters(model) -> dict:
    """Tensors by name, without those that MLA computes of kv_b_proj when all is loaded.

    For the types of a merged layer's parts those stand that the layer computes with: the plugin
    leaves the tensor as it was allocated.
    """
    import torch

    return {
        name: torch.tensor([kind for _, kind in sorted(types.items())])
        if (types := getattr(parameter, "shard_weight_type", None))
        else parameter.data
        for name, parameter in model.named_parameters()
        if not name.endswith((".W_UK_T", ".W_UV"))
    }


def differing(ours: dict, expected: dict) -> list[str]:
    """Names whose tensors are not the same bits, or that only one side has."""
    import torch

    return sorted(
        name
        for name in ours.keys() | expected.keys()
        if name not in ours
        or name not in expected
        or ours[name].dtype != expected[name].dtype
        or not torch.equal(ours[name], expected[name])
    )


def plan(path, config, **options):
    """What a load of these files would do."""
    from vllm.model_executor.model_loader.gguf_mla.plan import LoadPlan
    from vllm.transformers_utils.gguf_file import GGUFSet

    return LoadPlan(GGUFSet.of(path), config, **options)
