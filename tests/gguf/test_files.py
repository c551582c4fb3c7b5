"""Bad files are named at once: which file, which tensor, and what to do next."""

from __future__ import annotations

import shutil
import struct

import cpu_vllm
import pytest
import release
from gguf_bytes import rewrite, shard_names


def tensors(path, config):
    import torch
    from vllm.model_executor.model_loader.gguf_mla.weights import iterate_weights

    return dict(iterate_weights(cpu_vllm.plan(path, config), torch.bfloat16))


def copy_shards(files, folder):
    return [
        shutil.copyfile(path, folder / path.name)
        for path in sorted(files["q8_0"].parent.glob("*.gguf"))
    ]


def test_not_a_gguf(tmp_path, error, config):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(error, match=r"model\.gguf: not a GGUF file"):
        cpu_vllm.plan(path, config)


def test_version_2(table, tmp_path, error, config):
    struct.pack_into("<I", table.data, 4, 2)
    with pytest.raises(error, match=r"GGUF version 2.*[Cc]onvert the model again"):
        cpu_vllm.plan(table.write(tmp_path / "v2.gguf"), config)


def test_big_endian(tmp_path, error, config):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "glm-dsa", endianess=gguf.GGUFEndian.BIG)
    import numpy as np

    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(error, match=r"big-endian.*gguf-convert-endian"):
        cpu_vllm.plan(tmp_path / "big.gguf", config)


@pytest.mark.parametrize("size", [10, 100, 5000])
def test_header_larger_than_the_file(size, table, tmp_path, error, config):
    path = tmp_path / "short.gguf"
    path.write_bytes(table.data[:size])
    with pytest.raises(error, match=r"short\.gguf: (the header goes on past|10 bytes)"):
        cpu_vllm.plan(path, config)


@pytest.mark.parametrize("field", [8, 16, 24])
def test_absurd_counts(field, table, tmp_path, error, config):
    struct.pack_into("<Q", table.data, field, 1 << 62)
    with pytest.raises(error, match=r"[Tt]he header (goes on past the end|is damaged)"):
        cpu_vllm.plan(table.write(tmp_path / "counts.gguf"), config)


def test_cut_short(table, tmp_path, error, config):
    path = tmp_path / "cut.gguf"
    path.write_bytes(table.data[:-1000])
    with pytest.raises(error, match=r"cut\.gguf: the file has \d+ bytes, but tensor 'blk.2"):
        cpu_vllm.plan(path, config)


@pytest.mark.parametrize(
    ("type_id", "words"),
    [(139, "type 139.*ik_llama"), (77, "type 77.*newer than the installed gguf")],
)
def test_unknown_type(type_id, words, table, tmp_path, error, config):
    table.set_type("blk.1.ffn_up_exps.weight", type_id)
    with pytest.raises(error, match=rf"types\.gguf: tensor 'blk.1.ffn_up_exps.weight'.*{words}"):
        cpu_vllm.plan(table.write(tmp_path / "types.gguf"), config)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0", "MXFP4"])
def test_type_without_kernel(kind, files, tmp_path, error, config):
    import gguf
    import numpy as np

    types = gguf.GGMLQuantizationType
    block, size = gguf.GGML_QUANT_SIZES[types[kind]]
    name, path = "blk.1.ffn_gate_shexp.weight", tmp_path / "kernel.gguf"
    reader = gguf.GGUFReader(files["Q4_K_M"])
    for tensor in reader.tensors:
        if tensor.name == name:
            tensor_data = np.zeros((256, 256 // block * size), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        add = gguf.GGUFWriter.add_tensor

        def replaced(writer, tensor_name, data, raw_dtype=None):
            if tensor_name == name:
                data, raw_dtype = tensor_data, types[kind]
            add(writer, tensor_name, data, raw_dtype=raw_dtype)

        patch.setattr(gguf.GGUFWriter, "add_tensor", replaced)
        rewrite([files["Q4_K_M"]], [path], lambda name, index: 0)
    with pytest.raises(error, match=rf"{name} \({kind}\) of .*no kernel for the type {kind}"):
        cpu_vllm.plan(path, config)


def test_missing_shards(files, tmp_path, error, config):
    paths = copy_shards(files, tmp_path)
    for path in (paths[1], paths[4]):
        path.unlink()
    with pytest.raises(error, match=r"2 of its 6 shards are missing: .*00002.*00005"):
        cpu_vllm.plan(paths[0], config)


def test_shard_of_another_set(files, tmp_path, error, config):
    paths = copy_shards(files, tmp_path)
    targets = shard_names(tmp_path, "other", 6)
    rewrite([files["Q4_K_M"]], targets, lambda name, index: index % 6)
    targets[2].replace(paths[2])
    with pytest.raises(error, match="files of several sets are mixed"):
        cpu_vllm.plan(paths[0], config)


def test_shard_of_another_count(files, tmp_path, error, config):
    paths = copy_shards(files, tmp_path)
    shutil.copyfile(paths[0], tmp_path / "renamed.gguf")
    with pytest.raises(error, match=r"renamed\.gguf: it says that it is one of 6 shards"):
        cpu_vllm.plan(tmp_path / "renamed.gguf", config)


def test_shard_cut_short(files, tmp_path, error, config):
    paths = copy_shards(files, tmp_path)
    paths[3].write_bytes(paths[3].read_bytes()[:-64])
    with pytest.raises(error, match=r"00004-of-00006\.gguf: the file has .* cut short"):
        cpu_vllm.plan(paths[0], config)


def test_duplicate_tensor(table, tmp_path, error, config):
    table.rename("blk.1.ffn_gate_shexp.weight", "blk.1.ffn_down_shexp.weight")
    with pytest.raises(error, match=r"'blk.1.ffn_down_shexp.weight' is in it twice"):
        cpu_vllm.plan(table.write(tmp_path / "twice.gguf"), config)


def test_missing_and_unknown_tensor(table, tmp_path, error, config):
    table.rename("blk.0.attn_output.weight", "blk.0.attn_outputs.weigh")
    with pytest.raises(error, match=r"lacks the tensor blk.0.attn_output.weight \(for model"):
        cpu_vllm.plan(table.write(tmp_path / "renamed.gguf"), config)


def test_tensor_that_nothing_takes(files, tmp_path, error, config):
    import gguf
    import numpy as np

    path = tmp_path / "extra.gguf"
    with pytest.MonkeyPatch.context() as patch:
        write = gguf.GGUFWriter.write_header_to_file

        def with_extra(writer):
            writer.add_tensor("blk.1.attn_sinks.weight", np.ones(4, np.float32))
            write(writer)

        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_extra)
        rewrite([files["bf16"]], [path], lambda name, index: 0)
    with pytest.raises(error, match=r"nothing in the model takes .*attn_sinks.*extra\.gguf"):
        cpu_vllm.plan(path, config)


def test_rope_freqs_is_no_surprise(files, tmp_path, config):
    import gguf
    import numpy as np

    with pytest.MonkeyPatch.context() as patch:
        write = gguf.GGUFWriter.write_header_to_file

        def with_extra(writer):
            writer.add_tensor("rope_freqs.weight", np.ones(16, np.float32))
            write(writer)

        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_extra)
        rewrite([files["bf16"]], [tmp_path / "rope.gguf"], lambda name, index: 0)
    cpu_vllm.plan(tmp_path / "rope.gguf", config)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", 5, "block_count is 5, config.json's num_hidden_layers"),
        ("attention.head_count", 1, "head_count is 1, config.json's num_attention_heads is 4"),
        ("embedding_length", 512, "embedding_length is 512, config.json's hidden_size is 256"),
        ("expert_count", 8, "expert_count is 8, config.json's n_routed_experts is 4"),
    ],
)
def test_metadata_that_lies(key, value, words, table, tmp_path, error, config):
    table.set_u32(f"glm-dsa.{key}", value)
    with pytest.raises(error, match=rf"lies\.gguf: .*different models.*{words}.*--hf-config-path"):
        cpu_vllm.plan(table.write(tmp_path / "lies.gguf"), config)


def test_shape_that_lies(table, tmp_path, error, config):
    table.set_dim("blk.0.attn_q_b.weight", 1, 256)
    words = r"attn_q_b.weight \(Q4_K\) of .* shape \[256, 256\]; config.json implies \[512, 256\]"
    with pytest.raises(error, match=words):
        cpu_vllm.plan(table.write(tmp_path / "shape.gguf"), config)


def test_config_of_another_model(files, error, config):
    import copy

    other = copy.deepcopy(config)
    other.num_hidden_layers, other.n_routed_experts = 3, 16
    with pytest.raises(error, match=r"expert_count is 4, config.json's n_routed_experts is 16"):
        cpu_vllm.plan(files["bf16"], other)


@pytest.mark.parametrize("field", ["topk_method", "scoring_func", "indexer_rope_interleave"])
def test_config_that_lacks_a_field(field, files, config):
    import copy

    other = copy.deepcopy(config)
    delattr(other, field)
    with pytest.raises(ValueError, match=rf"config.json lacks {field}.*cannot supply it"):
        cpu_vllm.plan(files["bf16"], other)


def test_expert_parallelism_is_refused(files, config):
    with pytest.raises(ValueError, match=r"do not support expert parallelism: .*--enable-expert"):
        cpu_vllm.plan(files["bf16"], config, expert_parallel=True)


def test_a_cut_through_a_block_is_refused(files, config):
    with pytest.raises(ValueError, match=r"attn_output.*parts of 128.*blocks of 256"):
        cpu_vllm.plan(files["Q4_K_M"], config, tp_size=2)
    cpu_vllm.plan(files["q8_0"], config, tp_size=4)
    with pytest.raises(ValueError, match="tensor parallel size 8 would cut its 4 heads"):
        cpu_vllm.plan(files["bf16"], config, tp_size=8)


def test_shards_in_any_order_hold_the_same(files, tmp_path, config):
    """One file, its six shards, and the tensors dealt to three shards at random."""
    import random

    import torch

    expected = tensors(files["q8_0"], config)
    sources = sorted(files["q8_0"].parent.glob("*.gguf"))
    rewrite(sources, [tmp_path / "single.gguf"], lambda name, index: 0)
    targets = shard_names(tmp_path, "dealt", 3)
    deal = random.Random(3)
    # The two parts of a kv_b_proj on different shards, in both orders.
    fixed = {"blk.0.attn_k_b.weight": 2, "blk.0.attn_v_b.weight": 0}
    fixed |= {"blk.1.attn_k_b.weight": 1, "blk.1.attn_v_b.weight": 2}
    rewrite(sources, targets, lambda name, index: fixed.get(name, deal.randrange(3)))
    for path in (tmp_path / "single.gguf", targets[0], targets[2]):
        found = tensors(path, config)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


def test_the_order_in_the_file_does_not_change_the_model(files, data, tmp_path):
    """Merged layers come out in the layer's order (attn_kv_a_mqa may come before attn_q_a)."""
    import gguf
    import torch

    tensors = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(files["Q4_K_M"]).tensors}
    expected = torch.cat([tensors[f"blk.0.attn_{n}.weight"] for n in ("q_a", "kv_a_mqa")])
    reverse = tmp_path / "reverse.gguf"
    with pytest.MonkeyPatch.context() as patch:
        read = gguf.GGUFReader.__init__

        def reversed_reader(reader, *arguments):
            read(reader, *arguments)
            reader.tensors.reverse()

        patch.setattr(gguf.GGUFReader, "__init__", reversed_reader)
        rewrite([files["Q4_K_M"]], [reverse], lambda name, index: 0)
    for path in (files["Q4_K_M"], reverse):
        model = cpu_vllm.load(cpu_vllm.engine_config(path, data / "hf"))
        layer = model.model.layers[0].self_attn.fused_qkv_a_proj
        assert torch.equal(torch.cat(outputs(layer)), expected)
        assert layer.qweight.shard_offset_map[0][1] - layer.qweight.shard_offset_map[0][0] == 256


def outputs(layer):
    """The weights that the layer's method multiplies with, in its order."""
    import torch

    seen = []

    def multiply(x, qweight, qweight_type):
        seen.append(qweight)
        return torch.zeros(x.shape[0], qweight.shape[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release.methods(), "fused_mul_mat_gguf", multiply)
        layer.quant_method.apply(layer, torch.zeros(1, 256))
    return seen
