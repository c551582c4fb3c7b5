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


def blank(path, start: int, end: int, sparse: bool) -> None:
    """Let bytes of a file be zeros, written or not."""
    data = path.read_bytes()
    with path.open("wb") as file:
        file.write(data[:start])
        if sparse:
            file.truncate(len(data))
            file.seek(end)
        else:
            file.write(bytes(end - start))
        file.write(data[end:])


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("part", ["end", "middle"])
def test_data_that_was_never_written(part, sparse, files, tmp_path, data, error, monkeypatch):
    """Programs that fetch a file in many pieces at once make it in its full length first."""
    from vllm.model_executor.model_loader.gguf_mla import weights

    folder = shutil.copytree(files["q8_0"].parent, tmp_path / "shards")
    shard = folder / files["q8_0"].name.replace("00001-of", "00002-of")
    size = shard.stat().st_size
    cpu_vllm.load(cpu_vllm.engine_config(folder, data / "hf"))
    blank(shard, size // 3, size if part == "end" else size * 2 // 3, sparse)
    assert shard.stat().st_size == size
    monkeypatch.setattr(weights, "tensor_view", None)
    words = r"blk\..*00002-of-00006\.gguf: its data is zeros at byte \d+ .*download it again"
    with pytest.raises(error, match=words):
        cpu_vllm.load(cpu_vllm.engine_config(folder, data / "hf"))


@pytest.mark.parametrize(
    ("name", "share", "is_refused"),
    [
        ("blk.1.exp_probs_b.bias", 0.0, False),
        ("blk.0.indexer.k_norm.bias", 0.0, False),
        ("output.weight", 0.6, False),
        ("token_embd.weight", 0.6, False),
        ("output.weight", 0.0, True),
        ("blk.0.attn_norm.weight", 0.0, True),
        ("blk.1.ffn_down_exps.weight", 0.6, True),
        ("blk.1.ffn_down_exps.weight", 0.95, False),
    ],
)
def test_zeros_that_a_model_may_have(name, share, is_refused, files, tmp_path, config, error):
    """Biases, rows behind the last word, some rows of a matrix; `share` of it comes before them."""
    from vllm.transformers_utils.gguf_file import GGUFFile

    path = shutil.copyfile(files["bf16"], tmp_path / "zeros.gguf")
    tensor = GGUFFile(path).tensors[name]
    start = tensor.offset + int(tensor.nbytes * share)
    blank(path, start, tensor.offset + tensor.nbytes, sparse=False)
    if not is_refused:
        cpu_vllm.plan(path, config)
        return
    with pytest.raises(error, match=rf"{name} .*zeros\.gguf: its data is zeros"):
        cpu_vllm.plan(path, config)


def test_zeros_within_a_large_tensor(tmp_path):
    """A piece in each 256 MiB is looked at, whatever is around it."""
    from types import SimpleNamespace

    from vllm.transformers_utils.gguf_file import GGUFFile, GGUFTensor

    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate((1 << 30) + 32)
        for end in (256, 512, 1024):
            file.seek(32 + (end << 20) - 10)
            file.write(b"written")
        with path.open("rb") as opened:
            tensor = GGUFTensor("experts", str(path), 0, (1 << 28,), 32, 1 << 30)
            file.flush()
            blank_byte = GGUFFile.blank_byte(SimpleNamespace(fd=opened.fileno()), tensor)
            assert blank_byte == 32 + (768 << 20) - (64 << 10)
            file.seek(blank_byte)
            file.write(b"too")
            file.flush()
            assert GGUFFile.blank_byte(SimpleNamespace(fd=opened.fileno()), tensor) is None


@pytest.mark.parametrize("what", ["value", "key"])
def test_a_length_that_lies_takes_no_memory(what, table, tmp_path, error, config):
    """A damaged length of a text would have it copied and decoded: gigabytes of it."""
    import tracemalloc

    name = "general.architecture"
    place = table.at(name) + 4 if what == "value" else table.at(name) - len(name) - 8
    struct.pack_into("<Q", table.data, place, 300 << 20)
    path = table.write(tmp_path / "length.gguf")
    os.truncate(path, 400 << 20)
    words = {"value": "metadata key '' is in it twice", "key": "a name in it is longer than 65535"}
    tracemalloc.start()
    try:
        with pytest.raises(error, match=rf"length\.gguf: {words[what]}.*download the file again"):
            cpu_vllm.plan(path, config)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_long_text_is_no_damage(files, tmp_path, config):
    long = {"tokenizer.chat_template": "{{ x }}" * 100_000}
    gguf_bytes.with_metadata(files["bf16"], tmp_path / "long.gguf", long)
    cpu_vllm.plan(tmp_path / "long.gguf", config)


def test_a_file_system_that_maps_nothing(files, config, error, monkeypatch):
    from vllm.transformers_utils import gguf_file

    def refuse(*arguments, **options):
        raise OSError(19, "No such device")

    monkeypatch.setattr(gguf_file.mmap, "mmap", refuse)
    words = r"bf16\.gguf: it cannot be mapped into memory \(No such device\).*Copy it to a disk"
    with pytest.raises(error, match=words):
        cpu_vllm.plan(files["bf16"], config)


def test_a_part_of_a_file(files, tmp_path, data):
    """Cut without llama-gguf-split: to download it again does not help."""
    path = tmp_path / "GLM-5.Q4_K_M.gguf.part1of2"
    path.write_bytes(files["Q4_K_M"].read_bytes()[:1_000_000])
    with pytest.raises(ValueError, match=r"part1of2: .*join all of them, in order, with `cat`"):
        cpu_vllm.engine_config(path, data / "hf")
    path = path.rename(tmp_path / "GLM-5.Q4_K_M.gguf")
    with pytest.raises(ValueError, match=r"cut short: copy or download it again"):
        cpu_vllm.engine_config(path, data / "hf")


@pytest.mark.parametrize("name", ["m-00001-of-00000", "m-00002-of-00001", "m-1-of-999999"])
def test_a_name_that_numbers_no_shard(name, files, tmp_path, data):
    path = shutil.copyfile(files["Q4_K_M"], tmp_path / f"{name}.gguf")
    cpu_vllm.load(cpu_vllm.engine_config(path, data / "hf"))


def test_many_missing_shards_are_counted(files, tmp_path, data):
    path = shutil.copyfile(files["Q4_K_M"], tmp_path / "m-00001-of-00020.gguf")
    with pytest.raises(
        ValueError, match=r"19 of its 20 shards .*m-00009-of-00020.gguf and 11 more"
    ):
        cpu_vllm.engine_config(path, data / "hf")


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
