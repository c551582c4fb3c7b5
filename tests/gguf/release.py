"""What the tests name differently where GGUF is in vLLM's tree and where it is a plugin's."""

from __future__ import annotations

import importlib
import os

# The last release with GGUF in the tree is v0.23.0.
IN_TREE = os.environ.get("VLLM_GLM5_TAG") in ("v0.20.2", "v0.23.0")
# The model of later releases keeps experts in a module of their own and makes no indexer that it
# does not run.
EXPERTS = "mlp.experts" if IN_TREE else "mlp.experts.routed_experts"


def methods():
    """The module that has GGUFConfig and multiplies by fused_mul_mat_gguf."""
    name = (
        "vllm.model_executor.layers.quantization.gguf"
        if IN_TREE
        else "vllm_gguf_plugin.quantization"
    )
    return importlib.import_module(name)


def loader_class():
    """The loader of GGUF files as vLLM finds it."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    return _LOAD_FORMAT_TO_MODEL_LOADER["gguf"]


def routed_experts(layer):
    return layer.mlp.experts if IN_TREE else layer.mlp.experts.routed_experts


def weights_of(model_config) -> str:
    """The file that a config loads; the plugin makes `model` the folder of its config."""
    return model_config.model_weights or model_config.model


def shares_indexer(layer) -> bool:
    attention = layer.self_attn
    return attention.mla_attn.skip_topk if IN_TREE else attention.indexer is None


def experts_module():
    """The module whose _fused_moe_gguf chooses among the kernels of quantized experts."""
    if IN_TREE:
        return methods()
    return importlib.import_module("vllm_gguf_plugin.quantization.fused_moe")


def linear_product():
    """What multiplies by a quantized linear layer."""
    if IN_TREE:
        module = methods()
    else:
        module = importlib.import_module("vllm_gguf_plugin.quantization.linear")
    return module._fused_mul_mat_gguf


def replace_expert_kernels(monkeypatch, matmul, matvec) -> None:
    """Put functions in the place of the compiled ggml_moe_a8 and ggml_moe_a8_vec."""
    ops = experts_module().ops
    monkeypatch.setattr(ops, "ggml_moe_a8", matmul)
    monkeypatch.setattr(ops, "ggml_moe_a8_vec", matvec)
    if not IN_TREE:
        from vllm.plugins.gguf_mla.adapter import bound_kernels

        bound_kernels(ops)
