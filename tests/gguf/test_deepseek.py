"""deepseek2 files of the split kind (DeepSeek V3, Kimi K2): a checkpoint there and back."""

from __future__ import annotations

import json

import cpu_vllm
import gguf
import numpy as np
import pytest
import torch

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 192,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 320,
}
F32 = ("layernorm.weight", "norm.weight", "mlp.gate.weight", "e_score_correction_bias")


def checkpoint() -> dict[str, torch.Tensor]:
    c = CONFIG
    hidden, heads, q_rank, latent = 128, 4, 96, 512
    nope, rope, value = 128, 64, 128
    shapes = {
        "model.embed_tokens.weight": (320, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (320, hidden),
    }
    for layer in range(c["num_hidden_layers"]):
        attention = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_a_proj.weight": (q_rank, hidden),
            "self_attn.q_a_layernorm.weight": (q_rank,),
            "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
            "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
            "self_attn.kv_a_layernorm.weight": (latent,),
            "self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
            "self_attn.o_proj.weight": (hidden, heads * value),
        }
        groups = [("mlp", 192)] if layer == 0 else [("mlp.shared_experts", 64)]
        if layer:
            groups += [(f"mlp.experts.{e}", 64) for e in range(c["n_routed_experts"])]
            attention["mlp.gate.weight"] = (4, hidden)
            attention["mlp.gate.e_score_correction_bias"] = (4,)
        for group, size in groups:
            attention[f"{group}.gate_proj.weight"] = (size, hidden)
            attention[f"{group}.up_proj.weight"] = (size, hidden)
            attention[f"{group}.down_proj.weight"] = (hidden, size)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in attention.items()}
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator).to(
            torch.float32 if name.endswith(F32) else torch.bfloat16
        )
        for name, shape in shapes.items()
    }


def split(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What llama.cpp's DeepseekV2Model.modify_tensors makes of it (conversion/deepseek.py)."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    }
    out = {}
    for name, weight in weights.items():
        block, rest = "", name
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            block = f"blk.{layer}."
        base, _, suffix = rest.rpartition(".")
        if base == "self_attn.kv_b_proj":
            k_b, v_b = weight.view(4, 128 + 128, 512).split([128, 128], dim=1)
            out[f"{block}attn_k_b.weight"] = k_b.transpose(1, 2)
            out[f"{block}attn_v_b.weight"] = v_b
        elif suffix == "e_score_correction_bias":
            out[f"{block}exp_probs_b.bias"] = weight
        elif ".experts." in name:
            if ".experts.0." in name:
                kind = base.rsplit(".", 1)[1].removesuffix("_proj")
                stack = [weights[name.replace(".experts.0.", f".experts.{e}.")] for e in range(4)]
                out[f"{block}ffn_{kind}_exps.weight"] = torch.stack(stack)
        else:
            out[f"{block}{names[base]}.{suffix}"] = weight
    return out


def write(path, tensors: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "deepseek2")
    for key, value in {
        "block_count": 2,
        "embedding_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "expert_count": 4,
        "expert_gating_func": 2,
    }.items():
        writer.add_uint32(f"deepseek2.{key}", value)
    for name, tensor in tensors.items():
        data, kind = tensor.contiguous(), None
        if data.dtype == torch.bfloat16:
            kind = gguf.GGMLQuantizationType.BF16
            data = data.view(torch.uint8).reshape(*data.shape[:-1], -1)
        writer.add_tensor(name, np.array(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("deepseek")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    weights = checkpoint()
    save_file(weights, folder / "hf" / "model.safetensors", {"format": "pt"})
    write(folder / "split.gguf", split(weights))
    return folder


def test_a_split_file_is_the_checkpoint_bit_for_bit(folder):
    right = cpu_vllm.load(cpu_vllm.engine_config(folder / "hf", None))
    ours = cpu_vllm.load(cpu_vllm.engine_config(folder / "split.gguf", folder / "hf"))
    assert cpu_vllm.differing(cpu_vllm.parameters(ours), cpu_vllm.parameters(right)) == []


def test_a_model_of_which_transformers_has_no_class(folder, tmp_path):
    """Kimi K2's config names DeepSeek V3's architecture, and a model type that vLLM alone knows."""
    values = json.dumps(CONFIG | {"model_type": "kimi_k2"})
    (tmp_path / "config.json").write_text(values)
    ours = cpu_vllm.load(cpu_vllm.engine_config(folder / "split.gguf", tmp_path))
    right = cpu_vllm.load(cpu_vllm.engine_config(folder / "split.gguf", folder / "hf"))
    assert cpu_vllm.differing(cpu_vllm.parameters(ours), cpu_vllm.parameters(right)) == []


def test_parts_in_reverse_order(folder, tmp_path):
    write(tmp_path / "reverse.gguf", dict(reversed(split(checkpoint()).items())))
    right = cpu_vllm.load(cpu_vllm.engine_config(folder / "split.gguf", folder / "hf"))
    ours = cpu_vllm.load(cpu_vllm.engine_config(tmp_path / "reverse.gguf", folder / "hf"))
    assert cpu_vllm.differing(cpu_vllm.parameters(ours), cpu_vllm.parameters(right)) == []


def test_whole_kv_b_stays_with_the_generic_loader(folder, tmp_path):
    from vllm.model_executor.model_loader.gguf_mla import open_mla_gguf

    tensors = split(checkpoint())
    for layer in range(2):
        k_b = tensors.pop(f"blk.{layer}.attn_k_b.weight").transpose(1, 2)
        v_b = tensors.pop(f"blk.{layer}.attn_v_b.weight")
        tensors[f"blk.{layer}.attn_kv_b.weight"] = torch.cat([k_b, v_b], dim=1).flatten(0, 1)
    write(tmp_path / "whole.gguf", tensors)
    assert open_mla_gguf(str(tmp_path / "whole.gguf")) is None
    assert open_mla_gguf(str(folder / "split.gguf")) is not None


def test_a_file_without_its_mtp_block_cannot_draft(folder):
    from vllm.transformers_utils.gguf_file import GGUFFileError

    engine = cpu_vllm.engine_config(
        folder / "split.gguf",
        folder / "hf",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    with pytest.raises(GGUFFileError, match=r"holds no MTP block \(blk.2\)"):
        cpu_vllm.load(engine, draft=True)
