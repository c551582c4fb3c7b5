"""Releases without GGUF in the tree: vllm-gguf-plugin, and what it lacks for these files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import cpu_vllm
import pytest
from release import IN_TREE, loader_class

GROUP = "vllm.general_plugins"
plugin_only = pytest.mark.plugin


@pytest.fixture
def loading(monkeypatch):
    """vLLM's loaders and parsers and the plugin's adapters as before any plugin registered."""
    from vllm.model_executor import model_loader
    from vllm.plugins import load_general_plugins
    from vllm.transformers_utils import config as configs
    from vllm_gguf_plugin import weights_adapter

    load_general_plugins()  # once in a process

    found = SimpleNamespace(
        loaders=dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER),
        parsers=dict(configs._CONFIG_FORMAT_TO_CONFIG_PARSER),
        adapters=weights_adapter._ADAPTER_REGISTRY[1:],
    )
    del found.loaders["gguf"], found.parsers["gguf"]
    monkeypatch.setattr(configs, "_CONFIG_FORMAT_TO_CONFIG_PARSER", found.parsers)
    monkeypatch.setattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", found.loaders)
    # The plugin took the dictionary by name when it was imported.
    monkeypatch.setattr("vllm_gguf_plugin.plugin._LOAD_FORMAT_TO_MODEL_LOADER", found.loaders)
    monkeypatch.setattr(weights_adapter, "_ADAPTER_REGISTRY", found.adapters)
    return found


@pytest.fixture
def problem(monkeypatch):
    """Set what gguf_mla finds wrong, and forget it afterwards."""
    from vllm.plugins import gguf_mla

    monkeypatch.setattr(gguf_mla, "_problem", gguf_mla._problem)
    return gguf_mla


def test_the_release_declares_plugin_and_entry_point(tree):
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"][GROUP].get("gguf_mla")
    assert declared == (None if IN_TREE else "vllm.plugins.gguf_mla:register")
    required = "vllm-gguf-plugin==0.0.5" in (tree / "requirements" / "cuda.txt").read_text()
    assert required == (not IN_TREE)


@plugin_only
@pytest.mark.parametrize("first", ["plugin", "gguf_mla"])
def test_either_may_register_first(first, loading, problem, config):
    import vllm_gguf_plugin
    from vllm_gguf_plugin.weights_adapter import Gemma3GGUFAdapter, get_weights_adapter

    order = [vllm_gguf_plugin.register, problem.register]
    if first == "gguf_mla":
        order.reverse()
    for register in (*order, *order):
        register()
    assert loading.loaders["gguf"].__name__ == "MlaModelLoader"
    assert loading.parsers["gguf"].__name__ == "MlaConfigParser"
    assert type(get_weights_adapter(config)).__name__ == "MlaWeightsAdapter"
    assert loading.adapters[1:] == [Gemma3GGUFAdapter]
    assert problem._problem is None


@plugin_only
def test_without_the_adapter_the_plugin_knows_no_such_model(files, data, loading):
    """The control of all that is loaded here."""
    import vllm_gguf_plugin

    vllm_gguf_plugin.register()
    assert loading.loaders["gguf"] is vllm_gguf_plugin.GGUFModelLoader
    with pytest.raises(RuntimeError, match="Unknown gguf model_type: glm_moe_dsa"):
        cpu_vllm.load(cpu_vllm.engine_config(files["bf16"], data / "hf"))


@plugin_only
def test_the_plugin_s_own_loader_takes_the_adapter(files, data, loading):
    """Its load_model, with the adapter alone: what a target needs of the adapter's interface."""
    import vllm_gguf_plugin
    from vllm.plugins.gguf_mla.adapter import MlaGGUFConfig, MlaModelLoader, MlaWeightsAdapter

    vllm_gguf_plugin.register()
    config = cpu_vllm.engine_config(files["q8_0"], data / "hf")
    loader = vllm_gguf_plugin.GGUFModelLoader
    loading.adapters.insert(0, MlaWeightsAdapter)
    adapter = MlaWeightsAdapter(config.model_config.hf_config)
    with cpu_vllm.ranks(config):
        spec = adapter.prepare_loading(str(files["q8_0"]), config.model_config)
    assert spec.weights_source == sorted(map(str, files["q8_0"].parent.glob("*.gguf")))
    config.quant_config = MlaGGUFConfig.of(config.quant_config, frozenset(spec.unquantized_modules))
    theirs = cpu_vllm.parameters(cpu_vllm.load(config))
    assert loading.loaders["gguf"] is loader
    loading.loaders["gguf"] = MlaModelLoader
    ours = cpu_vllm.load(cpu_vllm.engine_config(files["q8_0"], data / "hf"))
    assert cpu_vllm.differing(cpu_vllm.parameters(ours), theirs) == []


@plugin_only
def test_the_indexer_s_query_projection_stays_quantized(files, data, monkeypatch):
    """ReplicatedLinear's own loader refuses a parameter without a shape, as the control shows."""
    from vllm.plugins.gguf_mla import adapter
    from vllm_gguf_plugin.quantization import GGUFLinearMethod

    model = cpu_vllm.load(cpu_vllm.engine_config(files["Q4_K_M"], data / "hf"))
    assert model.model.layers[0].self_attn.indexer.wq_b.qweight.shape == (256, 144)
    monkeypatch.setattr(adapter, "_LinearMethod", GGUFLinearMethod)
    with pytest.raises(AssertionError, match="Tried to load weights of size"):
        cpu_vllm.load(cpu_vllm.engine_config(files["Q4_K_M"], data / "hf"))


@plugin_only
def test_each_rank_gets_its_own_rows_of_a_merged_layer(files, data, monkeypatch):
    """The plugin's own method gives all of them the first's, without a word."""
    import torch
    from vllm.plugins.gguf_mla import adapter

    def gate_and_up(rank, size):
        config = cpu_vllm.engine_config(files["q8_0"], data / "hf")
        layer = cpu_vllm.load(config, rank=rank, size=size).model.layers[0].mlp.gate_up_proj
        return layer.qweight.data.chunk(2)

    gate, up = gate_and_up(0, 1)
    ranks = [gate_and_up(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([rank[0] for rank in ranks]), gate)
    assert torch.equal(torch.cat([rank[1] for rank in ranks]), up)
    monkeypatch.setattr(adapter, "MergedColumnParallelLinear", type(None))
    theirs = gate_and_up(1, 2)
    assert torch.equal(theirs[0], ranks[0][0])
    assert torch.equal(theirs[1], ranks[0][1])


@plugin_only
def test_a_name_that_has_weight_in_it_twice(files, data):
    """The indexer's weights_proj, quantized: the plugin renames each "weight", as the control shows.

    Ours comes dense, below the rows of wk.
    """
    import gguf
    import torch
    from vllm_gguf_plugin.weight_utils import gguf_quant_weights_iterator_multi

    name = "model.layers.0.self_attn.indexer.weights_proj.weight"
    (tensor,) = (
        one
        for one in gguf.GGUFReader(files["Q4_K_M"]).tensors
        if one.name == "blk.0.indexer.proj.weight"
    )
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_K
    model = cpu_vllm.load(cpu_vllm.engine_config(files["Q4_K_M"], data / "hf"))
    fused = model.model.layers[0].self_attn.indexer.wk_weights_proj.weight
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(fused[-len(expected) :], expected.to(fused.dtype))
    theirs = list(gguf_quant_weights_iterator_multi([files["Q4_K_M"]], {tensor.name: name}))
    assert [renamed.rpartition("indexer.")[2] for renamed, _ in theirs] == [
        "qweight_types_proj.qweight_type", "qweights_proj.qweight",
    ]  # fmt: skip
    with pytest.raises(KeyError, match="qweight_types_proj"):
        model.load_weights(iter(theirs))


@plugin_only
def test_a_layer_is_dense_by_its_whole_name():
    """The plugin asks whether a dense one's name is part of its own, as the control shows."""
    from unittest import mock

    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.plugins.gguf_mla.adapter import MlaGGUFConfig
    from vllm_gguf_plugin.quantization import GGUFConfig, GGUFLinearMethod
    from vllm_gguf_plugin.quantization.utils import is_layer_skipped_gguf

    dense, longer = "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_up_proj"
    assert is_layer_skipped_gguf(longer, [dense])
    config = MlaGGUFConfig.of(GGUFConfig(), frozenset({dense}))
    layer = mock.Mock(spec=LinearBase)
    assert isinstance(config.get_quant_method(layer, dense), UnquantizedLinearMethod)
    assert isinstance(config.get_quant_method(layer, longer), GGUFLinearMethod)


@pytest.fixture
def with_draft(files, data):
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    return cpu_vllm.engine_config(files["q8_0"], data / "hf", speculative_config=mtp)


@plugin_only
def test_neither_draft_nor_shards_change_the_target_s_config(with_draft):
    cpu_vllm.load(with_draft)
    cpu_vllm.load(with_draft, draft=True)
    target = with_draft.model_config.hf_config
    assert target.architectures == ["GlmMoeDsaForCausalLM"]
    assert target.model_type == "glm_moe_dsa"
    assert target.tie_word_embeddings is False


@plugin_only
def test_the_plugin_s_own_draft_changes_it(with_draft, monkeypatch):
    """The control: by its load_model the target is the draft from then on, and wq_b ends it."""
    import vllm_gguf_plugin
    from vllm.plugins.gguf_mla.adapter import MlaModelLoader

    monkeypatch.setattr(MlaModelLoader, "load_model", vllm_gguf_plugin.GGUFModelLoader.load_model)
    with pytest.raises(AssertionError, match="Tried to load weights of size"):
        cpu_vllm.load(with_draft, draft=True)
    assert with_draft.model_config.hf_config.architectures != ["GlmMoeDsaForCausalLM"]


@plugin_only
def test_the_plugin_s_own_shards_tie_the_embeddings(files, config):
    """The control: it looks for lm_head in each shard alone, and one of them has none."""
    import copy

    import gguf
    from vllm_gguf_plugin.weights_adapter.default import GGUFWeightsAdapter

    shards = sorted(files["q8_0"].parent.glob("*.gguf"))
    names = [{tensor.name for tensor in gguf.GGUFReader(path).tensors} for path in shards]
    assert sum("output.weight" in inside for inside in names) == 1
    theirs = copy.deepcopy(config)
    assert theirs.tie_word_embeddings is False
    GGUFWeightsAdapter(theirs).update_tie_word_embeddings(
        str(files["q8_0"]), theirs, {"output.weight": "lm_head.weight"}
    )
    assert theirs.tie_word_embeddings is True


@plugin_only
@pytest.mark.parametrize("place", ["", "UD-Q8_0/"])
@pytest.mark.parametrize("kind", ["repository", "folder"])
def test_files_in_a_folder_of_a_repository(place, kind, files, data, monkeypatch, tmp_path):
    """unsloth's layout. A repository's file brings all its shards."""
    import fnmatch

    from vllm.engine import arg_utils
    from vllm.model_executor.model_loader import weight_utils

    names = []
    (tmp_path / place).mkdir(exist_ok=True)
    for path in files["q8_0"].parent.glob("*.gguf"):
        names.append(place + path.name.replace("-Q8_0-", "-UD-Q8_0-"))
        shutil.copyfile(path, tmp_path / names[-1])
    first = min(names)
    asked = []

    def download(**options):
        asked.append((options["model_name_or_path"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(weight_utils, "download_weights_from_hf", download)
    # As it goes while the hub is online.
    companions = "vllm.transformers_utils.gguf_companions"
    monkeypatch.setattr(f"{companions}._cached_file", lambda *reference: None)
    monkeypatch.setattr(arg_utils, "get_model_path", lambda model, revision=None: model)
    references = [f"{tmp_path}:Q8_0"]
    if kind == "repository":
        references = ["someone/model-GGUF:UD-Q8_0", f"someone/model-GGUF/{first}"]
    for reference in references:
        config = cpu_vllm.engine_config(reference, data / "hf")
        loader = loader_class()(config.load_config)
        assert loader._prepare_weights(config.model_config) == str(tmp_path / first)
    for repository, patterns in asked:
        assert repository == "someone/model-GGUF"
        taken = {name for name in names for pattern in patterns if fnmatch.fnmatch(name, pattern)}
        assert taken == set(names)
    assert len(asked) == (2 if kind == "repository" else 0)


@plugin_only
def test_a_quantization_that_is_not_there(data, tmp_path, monkeypatch):
    from vllm.engine import arg_utils

    monkeypatch.setattr(arg_utils, "get_model_path", lambda model, revision=None: model)
    config = cpu_vllm.engine_config(f"{tmp_path}:Q8_0", data / "hf")
    with pytest.raises(ValueError, match=r"it holds no file \*-Q8_0\.gguf"):
        cpu_vllm.load(config)


@plugin_only
@pytest.mark.parametrize("fault", ["missing", "other version", "broken"])
def test_a_plugin_that_cannot_be_used(fault, files, data, tmp_path, problem, loading, monkeypatch):
    """A server of another model does not notice; who has such a file is told what to install."""
    from importlib import metadata

    def version(name):
        assert name == "vllm-gguf-plugin"
        if fault == "missing":
            raise metadata.PackageNotFoundError(name)
        return "0.0.6" if fault == "other version" else "0.0.5"

    monkeypatch.setattr(problem.metadata, "version", version)
    if fault != "other version":
        monkeypatch.setitem(sys.modules, "vllm_gguf_plugin", None)
    if fault == "missing":
        monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "vllm.plugins.gguf_mla.adapter")
    monkeypatch.delattr(problem, "adapter")
    problem.register()
    assert "gguf" not in loading.loaders
    shutil.copyfile(data / "hf" / "config.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.gguf").touch()  # a repository may have both
    assert cpu_vllm.engine_config(tmp_path, None).load_config.load_format == "auto"
    words = r"bf16\.gguf: .*pip install vllm-gguf-plugin==0\.0\.5"
    with pytest.raises(ValueError, match=words):
        cpu_vllm.engine_config(files["bf16"], data / "hf")


@plugin_only
def test_a_list_of_plugins_that_leaves_it_out(files, data, tree, tmp_path):
    """VLLM_PLUGINS=gguf in a process of its own."""
    program = """if True:
        import sys
        from pathlib import Path
        sys.path[:0] = sys.argv[1:4]
        import cpu_vllm
        cpu_vllm.start(Path(sys.argv[4]), Path(sys.argv[5]))
        cpu_vllm.engine_config(sys.argv[6], Path(sys.argv[7]))
    """
    here = Path(__file__).parent
    folders = [here, here.parent / "gpu", here.parent / "selection", tree, tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, [*folders, files["bf16"], data / "hf"])],
        env={**cpu_vllm.os.environ, "VLLM_PLUGINS": "gguf"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ValueError" in done.stderr
    assert "VLLM_PLUGINS leaves out vLLM's own plugin gguf_mla" in done.stderr


@plugin_only
@pytest.mark.parametrize("with_config", [True, False])
def test_the_tokenizer_s_folder_has_the_config(with_config, files, data, tmp_path):
    """The plugin's own way to name the original model."""
    folder = shutil.copytree(data / "hf", tmp_path / "hf")
    given = {"tokenizer": str(folder), "skip_tokenizer_init": False}
    if with_config:
        config = cpu_vllm.engine_config(files["bf16"], None, **given).model_config
        assert config.hf_config_path == config.tokenizer == str(folder)
        return
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"needs the config\.json of the original"):
        cpu_vllm.engine_config(files["bf16"], None, **given)
