"""Runs in the vLLM environment's Python and prints what a tree decides, as one JSON list.

    probe.py TREE STUB_FOLDER JOBS

JOBS is a JSON list of [what, card, ...]: ["matrix"], ["forced"], ["rows_of_512"], ["engine_args",
card, arguments], ["indexer", card], ["construct", card, model changes], ["fp8_layer", card, dtype],
["cache_writers", card].
All in one process: its imports are the cost.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

CARDS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
DTYPES = ["bfloat16", "float16"]
KV_DTYPES = ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla", "fp8_e5m2"]
HEADS = [8, 64]


def model_config(**changes):
    from vllm.config import ModelConfig

    given = {"model": str(HERE / "glm5"), "skip_tokenizer_init": True, "max_model_len": 4096}
    return ModelConfig(**(given | changes))


def vllm_config(model, kv_cache_dtype="auto", **changes):
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig

    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(cache_dtype=kv_cache_dtype),
        device_config=DeviceConfig("cpu"),
        **changes,
    )


class OnMeta:
    """Allocations on cuda land on the meta device."""

    def __enter__(self):
        import torch
        from torch.overrides import TorchFunctionMode

        class Redirect(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                kwargs = dict(kwargs or {})
                if str(kwargs.get("device", "")).startswith("cuda"):
                    kwargs["device"] = "meta"
                return function(*args, **kwargs)

        self.mode, self.default = Redirect(), torch.device("meta")
        self.mode.__enter__()
        self.default.__enter__()

    def __exit__(self, *error):
        self.default.__exit__(*error)
        self.mode.__exit__(*error)


def matrix(platform) -> list[dict]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import AttentionSelectorConfig

    rows = []
    with OnMeta(), set_current_vllm_config(vllm_config(model_config())):
        product = itertools.product(
            CARDS, DTYPES, KV_DTYPES, [True, False], HEADS, [False, True], [None, 64]
        )
        for card, dtype, kv, sparse, heads, invariant, block in product:
            if invariant and (kv != "auto" or block):
                continue
            if block and kv not in ("auto", "fp8"):
                continue
            platform.faked = card
            config = AttentionSelectorConfig(
                head_size=576,
                dtype=getattr(torch, dtype),
                kv_cache_dtype=kv,
                block_size=block,
                use_mla=True,
                use_sparse=sparse,
                use_batch_invariant=invariant,
            )
            try:
                path = platform.get_attn_backend_cls(None, config, heads)
                answer = resolve(path)
            except ValueError as error:
                answer = f"ValueError: {error}"
            rows.append(
                {
                    "card": f"{card[0]}.{card[1]}",
                    "dtype": dtype,
                    "kv": kv,
                    "sparse": sparse,
                    "heads": heads,
                    "invariant": invariant,
                    "block": block,
                    "answer": answer,
                }
            )
    return rows


def rows_of_512(platform) -> dict[str, str]:
    """What a card selects for a latent without RoPE columns (GLM-5.3-Flash), {"8.0 auto": ...}."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import AttentionSelectorConfig

    answers = {}
    with OnMeta(), set_current_vllm_config(vllm_config(model_config())):
        for card, kv in itertools.product(CARDS, ["auto", "fp8"]):
            platform.faked = card
            config = AttentionSelectorConfig(
                512, torch.bfloat16, kv, None, use_mla=True, use_sparse=True
            )
            try:
                answer = resolve(platform.get_attn_backend_cls(None, config, 8))
            except ValueError as error:
                answer = f"ValueError: {error}"
            answers[f"{card[0]}.{card[1]} {kv}"] = answer
    return answers


def resolve(path: str) -> str:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(path).get_name()


def forced(platform) -> list[dict]:
    """TRITON_MLA_SPARSE by name on every card, and a request that it refuses."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    rows = []
    with OnMeta(), set_current_vllm_config(vllm_config(model_config())):
        for card, kv, dtype, head_size in itertools.product(
            [(7, 5), *CARDS],
            ["auto", "fp8", "fp8_e4m3", "fp8_ds_mla", "fp8_e5m2"],
            DTYPES,
            [576, 512],
        ):
            platform.faked = card
            config = AttentionSelectorConfig(
                head_size, getattr(torch, dtype), kv, None, use_mla=True, use_sparse=True
            )
            try:
                name = AttentionBackendEnum["TRITON_MLA_SPARSE"]
                answer = resolve(platform.get_attn_backend_cls(name, config, 8))
            except ValueError as error:
                answer = f"ValueError: {error}"
            rows.append({"card": list(card), "kv": kv, "dtype": dtype, "head_size": head_size,
                         "answer": answer})  # fmt: skip
    return rows


def model_on_meta(config):
    """GLM-5 on the meta device, and its MLA layers."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.utils import torch_utils
    from vllm.v1.worker.workspace import init_workspace_manager

    class Nothing:
        def __init__(self, *args, **kwargs):
            pass

    torch.cuda.Stream = torch.cuda.Event = Nothing
    if hasattr(torch_utils, "_aux_stream"):
        torch_utils._aux_stream = Nothing()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            rendezvous = Path(sys.argv[2]) / f"rendezvous-{os.getpid()}"
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            initialize_model_parallel(1, 1, backend="gloo")
            init_workspace_manager(torch.device("meta"))
        torch.set_default_dtype(config.model_config.dtype)
        try:
            built_by, _ = ModelRegistry.resolve_model_cls(
                ["GlmMoeDsaForCausalLM"], config.model_config
            )
            with OnMeta():
                built = built_by(vllm_config=config)
        finally:
            torch.set_default_dtype(torch.float32)
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    return built, [m for m in built.modules() if isinstance(m, MLAAttention)]


def construct(changes: dict) -> dict:
    """GLM-5 in full size."""
    built, layers = model_on_meta(vllm_config(model_config(**changes)))
    return {
        "parameters": sum(p.numel() for p in built.parameters()),
        "backends": sorted({layer.attn_backend.get_name() for layer in layers}),
        "layers": len(layers),
        "block_size": layers[0].attn_backend.get_preferred_block_size(16),
        "lacking": lacking(layers[0]),
    }


def lacking(layer) -> dict[str, list[str]]:
    """What the layer's classes read of the implementation and the metadata that ours have not."""
    from vllm.v1.attention.backends.mla import triton_mla_sparse

    source = "".join(
        inspect.getsource(one) for one in type(layer).__mro__ if one.__module__.startswith("vllm.")
    )
    impl_reads = set(re.findall(r"\bself\.impl\.(\w+)", source))
    metadata_reads = set(re.findall(r"\battn_metadata\.(\w+)", source))
    fields = {field.name for field in dataclasses.fields(triton_mla_sparse.TritonMLASparseMetadata)}
    return {
        "read": sorted(impl_reads | metadata_reads),
        "implementation": sorted(name for name in impl_reads if not hasattr(layer.impl, name)),
        "metadata": sorted(metadata_reads - fields),
    }


def fp8_layer(dtype: str) -> dict:
    """What a layer under --kv-cache-dtype fp8_e4m3 allocates, writes, reads and compiles."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.config import set_current_vllm_config

    sys.path.insert(0, str(HERE.parent / "kernels"))
    from aot import compiling_for

    model = model_config(dtype=dtype, hf_overrides={"num_hidden_layers": 2})
    config = vllm_config(model, "fp8_e4m3")
    _, layers = model_on_meta(config)
    layer, kv = layers[0], config.cache_config.cache_dtype
    spec = layer.get_kv_cache_spec(config)
    if hasattr(layer.attn_backend, "get_kv_cache_shape"):
        shape = layer.attn_backend.get_kv_cache_shape(10, 64, 1, layer.head_size, kv)
    else:  # from v0.29 on the runner makes it of the specification
        shape = (10, 64, spec.state_content_size_bytes // spec.dtype.itemsize)

    written = {}

    def write(latent, rope, cache, slots, *, kv_cache_dtype, scale, skip_scale=False):
        written.update(
            latent=[str(latent.dtype), *latent.shape],
            rope=[str(rope.dtype), *rope.shape],
            cache=[str(cache.dtype), *cache.shape],
            kv_cache_dtype=kv_cache_dtype,
        )

    ops.concat_and_cache_mla = write
    layer.impl.do_kv_cache_update(
        torch.ones(3, 512, dtype=model.dtype),
        torch.ones(3, 1, 64, dtype=model.dtype),
        torch.zeros(shape, dtype=spec.dtype),
        torch.arange(3),
        layer.kv_cache_dtype,
        torch.ones(()),
    )
    with set_current_vllm_config(config), compiling_for(80) as compiled:
        builder_cls = layer.attn_backend.get_builder_cls()
        builder = builder_cls(spec, [layer.layer_name], config, torch.device("meta"))
        builder._warm_up()
    return {
        "backends": [layer.attn_backend.get_name() for layer in layers],
        "kv": [kv, *(layer.kv_cache_dtype for layer in layers)],
        "shape": list(shape),
        "bytes_a_token": spec.page_size_bytes / spec.block_size,
        "written": written,
        "reads": layer.impl.sparse_forward.__name__,
        "compiled": sorted({name for name, _ in compiled}),
    }


def cache_writers() -> dict[str, list[str] | str]:
    """Compiler passes by cache of a bfloat16 model, where Inductor partitions the graph."""
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.config import CompilationConfig

    answers: dict[str, list[str] | str] = {}
    for kv in ("auto", "bfloat16", "float16", "fp8"):
        model = model_config(dtype="bfloat16", hf_overrides={"num_hidden_layers": 2})
        partition = CompilationConfig(use_inductor_graph_partition=True)
        try:
            config = vllm_config(model, kv, compilation_config=partition)
        except ValueError as error:
            answers[kv] = f"ValueError: {error}"
            continue
        model_on_meta(config)
        passes = PostGradPassManager()
        passes.configure(config)
        answers[kv] = [type(one).__name__ for one in passes.passes]
    return answers


def engine_args(arguments: list[dict]) -> list[dict]:
    """The KV cache dtype that EngineArgs ends in, and what it logged."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention import remedy

    records: list[str] = []
    # Not a handler: since v0.33.0 the first engine config sets logging up anew.
    remedy.logger.warning = lambda text, *args: records.append(text % args)
    answers = []
    for changes in arguments:
        records.clear()
        given = {"model": str(HERE / "glm5"), "skip_tokenizer_init": True, "max_model_len": 4096}
        try:
            config = EngineArgs(**(given | changes)).create_engine_config()
        except ValueError as error:
            kv = f"ValueError: {error}"
        else:
            kv = config.cache_config.cache_dtype
        answers.append({"kv": kv, "log": list(records)})
    return answers


def indexer() -> dict:
    """What the switch decides for each value of its variable, or the error."""
    from vllm.v1.attention.backends.mla import indexer_logits

    answers = {}
    for importable in (True, False):
        indexer_logits.deep_gemm._lazy_init = lambda: None
        indexer_logits.deep_gemm._fp8_fp4_paged_mqa_logits_impl = print if importable else None
        for choice in ("auto", "deep_gemm", "triton"):
            os.environ["VLLM_SPARSE_INDEXER_BACKEND"] = choice
            indexer_logits.sparse_indexer_backend.cache_clear()
            try:
                answer = indexer_logits.sparse_indexer_backend()
            except RuntimeError as error:
                answer = f"RuntimeError: {error}"
            answers[f"{choice} {'importable' if importable else 'missing'}"] = answer
    del os.environ["VLLM_SPARSE_INDEXER_BACKEND"]
    return answers


def run(platform, what: str, card: list[int] | None = None, *arguments):
    from vllm.v1.attention import selector

    # None of these caches knows that a card can change.
    selector._cached_get_attn_backend.cache_clear()
    indexer_module = sys.modules.get("vllm.v1.attention.backends.mla.indexer_logits")
    if indexer_module is not None:
        indexer_module.sparse_indexer_backend.cache_clear()
    if card is not None:
        platform.faked = tuple(card)
    if what == "matrix":
        return matrix(platform)
    if what == "forced":
        return forced(platform)
    if what == "rows_of_512":
        return rows_of_512(platform)
    if what == "indexer":
        return indexer()
    if what == "fp8_layer":
        return fp8_layer(*arguments)
    if what == "cache_writers":
        return cache_writers()
    if what == "engine_args":
        return engine_args(*arguments)
    try:
        return construct(*arguments)
    except ValueError as problem:
        return {"error": str(problem)}


def main() -> list:
    import overlay

    tree, stub, jobs = sys.argv[1:4]
    overlay.install(Path(tree) if tree != "-" else None)
    import no_gpu

    platform = no_gpu.fake_cuda((9, 0), Path(stub))
    return [run(platform, *job) for job in json.loads(jobs)]


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(main()), file=out)
