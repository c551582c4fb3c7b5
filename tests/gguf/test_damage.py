"""Headers that contradict themselves, and files that change under the loader."""

from __future__ import annotations

import os
import shutil
import struct

import cpu_vllm
import gguf_bytes
import pytest
from gguf_bytes import shard_names

GATE, UP = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"


def test_overlapping_tensors(table, tmp_path, error, config):
    table.set_offset(GATE, table.offset(UP))
    words = rf"overlap\.gguf: the tensors '{GATE}' and '{UP}' overlap.*download the file again"
    with pytest.raises(error, match=words):
        cpu_vllm.plan(table.write(tmp_path / "overlap.gguf"), config)


def test_misaligned_tensor(table, tmp_path, error, config):
    table.set_offset(GATE, table.offset(GATE) + 1)
    words = rf"tensor '{GATE}' begins at .* no multiple of .*alignment, 32"
    with pytest.raises(error, match=words):
        cpu_vllm.plan(table.write(tmp_path / "misaligned.gguf"), config)


@pytest.mark.parametrize("offset", [1 << 63, (1 << 64) - 32])
def test_offset_past_the_end(offset, table, tmp_path, error, config):
    table.set_offset(GATE, offset)
    with pytest.raises(error, match=rf"the file has \d+ bytes, but tensor '{GATE}' ends at"):
        cpu_vllm.plan(table.write(tmp_path / "offset.gguf"), config)


def test_key_twice(table, tmp_path, error, config):
    path = tmp_path / "twice.gguf"
    struct.pack_into("<Q", table.data, 16, 2)  # two keys, the second one the first's again
    first = bytes(table.data[24 : table.at("general.architecture") + 4 + 8 + len("glm-dsa")])
    path.write_bytes(bytes(table.data[:24]) + first + first + bytes(64))
    words = r"twice\.gguf: metadata key 'general.architecture' is in it twice"
    with pytest.raises(error, match=words):
        cpu_vllm.plan(path, config)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("split.count", "2", "split.count is '2', which is no whole number"),
        ("general.alignment", "32", "general.alignment is '32', which is no whole number"),
        ("general.alignment", 0, "general.alignment is 0"),
        ("general.architecture", [1, 2], r"general.architecture is \[1, 2\], which is no name"),
        ("general.architecture", 7, "general.architecture is 7, which is no name"),
        ("glm-dsa.attention.layer_norm_rms_epsilon", "x", "rms_epsilon is 'x', which cannot be"),
        ("glm-dsa.expert_weights_scale", [1.0, 2.0], r"weights_scale is \[1.0, 2.0\]"),
        ("glm-dsa.expert_gating_func", [2], r"gating_func is \[2\], which cannot be"),
        ("glm-dsa.expert_gating_func", 9, "chosen by the unknown function 9"),
        ("glm-dsa.attention.indexer.types", 1, "indexer.types is 1, which cannot be"),
    ],
)
def test_metadata_of_another_type(key, value, words, files, tmp_path, error, config):
    path = tmp_path / "types.gguf"
    gguf_bytes.with_metadata(files["bf16"], path, {key: value})
    with pytest.raises(error, match=rf"types\.gguf: .*{words}"):
        cpu_vllm.plan(path, config)


def test_a_later_shard_under_another_name(files, tmp_path, data):
    """A blob of the hub's cache, or the shards' names exchanged: no shard but the first says."""
    shards = sorted(files["q8_0"].parent.glob("*.gguf"))
    shutil.copyfile(shards[2], tmp_path / "blob.gguf")
    with pytest.raises(ValueError, match=r"blob\.gguf: it is shard 3 of its set .*the first shard"):
        cpu_vllm.engine_config(tmp_path / "blob.gguf", data / "hf")
    targets = shard_names(tmp_path, "rotated", len(shards))
    for source, target in zip(shards, targets[1:] + targets[:1], strict=True):
        shutil.copyfile(source, target)
    with pytest.raises(ValueError, match=r"rotated-00001.*: it is shard 6 of its set"):
        cpu_vllm.engine_config(targets[0], data / "hf")


@pytest.mark.parametrize(("architecture", "shown"), [("llama", "'llama'"), (None, "None")])
def test_file_of_another_architecture(architecture, shown, files, tmp_path, error, data):
    gguf_bytes.with_metadata(
        files["bf16"], tmp_path / "other.gguf", {"general.architecture": architecture}
    )
    engine = cpu_vllm.engine_config(tmp_path / "other.gguf", data / "hf")
    with pytest.raises(error, match=rf"architecture {shown}, but config.json is GLM-5's"):
        cpu_vllm.load(engine)


def test_a_pointer_of_git_lfs(tmp_path, data):
    path = tmp_path / "pointer.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 40000000\n")
    with pytest.raises(ValueError, match=r"pointer\.gguf: not a GGUF file .*git lfs pull"):
        cpu_vllm.engine_config(path, data / "hf")


@pytest.mark.parametrize("size", [0, 4, 23])
def test_next_to_nothing(size, tmp_path, data, files):
    path = tmp_path / "short.gguf"
    path.write_bytes(files["bf16"].read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{size} bytes are no GGUF file. Copy or download it"):
        cpu_vllm.engine_config(path, data / "hf")


def test_other_rope_scaling_is_said(files, tmp_path, config, caplog_vllm):
    scaling = {"glm-dsa.rope.scaling.type": "yarn", "glm-dsa.rope.scaling.factor": 40.0}
    gguf_bytes.with_metadata(files["bf16"], tmp_path / "yarn.gguf", scaling)
    cpu_vllm.plan(files["bf16"], config)
    assert "rope.scaling" not in caplog_vllm.text
    cpu_vllm.plan(tmp_path / "yarn.gguf", config)
    assert "rope.scaling.type is yarn, but the config says 'default'" in caplog_vllm.text


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.indexer.k_norm.bias"])
def test_a_quantized_vector(name, files, tmp_path, config):
    """llama-quantize leaves vectors alone; other tools need not."""
    import gguf
    import numpy as np
    import torch
    from vllm.model_executor.model_loader.gguf_mla.weights import iterate_weights

    kind = gguf.GGMLQuantizationType.Q8_0
    with pytest.MonkeyPatch.context() as patch:
        add = gguf.GGUFWriter.add_tensor

        def quantized(writer, tensor_name, data, raw_dtype=None):
            if tensor_name == name:
                values = np.linspace(-1, 1, data.size, dtype=np.float32)
                data, raw_dtype = gguf.quants.quantize(values, kind), kind
            add(writer, tensor_name, data, raw_dtype=raw_dtype)

        patch.setattr(gguf.GGUFWriter, "add_tensor", quantized)
        gguf_bytes.rewrite([files["bf16"]], [tmp_path / "v.gguf"], lambda name, index: 0)
    planned = cpu_vllm.plan(tmp_path / "v.gguf", config)
    delivered = dict(iterate_weights(planned, torch.float32))[planned.slots[name].name]
    steps = torch.linspace(-1, 1, delivered.numel())
    assert torch.allclose(delivered, steps, atol=1 / 127)


class Changed:
    """Does something to a file when the loader has taken its twentieth tensor."""

    def __init__(self, monkeypatch, change):
        from vllm.model_executor.model_loader.gguf_mla import weights

        self.count = 0
        real = weights.tensor_view

        def counting(files, tensor):
            self.count += 1
            if self.count == 20:
                change()
            return real(files, tensor)

        monkeypatch.setattr(weights, "tensor_view", counting)


def test_a_file_that_is_written_to(files, data, tmp_path, monkeypatch, error):
    """A download that still runs, or an rsync --inplace: half of each would be served."""
    path = shutil.copyfile(files["bf16"], tmp_path / "model.gguf")

    def overwrite():
        with path.open("r+b") as file:
            file.seek(-500_000, os.SEEK_END)
            file.write(bytes(400_000))

    changed = Changed(monkeypatch, overwrite)
    with pytest.raises(error, match=r"model\.gguf: it was changed while it was loaded"):
        cpu_vllm.load(cpu_vllm.engine_config(path, data / "hf"))
    assert changed.count == 20, "noticed before the next tensor"


@pytest.mark.parametrize("change", [os.unlink, lambda path: shutil.move(f"{path}.new", path)])
def test_a_file_that_is_replaced(change, files, data, tmp_path, monkeypatch):
    """Its bytes stay until the loader has read them: what was planned is what is served."""
    path = shutil.copyfile(files["bf16"], tmp_path / "model.gguf")
    (tmp_path / "model.gguf.new").write_bytes(b"GGUF")
    expected = cpu_vllm.parameters(cpu_vllm.load(cpu_vllm.engine_config(path, data / "hf")))
    engine = cpu_vllm.engine_config(path, data / "hf")
    Changed(monkeypatch, lambda: change(path))
    assert cpu_vllm.differing(cpu_vllm.parameters(cpu_vllm.load(engine)), expected) == []


def test_nothing_of_a_file_is_held_after_the_load(files, data):
    def held() -> list[str]:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        opened = [os.readlink(link) for link in links if os.path.islink(link)]
        with open("/proc/self/maps") as maps:
            mapped = maps.read().splitlines()
        return [name for name in opened + mapped if name.endswith(".gguf")]

    before = held()  # failed tests keep theirs in their tracebacks
    model = cpu_vllm.load(cpu_vllm.engine_config(files["q8_0"], data / "hf"))
    assert sorted(held()) == sorted(before)
    del model
