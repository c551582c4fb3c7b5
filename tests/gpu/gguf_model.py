"""A random model of GLM-5's kind: as a GGUF file, as a Hugging Face folder, and its right logits.

The shape is the smallest that vLLM's kernels take. Residual writes are small and the router is
sharp: with plain random weights two correct engines differ by 0.2 in relative L2.

The names below are the GGUF format's and the checkpoint's, written down a second time on purpose:
a mistake in the loader's map must not repeat here.

    python gguf_model.py oracle HF_FOLDER TOKENS.json OUT.npz
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": [1],
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 256,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "q_lora_rank": 256,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 512,
}

# A layer as GLM-5 has it; few of them.
REAL_LAYERS = CONFIG | {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 2048,
}

LARGE = 1 << 24  # elements


def shapes(config: dict) -> dict[str, tuple[tuple[int, ...], float]]:
    """GGUF tensor name to shape (torch's order) and standard deviation; 0 stands for a norm."""
    c = config
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q_rank, vocab = c["q_lora_rank"], c["vocab_size"]
    index = c["index_n_heads"] * c["index_head_dim"]
    experts, moe, dense = c["n_routed_experts"], c["moe_intermediate_size"], c["intermediate_size"]
    out = {
        "token_embd.weight": ((vocab, hidden), 1.0),
        "output_norm.weight": ((hidden,), 0.0),
        "output.weight": ((vocab, hidden), 2 * hidden**-0.5),
    }
    for layer in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        block = {
            "attn_norm.weight": ((hidden,), 0.0),
            "ffn_norm.weight": ((hidden,), 0.0),
            "attn_q_a_norm.weight": ((q_rank,), 0.0),
            "attn_kv_a_norm.weight": ((latent,), 0.0),
            "attn_q_a.weight": ((q_rank, hidden), hidden**-0.5),
            "attn_q_b.weight": ((heads * (nope + rope), q_rank), 2 * q_rank**-0.5),
            "attn_kv_a_mqa.weight": ((latent + rope, hidden), hidden**-0.5),
            "attn_k_b.weight": ((heads, latent, nope), latent**-0.5),
            "attn_v_b.weight": ((heads, value, latent), latent**-0.5),
            "attn_output.weight": ((hidden, heads * value), (heads * value) ** -0.5 / 4),
            "indexer.attn_q_b.weight": ((index, q_rank), 2 * q_rank**-0.5),
            "indexer.attn_k.weight": ((c["index_head_dim"], hidden), hidden**-0.5),
            "indexer.proj.weight": ((c["index_n_heads"], hidden), hidden**-0.5),
            "indexer.k_norm.weight": ((c["index_head_dim"],), 0.0),
            "indexer.k_norm.bias": ((c["index_head_dim"],), 0.1),
        }
        if layer < c["first_k_dense_replace"]:
            block |= {
                "ffn_gate.weight": ((dense, hidden), hidden**-0.5),
                "ffn_up.weight": ((dense, hidden), hidden**-0.5),
                "ffn_down.weight": ((hidden, dense), dense**-0.5 / 4),
            }
        else:
            block |= {
                "ffn_gate_inp.weight": ((experts, hidden), 4 * hidden**-0.5),
                "exp_probs_b.bias": ((experts,), 0.1),
                "ffn_gate_exps.weight": ((experts, moe, hidden), hidden**-0.5),
                "ffn_up_exps.weight": ((experts, moe, hidden), hidden**-0.5),
                "ffn_down_exps.weight": ((experts, hidden, moe), moe**-0.5 / 4),
                "ffn_gate_shexp.weight": ((moe, hidden), hidden**-0.5),
                "ffn_up_shexp.weight": ((moe, hidden), hidden**-0.5),
                "ffn_down_shexp.weight": ((hidden, moe), moe**-0.5 / 4),
            }
        if layer >= c["num_hidden_layers"]:
            block |= {
                "nextn.eh_proj.weight": ((hidden, 2 * hidden), (2 * hidden) ** -0.5),
                "nextn.enorm.weight": ((hidden,), 0.0),
                "nextn.hnorm.weight": ((hidden,), 0.0),
                "nextn.shared_head_norm.weight": ((hidden,), 0.0),
            }
        out |= {f"blk.{layer}.{name}": value for name, value in block.items()}
    return out


def q4_k_blocks(rng, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Valid Q4_K data of random quants, uint8: w = d*sc*q - dmin*m, with the mean near zero.

    Layout of block_q4_K in ggml-common.h: d, dmin (f16), 12 bytes of 6-bit scales and minimums,
    128 bytes of 4-bit quants.
    """
    count = int(np.prod(shape)) // 256
    d = np.full((count, 1), std / (4.6 * 32), np.float16)
    dmin = (7.5 * d.astype(np.float32)).astype(np.float16)
    scales = rng.integers(24, 41, (count, 8), dtype=np.uint8)  # also the minimums
    low, high = scales[:, :4], scales[:, 4:]
    packed = np.concatenate(
        [
            (low & 63) | ((high >> 4) << 6),
            (low & 63) | ((high >> 4) << 6),
            (high & 15) | ((high & 15) << 4),
        ],
        axis=1,
    )
    quants = rng.integers(0, 256, (count, 128), dtype=np.uint8)
    blocks = np.concatenate([d.view(np.uint8), dmin.view(np.uint8), packed, quants], axis=1)
    return blocks.reshape(*shape[:-1], -1)


def q6_k_blocks(rng, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Valid Q6_K data of random quants, uint8: w = d*sc*(q - 32)."""
    count = int(np.prod(shape)) // 256
    quants = rng.integers(0, 256, (count, 192), dtype=np.uint8)
    scales = rng.integers(24, 41, (count, 16), dtype=np.uint8)
    d = np.full((count, 1), std / (18.5 * 32), np.float16)
    blocks = np.concatenate([quants, scales, d.view(np.uint8)], axis=1)
    return blocks.reshape(*shape[:-1], -1)


def q8_0_blocks(rng, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Valid Q8_0 data of random quants, uint8: w = d*q. For tensors too large to quantize."""
    count = int(np.prod(shape)) // 32
    # Eight bytes a number: one by one takes 1.6 times as long, and a file has 20 GB of them.
    quants = rng.integers(0, 2**64, (count, 4), dtype=np.uint64).view(np.uint8)
    d = np.full((count, 1), std / 73.9, np.float16)  # of 256 equally likely quants
    return np.concatenate([d.view(np.uint8), quants], axis=1).reshape(*shape[:-1], -1)


def encode(name: str, shape, std: float, kind: str, rng):
    """The data of one tensor and its ggml type (None: as numpy says)."""
    import gguf

    types = gguf.GGMLQuantizationType
    exempt = len(shape) == 1 or name.endswith("ffn_gate_inp.weight")
    if std == 0.0:
        return (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32), None
    if exempt or kind == "F32":
        return (std * rng.standard_normal(shape)).astype(np.float32), None
    if kind == "Q4_K":
        if shape[-1] % 256 == 0:
            is_big = name == "output.weight" or "ffn_down" in name
            make = q6_k_blocks if is_big else q4_k_blocks
            return make(rng, shape, std), types.Q6_K if is_big else types.Q4_K
        kind = "Q5_0"
    if name.endswith("indexer.proj.weight"):
        kind = "F32"
    if kind == "Q8_0" and np.prod(shape) > LARGE:
        return q8_0_blocks(rng, shape, std), types.Q8_0
    data = (std * rng.standard_normal(shape)).astype(np.float32)
    if kind == "F32":
        return data, None
    return gguf.quants.quantize(data, types[kind]), types[kind]


def write_gguf(path: Path, config: dict, kind: str, seed: int = 0, per_shard: int = 0) -> None:
    """A file of the kind F32, BF16, Q8_0 or Q4_K (with the mixture that Q4_K_M has).

    With `per_shard`, shards of so many tensors beside `path`, named as llama-gguf-split does.
    """
    import gguf

    rng = np.random.default_rng(seed)
    tensors = {
        name: encode(name, shape, std, kind, rng) for name, (shape, std) in shapes(config).items()
    }
    writer = gguf.GGUFWriter(path, "glm-dsa", split_max_tensors=per_shard)
    c, arch = config, "glm-dsa"
    for key, value in {
        "block_count": c["num_hidden_layers"] + c["num_nextn_predict_layers"],
        "nextn_predict_layers": c["num_nextn_predict_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": c["qk_rope_head_dim"],
        "attention.indexer.head_count": c["index_n_heads"],
        "attention.indexer.key_length": c["index_head_dim"],
        "attention.indexer.top_k": c["index_topk"],
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_gating_func": 2,
        "vocab_size": c["vocab_size"],
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.expert_weights_scale", c["routed_scaling_factor"])
    writer.add_float32(f"{arch}.rope.freq_base", c["rope_parameters"]["rope_theta"])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", c["rms_norm_eps"])
    for name, (data, kind_of) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CHECKPOINT = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
    "nextn.eh_proj.weight": "eh_proj.weight",
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.shared_head_norm.weight": "shared_head.norm.weight",
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def checkpoint(paths: list[Path]) -> dict:
    """The Hugging Face checkpoint's tensors, rebuilt from GGUF files (float32, BF16 kept)."""
    import gguf
    import torch

    raw = {}
    for path in paths:
        for tensor in gguf.GGUFReader(path).tensors:
            numbers = torch.from_numpy(
                np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            )
            is_bf16 = tensor.tensor_type == gguf.GGMLQuantizationType.BF16
            raw[tensor.name] = numbers.to(torch.bfloat16) if is_bf16 else numbers
    out = {TOP[name]: raw[name] for name in TOP if name in raw}
    for name, numbers in raw.items():
        if not name.startswith("blk."):
            continue
        _, layer, rest = name.split(".", 2)
        prefix = f"model.layers.{layer}"
        if rest in CHECKPOINT:
            out[f"{prefix}.{CHECKPOINT[rest]}"] = numbers
        elif rest.endswith("_exps.weight"):
            kind = rest.removeprefix("ffn_").removesuffix("_exps.weight")
            for expert, weight in enumerate(numbers):
                out[f"{prefix}.mlp.experts.{expert}.{kind}_proj.weight"] = weight
        elif rest == "attn_k_b.weight":
            value = raw[f"blk.{layer}.attn_v_b.weight"]
            heads = [torch.cat([numbers[h].T, value[h]]) for h in range(numbers.shape[0])]
            out[f"{prefix}.self_attn.kv_b_proj.weight"] = torch.cat(heads)
        elif rest != "attn_v_b.weight":
            raise AssertionError(name)
    return out


def write_checkpoint(folder: Path, config: dict, paths: list[Path]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = checkpoint(paths)
    for name in [name for name in tensors if name.endswith(".eh_proj.weight")]:
        # A GGUF file leaves out what the MTP layer shares; vLLM's own loader asks for it.
        prefix = name.removesuffix("eh_proj.weight")
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors = {name: numbers.contiguous().clone() for name, numbers in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def oracle(folder: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    """Logits of transformers in float32, one array [tokens, vocabulary] a sequence."""
    import torch
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:3])
    assert version >= (5, 13, 1), "older ones rotate the indexer's halves"
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.eval().to(device)
    out = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens], device=device)
            out.append(model(ids, use_cache=False).logits[0].float().cpu().numpy())
    return out


def main() -> None:
    _, command, folder, tokens, target = sys.argv
    assert command == "oracle"
    results = oracle(Path(folder), json.loads(Path(tokens).read_text()))
    np.savez(target, **{f"logits_{i}": logits for i, logits in enumerate(results)})


if __name__ == "__main__":
    main()
