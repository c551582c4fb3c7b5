"""The tensor parallel ranks' slices put together are the whole, at GLM-5's real dimensions."""

from __future__ import annotations

import json

import cpu_vllm
import gguf_model
import pytest
import release
import torch

# GLM-5's, but for the numbers of layers, experts and (see below) words.
CONFIG = gguf_model.CONFIG | {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 2048,
    "vocab_size": 1024,
}
COLUMNS = ("o_proj", "down_proj")
ROWS = ("q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm5")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    gguf_model.write_gguf(folder / "glm5.gguf", CONFIG, "Q4_K")
    return folder / "glm5.gguf"


@pytest.fixture(scope="module")
def whole(model_file):
    return load(model_file, 0, 1)


def load(model_file, rank, size):
    """Parameters, and the parts of the merged layers, which GGUF pads to one width."""
    model = cpu_vllm.load(cpu_vllm.engine_config(model_file, None), rank=rank, size=size)
    out = cpu_vllm.parameters(model)
    for name, parameter in model.named_parameters():
        if offsets := getattr(parameter, "shard_offset_map", None):
            del out[name]
            for part, (start, end, width) in offsets.items():
                out[f"{name}[{part}]"] = parameter.data[start:end, :width]
    return out


def put_together(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if "qweight_type" in name:
        return parts[0]
    if "gate_up_proj" in name:
        return torch.cat(parts)
    if "w13_" in name:
        halves = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
        return torch.cat([torch.cat(half, dim=1) for half in halves], dim=1)
    if "w2_" in name:
        return torch.cat(parts, dim=2)
    if any(module in name for module in COLUMNS):
        return torch.cat(parts, dim=1)
    if any(module in name for module in ROWS):
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), f"{name} is replicated"
    return parts[0]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_slices_put_together_are_the_whole(size, model_file, whole):
    ranks = [load(model_file, rank, size) for rank in range(size)]
    assert all(rank.keys() == whole.keys() for rank in ranks)
    cut = 0
    for name, expected in whole.items():
        parts = [rank.pop(name) for rank in ranks]
        cut += parts[0].numel() < expected.numel()
        together = put_together(name, parts)
        # kv_b_proj, dense in the model's dtype, is float16 or bfloat16; the rest are bytes.
        assert torch.equal(together, expected), name
    # q_b, kv_b, o of two layers; gate, up, down of MLP and shared expert; w13, w2; both tables.
    assert cut == 16


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_asks_for_the_bytes_that_it_reads(size, model_file, whole):
    """Read-ahead covers the file once over all ranks, but for what every rank reads whole."""
    import transformers
    from vllm.model_executor.model_loader.gguf_mla.plan import LoadPlan
    from vllm.model_executor.model_loader.gguf_mla.tensor_map import Split
    from vllm.model_executor.model_loader.gguf_mla.weights import needed_ranges
    from vllm.transformers_utils.gguf_file import GGUFSet

    config = transformers.AutoConfig.from_pretrained(model_file.parent)
    plan = LoadPlan(GGUFSet.of(model_file), config, tp_size=size)
    for slot in plan.slots.values():
        tensor = plan.tensor(slot)
        ranges = sorted(
            span for rank in range(size) for span in set(needed_ranges(plan, slot, rank, size))
        )
        whole_by_all = slot.split in (Split.NONE, Split.COLUMNS, Split.EXPERT_COLUMNS)
        assert sum(length for _, length in ranges) == tensor.nbytes * (size if whole_by_all else 1)
        assert min(start for start, _ in ranges) == tensor.offset
        assert max(sum(span) for span in ranges) == tensor.offset + tensor.nbytes


def test_pipeline_stages_put_together_are_the_whole(files, data):
    """Each reads its own layers; embedding and head are the first's and the last's."""

    def parameters(**place):
        config = cpu_vllm.engine_config(files["Q4_K_M"], data / "hf")
        return cpu_vllm.parameters(cpu_vllm.load(config, **place))

    whole = parameters()
    first, last = (parameters(stage=stage, stages=2) for stage in range(2))
    assert "model.embed_tokens.qweight" in first
    assert "lm_head.qweight" in last
    assert not first.keys() & last.keys()
    assert cpu_vllm.differing(first | last, whole) == []


MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize("kind", ["bf16", "Q4_K_M"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_draft_in_the_last_stage_has_its_own_embedding(rank, kind, files, data, tmp_path):
    """The target's is in the first stage, out of the proposer's reach."""
    import gguf

    size = 2 if kind == "bf16" else 1  # two ranks would cut Q4_K_M's blocks here

    def parameters(**place):
        engine = cpu_vllm.engine_config(files[kind], data / "hf", speculative_config=MTP)
        model = cpu_vllm.load(engine, draft=True, rank=rank % size, size=size, **place)
        return cpu_vllm.parameters(model)

    draft, alone = parameters(stage=1, stages=2), parameters()
    found = draft["model.embed_tokens.weight"]
    tensor = next(t for t in gguf.GGUFReader(files[kind]).tensors if t.name == "token_embd.weight")
    words = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    mine = words[found.shape[0] * (rank % size) :][: found.shape[0]].to(torch.bfloat16)
    assert torch.equal(found[: len(mine)], mine)
    for model in (draft, alone):
        # The proposer replaces these; without a pipeline the embedding, too.
        for name in [n for n in model if n.startswith("model.embed_tokens.") or ".head." in n]:
            del model[name]
    assert cpu_vllm.differing(draft, alone) == []


def test_data_parallel_ranks_cut_the_experts_too(model_file):
    """Without expert parallelism vLLM cuts each expert for all ranks of both kinds.

    GLM-5's 2,048 columns are eight blocks: at 8 times 2 ranks each would take half of one.
    """
    load(model_file, 0, 8)
    words = (
        r"ffn_down_exps.weight \(Q6_K\).*tensor parallel size 8 times data parallel size 2 .*"
        r"into parts of 128.*--tensor-parallel-size and --data-parallel-size whose product divides 8"
    )

    def load_replica(size):
        config = cpu_vllm.engine_config(model_file, None)
        return cpu_vllm.load(config, rank=0, size=size, data_parallel=2)

    with pytest.raises(ValueError, match=words):
        load_replica(8)
    experts = release.routed_experts(load_replica(4).model.layers[1])
    assert experts.w2_qweight.shape[-1] == 210, "one block of Q6_K"


def test_sixteen_ranks_cut_a_block(model_file):
    words = (
        r"ffn_down_exps.weight \(Q6_K\).*size 16 .*2048 columns into parts of 128.*blocks of 256"
    )
    with pytest.raises(ValueError, match=words):
        load(model_file, 0, 16)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rows_of_the_vocabulary(size):
    """GLM-5's 154,880 words, on narrow rows of Q4_K."""
    import numpy as np
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rng = np.random.default_rng(1)
    data = torch.from_numpy(gguf_model.q4_k_blocks(rng, (154880, 256), 1.0))
    parts = []
    for rank in range(size):
        with cpu_vllm.ranks(VllmConfig(), rank, size):
            config = release.methods().GGUFConfig()
            layer = VocabParallelEmbedding(154880, 256, quant_config=config)
            layer.qweight.weight_loader(layer.qweight, data)
            used = layer.shard_indices
            parts.append(
                layer.qweight.data[: used.org_vocab_end_index - used.org_vocab_start_index]
            )
    assert torch.equal(torch.cat(parts), data)


def give_back_free_memory() -> None:
    """What earlier tests freed would hide growth."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def anonymous_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


@pytest.mark.parametrize(("size", "experts"), [(1, 2), (8, 256)])
def test_iterating_takes_little_memory(size, experts, model_file):
    """No rank copies whole tensors: at most twice its largest slice, dequantized ones included.

    At eight ranks the file's two experts are too few to be anybody's largest slice, so GLM-5's
    256 set the limit.
    """
    import transformers
    from vllm.model_executor.model_loader.gguf_mla.plan import LoadPlan
    from vllm.model_executor.model_loader.gguf_mla.tensor_map import Split
    from vllm.model_executor.model_loader.gguf_mla.weights import iterate_weights
    from vllm.transformers_utils.gguf_file import GGUFSet

    config = transformers.AutoConfig.from_pretrained(model_file.parent)
    plan = LoadPlan(GGUFSet.of(model_file), config, tp_size=size)
    slices = []
    for slot in plan.slots.values():
        share = plan.tensor(slot).nbytes / (1 if slot.split is Split.NONE else size)
        is_expert = slot.split in (Split.EXPERT_ROWS, Split.EXPERT_COLUMNS)
        slices.append(share * experts / 2 if is_expert else share)
    largest = int(max(slices))
    give_back_free_memory()
    before, grown, dense = anonymous_kib(), 0, 0
    for name, tensor in iterate_weights(plan, torch.bfloat16, 0, size):
        grown = max(grown, anonymous_kib() - before)
        dense += name.endswith("kv_b_proj.weight")
        del tensor
    assert dense == 2
    print(f"grown {grown >> 10} MiB, largest slice {largest >> 20} MiB")
    assert grown * 1024 < 2 * largest
    give_back_free_memory()
    # A control of the measure: the same tensors kept as copies are seen.
    kept = [t.clone() for _, t in iterate_weights(plan, torch.bfloat16, 0, size)]
    copied = sum(tensor.nbytes for tensor in kept)
    assert (anonymous_kib() - before) * 1024 > 0.9 * copied
    del kept


def test_each_file_is_opened_once(files, data, monkeypatch):
    """GLM-5's first shard holds 475,000 strings; gguf's reader takes 12 s for them."""
    import collections
    import os

    import gguf
    from vllm.transformers_utils import gguf_file

    opened = collections.Counter()
    real = os.open

    def counting(path, *arguments):
        opened[os.path.basename(path)] += 1
        return real(path, *arguments)

    config = cpu_vllm.engine_config(files["q8_0"], data / "hf")
    monkeypatch.setattr(gguf_file.os, "open", counting)
    monkeypatch.setattr(gguf, "GGUFReader", None)
    cpu_vllm.load(config)
    shards = {path.name for path in files["q8_0"].parent.glob("*.gguf")}
    assert {name: opened[name] for name in shards} == dict.fromkeys(shards, 1)


def test_a_large_vocabulary_takes_no_time(tmp_path):
    """GLM-5's metadata, 154,880 tokens and 320,000 merges: gguf's reader needs 12 s."""
    import time

    import gguf
    import numpy as np
    from vllm.transformers_utils.gguf_file import GGUFFile

    writer = gguf.GGUFWriter(tmp_path / "words.gguf", "glm-dsa")
    writer.add_token_list([f"word{i}" for i in range(154880)])
    writer.add_token_merges([f"a{i} b{i}" for i in range(320000)])
    writer.add_tensor("output_norm.weight", np.arange(256, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    started = time.process_time()
    file = GGUFFile(tmp_path / "words.gguf")
    assert time.process_time() - started < 1.5
    data = file.bytes_of(file.tensors["output_norm.weight"])
    assert data.view(np.float32).tolist() == list(range(256))
