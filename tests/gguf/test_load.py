"""What the loader puts into vLLM's own model classes, against the checkpoint rebuilt elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cpu_vllm
import gguf_model
import pytest
from release import EXPERTS, IN_TREE, routed_experts

MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory):
    """The BF16 file's weights as safetensors, which vLLM's default loader reads."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = json.loads((data / "hf" / "config.json").read_text())
    gguf_model.write_checkpoint(folder, config, [data / "glm-dsa-micro-bf16.gguf"])
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    return cpu_vllm.parameters(cpu_vllm.load(cpu_vllm.engine_config(checkpoint, None)))


def load_file(files, data, kind, **changes):
    return cpu_vllm.load(cpu_vllm.engine_config(files[kind], data / "hf", **changes))


def test_bf16_is_the_checkpoint_bit_for_bit(files, data, expected):
    ours = cpu_vllm.parameters(load_file(files, data, "bf16"))
    assert len(ours) == 35
    assert cpu_vllm.differing(ours, expected) == []


def test_unquantized_experts_go_through_the_fused_method(files, data):
    """GGUFMoEMethod loops over tokens with a device sync, which no graph capture survives."""
    experts = routed_experts(load_file(files, data, "bf16").model.layers[1])
    assert type(experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    experts = routed_experts(load_file(files, data, "Q4_K_M").model.layers[1])
    assert type(experts.quant_method).__name__ == "GGUFMoEMethod"


def all_k_then_all_v(k_b, v_b):
    import torch

    return torch.cat([k_b.transpose(1, 2).flatten(0, 1), v_b.flatten(0, 1)])


def reshaped_not_transposed(k_b, v_b):
    import torch

    heads, latent, nope = k_b.shape
    return torch.cat([k_b.reshape(heads, nope, latent), v_b], dim=1).flatten(0, 1)


def v_before_k(k_b, v_b):
    import torch

    return torch.cat([v_b, k_b.transpose(1, 2)], dim=1).flatten(0, 1)


@pytest.mark.parametrize("wrong", [all_k_then_all_v, reshaped_not_transposed, v_before_k])
def test_a_wrong_kv_b_is_seen(wrong, files, data, expected, monkeypatch):
    from vllm.model_executor.model_loader.gguf_mla import weights

    monkeypatch.setattr(weights, "fuse_kv_b", wrong)
    ours = cpu_vllm.parameters(load_file(files, data, "bf16"))
    assert cpu_vllm.differing(ours, expected) == [
        f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(2)
    ]


def test_exchanged_gate_and_up_are_seen(files, data, expected, monkeypatch):
    import dataclasses
    import re

    from vllm.model_executor.model_loader.gguf_mla import plan

    def other(match):
        return f"ffn_{'up' if match[1] == 'gate' else 'gate'}{match[2]}.weight"

    def exchanged(config):
        pattern = re.compile(r"ffn_(gate|up)(_exps|_shexp|)\.weight")
        return [
            dataclasses.replace(slot, source=pattern.sub(other, slot.source))
            for slot in right(config)
        ]

    right = plan.trunk_slots
    monkeypatch.setattr(plan, "trunk_slots", exchanged)
    ours = cpu_vllm.parameters(load_file(files, data, "bf16"))
    assert cpu_vllm.differing(ours, expected) == [
        "model.layers.0.mlp.gate_up_proj.weight",
        f"model.layers.1.{EXPERTS}.w13_weight",
        "model.layers.1.mlp.shared_experts.gate_up_proj.weight",
    ]


def test_replacing_every_weight_in_a_name_is_seen(files, data, monkeypatch):
    """weights_proj is quantized in no plan, so the names are checked where the rule is made."""
    from vllm.model_executor.model_loader.gguf_mla.tensor_map import quantized_name

    name = "model.layers.0.self_attn.indexer.weights_proj.weight"
    assert quantized_name(name) == "model.layers.0.self_attn.indexer.weights_proj.qweight"
    assert quantized_name(name) != name.replace("weight", "qweight")
    if not IN_TREE:
        return
    from vllm.model_executor.model_loader.weight_utils import _gguf_quantized_name

    assert _gguf_quantized_name(name, "qweight_type").endswith("weights_proj.qweight_type")


@pytest.mark.parametrize("kind", ["q8_0", "Q4_K_M"])
def test_quantized_files_hold_what_they_say(kind, files, data, config):
    """Every delivered tensor, dequantized, is the checkpoint's; the model takes them all."""
    import gguf
    import torch
    from vllm.model_executor.model_loader.gguf_mla.plan import LoadPlan
    from vllm.model_executor.model_loader.gguf_mla.weights import iterate_weights
    from vllm.transformers_utils.gguf_file import GGUFSet, shard_paths

    right = gguf_model.checkpoint(shard_paths(files[kind]))
    opened = GGUFSet.of(files[kind])
    seen = {}
    types = {}
    for mtp in (False, True):
        for name, tensor in iterate_weights(LoadPlan(opened, config, mtp=mtp), torch.bfloat16):
            if name.endswith("qweight_type"):
                types[name.replace("qweight_type", "qweight")] = tensor.item()
            else:
                seen[name] = tensor
    assert any("Q5_0" in t.type_name for t in opened.tensors.values()) == (kind == "Q4_K_M")
    for name, delivered in seen.items():
        plain, tensor = name.replace(".qweight", ".weight"), delivered
        if name in types:
            kind_of = gguf.GGMLQuantizationType(types[name])
            tensor = torch.from_numpy(gguf.quants.dequantize(delivered.numpy(), kind_of))
        if ".experts.0." in name:
            of_expert = [plain.replace(".experts.0.", f".experts.{e}.") for e in range(4)]
            wanted = torch.stack([right.pop(expert) for expert in of_expert])
        else:
            wanted = right.pop(plain)
        assert torch.equal(tensor, wanted.to(tensor.dtype)), name
    assert not right
    load_file(files, data, kind)


def test_kv_b_follows_the_model_dtype(files, data, checkpoint):
    ours = load_file(files, data, "bf16", dtype="float16")
    right = cpu_vllm.load(cpu_vllm.engine_config(checkpoint, None, dtype="float16"))
    assert cpu_vllm.differing(cpu_vllm.parameters(ours), cpu_vllm.parameters(right)) == []


def forked(how: str, forks: int) -> int:
    """How many processes were forked until one met the fault; 0 if none did."""
    command = [sys.executable, str(Path(__file__).with_name("forked_threads.py")), how, str(forks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    count = int(done.stdout.split()[-1])
    # Where a second thread meets the fault while the first tells of it, nothing else is said.
    words = ("Invalid thread pool!", "terminate called recursively")
    assert bool(count) == any(each in done.stderr for each in words), done.stderr[-2000:]
    return count


@pytest.mark.timeout(600)
def test_a_forked_worker_has_threads_for_all_of_ours():
    """Those that compute first replace the pool that torch inherited, and one finds none."""
    until = forked("without", 1500)
    assert until, "the fault is gone: so may what the loader does about it"
    assert not forked("with", max(100, 5 * until))


@pytest.mark.parametrize("kind", ["bf16", "Q4_K_M", "q8_0"])
def test_mtp_draft(kind, files, data):
    """The draft takes its config from the target and its block from the same file."""
    engine = cpu_vllm.engine_config(files[kind], data / "hf", speculative_config=MTP)
    draft = engine.speculative_config.draft_model_config
    assert draft.hf_config_path == engine.model_config.hf_config_path
    cpu_vllm.load(engine)
    ours = cpu_vllm.parameters(cpu_vllm.load(engine, draft=True))
    if kind != "bf16":
        return
    right = gguf_model.checkpoint([files[kind]])
    layer = "model.layers.2"
    import torch

    fused = torch.cat([right[f"{layer}.self_attn.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa")])  # fmt: skip
    assert torch.equal(ours[f"{layer}.mtp_block.self_attn.fused_qkv_a_proj.weight"], fused)
    assert torch.equal(ours[f"{layer}.mtp_block.self_attn.kv_b_proj.weight"], right[f"{layer}.self_attn.kv_b_proj.weight"])  # fmt: skip
    assert torch.equal(ours[f"{layer}.eh_proj.weight"], right[f"{layer}.eh_proj.weight"])
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        wanted = right[f"{layer}.{norm}.weight"].to(torch.bfloat16)
        assert torch.equal(ours[f"{layer}.{norm}.weight"], wanted)


def test_a_missing_mtp_block_is_known_before_the_target_is_read(files, data, tmp_path, monkeypatch):
    """GLM-5's 402 GB take minutes, and the draft is loaded after them."""
    import gguf_bytes
    from vllm.model_executor.model_loader.gguf_mla import weights
    from vllm.transformers_utils.gguf_file import GGUFFileError

    path = tmp_path / "trunk.gguf"
    gguf_bytes.rewrite(
        [files["bf16"]], [path], lambda name, index: None if name.startswith("blk.2.") else 0
    )
    cpu_vllm.load(cpu_vllm.engine_config(path, data / "hf"))
    monkeypatch.setattr(weights, "tensor_view", None)
    engine = cpu_vllm.engine_config(path, data / "hf", speculative_config=MTP)
    with pytest.raises(GGUFFileError, match=r"holds no MTP block \(blk.2\)"):
        cpu_vllm.load(engine)


def test_the_trunk_does_not_say_that_it_skips_what_follows(files, data, caplog_vllm):
    cpu_vllm.load(cpu_vllm.engine_config(files["bf16"], data / "hf", speculative_config=MTP))
    assert "MTP block" not in caplog_vllm.text


def test_the_trunk_says_that_it_skips_mtp(files, data, config, caplog_vllm):
    from vllm.model_executor.model_loader.gguf_mla.plan import LoadPlan
    from vllm.transformers_utils.gguf_file import GGUFSet

    LoadPlan(GGUFSet.of(files["bf16"]), config)
    assert "skipping the 27 tensors of the MTP block" in caplog_vllm.text
