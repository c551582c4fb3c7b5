"""GLM-5.2: layers that attend to what another layer's indexer chose.

Served where the release's model shares indexers, refused where it would run one on every layer.
"""

from __future__ import annotations

import copy
import json
import os
import shutil

import cpu_vllm
import gguf_model
import pytest
import release
from gguf_bytes import Table, rewrite

SERVED = os.environ.get("VLLM_GLM5_TAG") != "v0.20.2"
TYPES = "glm-dsa.attention.indexer.types"
LAYER = "model.layers.1.self_attn"


@pytest.fixture
def hf(data, tmp_path):
    """Make the folder of a config with changes."""

    def make(**changes):
        folder = shutil.copytree(data / "hf", tmp_path / "hf", dirs_exist_ok=True)
        values = json.loads((data / "hf" / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return make


def file_of(files, kind, path, *, types=(True, False), drop=()):
    rewrite(
        [files[kind]], [path], lambda name, index: None if name.startswith(drop) else 0,
        {TYPES: list(types)},
    )  # fmt: skip
    return path


def load(path, folder, **changes):
    return cpu_vllm.load(cpu_vllm.engine_config(path, folder, **changes))


@pytest.mark.parametrize("kind", ["bf16", "Q4_K_M"])
@pytest.mark.parametrize("drop", [(), ("blk.1.indexer.",)], ids=["with tensors", "without"])
@pytest.mark.parametrize(
    "schedule", [{"index_topk_pattern": "FS"}, {"index_topk_freq": 2, "index_skip_topk_offset": 1}]
)
def test_a_shared_layer(kind, drop, schedule, files, data, hf, tmp_path, error):
    """Files of some writers hold tensors for indexers that no layer runs, others do not."""
    path = file_of(files, kind, tmp_path / "shared.gguf", drop=drop)
    if not SERVED:
        with pytest.raises(error, match=r"GLM-5\.2.*0\.23\.0 is the first release"):
            load(path, hf(**schedule))
        return
    model = load(path, hf(**schedule))
    assert [release.shares_indexer(layer) for layer in model.model.layers] == [False, True]
    ours = cpu_vllm.parameters(model)
    whole = cpu_vllm.parameters(load(files[kind], data / "hf"))
    differing = [name.replace("qweight", "weight") for name in cpu_vllm.differing(ours, whole)]
    assert set(differing) - {f"{LAYER}.indexer.wq_b.weight_type"} == {
        f"{LAYER}.indexer.{name}"
        for name in ("k_norm.bias", "k_norm.weight", "wk_weights_proj.weight", "wq_b.weight")
    }
    assert sum(ours[name].numel() for name in ours if ".layers.1.self_attn.indexer." in name) == 0


def test_a_missing_tensor_of_a_full_layer_is_still_named(files, hf, tmp_path, error):
    path = file_of(files, "bf16", tmp_path / "shared.gguf", drop=("blk.0.indexer.proj",))
    words = r"lacks the tensor blk\.0\.indexer\.proj\.weight" if SERVED else "first release"
    with pytest.raises(error, match=words):
        load(path, hf(index_topk_pattern="FS"))


def test_the_draft_has_an_indexer_of_its_own(files, data, hf, tmp_path):
    if not SERVED:
        return
    path = file_of(files, "bf16", tmp_path / "shared.gguf", drop=("blk.1.indexer.",))
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    # By this schedule the draft's layer, the third, would share too; its first step never does.
    config = cpu_vllm.engine_config(path, hf(index_topk_pattern="FSS"), speculative_config=mtp)
    cpu_vllm.load(config)
    ours = cpu_vllm.parameters(cpu_vllm.load(config, draft=True))
    right = gguf_model.checkpoint([files["bf16"]])["model.layers.2.self_attn.indexer.wq_b.weight"]
    import torch

    assert torch.equal(ours["model.layers.2.mtp_block.self_attn.indexer.wq_b.weight"], right)


@pytest.mark.parametrize("where", ["config", "types", "context"])
def test_a_schedule_that_vllm_would_not_see_is_refused(where, files, tmp_path, error, config):
    """Its model reads index_topk_pattern or index_topk_freq alone, and runs all indexers without."""
    from vllm.model_executor.model_loader.gguf_mla.plan import LoadPlan
    from vllm.transformers_utils.gguf_file import GGUFSet

    path, other = files["bf16"], copy.deepcopy(config)
    words = r"indexer.types and the schedule.*\"index_topk_pattern\": \"FS\""
    if where == "config":
        other.indexer_types = ["full", "shared"]
        words = words.replace("indexer.types", "indexer_types")
        path = tmp_path / "old.gguf"
        table = Table(files["Q4_K_M"].read_bytes())
        table.rename(TYPES, TYPES[:-1] + "x")
        table.write(path)
    elif where == "types":
        path = file_of(files, "bf16", tmp_path / "shared.gguf")
    else:
        path = tmp_path / "long.gguf"
        table = Table(files["Q4_K_M"].read_bytes())
        table.set_u32("glm-dsa.context_length", 1048576)
        table.rename(TYPES, TYPES[:-1] + "x")
        table.write(path)
        words = "config.json has no index_topk_freq or index_topk_pattern.*--hf-config-path"
    if not SERVED:
        words = r"GLM-5\.2.*0\.23\.0 is the first release"
    with pytest.raises(error, match=words):
        LoadPlan(GGUFSet.of(path), other)


def test_a_model_that_disagrees_is_refused(files, hf, tmp_path, error, monkeypatch):
    """The schedule is computed again beside the model's own; were it wrong, loading would say so."""
    if not SERVED:
        return
    from vllm.model_executor.model_loader.gguf_mla import checks

    monkeypatch.setattr(checks, "_runs_indexer", lambda config, layer: True)
    path = file_of(files, "bf16", tmp_path / "m.gguf", types=(True, True))
    # Transformers derives indexer_types from the pattern, unless config.json has them.
    folder = hf(index_topk_pattern="FS", indexer_types=["full", "full"])
    with pytest.raises(error, match=r"layer 1 of the model shares another layer's indexer"):
        load(path, folder)
