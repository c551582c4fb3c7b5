"""Where config, tokenizer, model name and dtype come from."""

from __future__ import annotations

import json
import os
import shutil

import cpu_vllm
import pytest
from release import IN_TREE, loader_class, weights_of


@pytest.fixture
def folder(files, data, tmp_path):
    """A folder with a GGUF file alone."""
    shutil.copyfile(files["Q4_K_M"], tmp_path / "model.gguf")
    return tmp_path


def test_config_beside_the_file(folder, data):
    shutil.copyfile(data / "hf" / "config.json", folder / "config.json")
    config = cpu_vllm.engine_config(folder / "model.gguf", None)
    assert config.model_config.hf_config.num_hidden_layers == 2
    assert config.model_config.hf_config_path == str(folder)
    assert config.load_config.load_format == "gguf"
    cpu_vllm.load(config)


def test_an_option_beats_the_file_beside(folder, data):
    other = json.loads((data / "hf" / "config.json").read_text()) | {"num_hidden_layers": 7}
    (folder / "config.json").write_text(json.dumps(other))
    config = cpu_vllm.engine_config(folder / "model.gguf", data / "hf")
    assert config.model_config.hf_config.num_hidden_layers == 2


def test_no_config_is_one_clear_error(folder):
    words = r"model\.gguf: .*'glm-dsa'.*topk_method and indexer_rope_interleave.*--hf-config-path"
    with pytest.raises(ValueError, match=words):
        cpu_vllm.engine_config(folder / "model.gguf", None)


def test_the_tokenizer_comes_with_the_config(folder, data):
    config = cpu_vllm.engine_config(folder / "model.gguf", data / "hf", skip_tokenizer_init=False)
    assert config.model_config.tokenizer == str(data / "hf")


def test_no_tokenizer_is_one_clear_error(folder, data):
    shutil.copyfile(data / "hf" / "config.json", folder / "config.json")
    with pytest.raises(ValueError, match=r"cannot build a tokenizer.*Pass --tokenizer"):
        cpu_vllm.engine_config(folder / "model.gguf", None, skip_tokenizer_init=False)


def test_a_folder_of_shards(files, data):
    config = cpu_vllm.engine_config(files["q8_0"].parent, data / "hf").model_config
    assert weights_of(config) == str(files["q8_0"])
    assert config.served_model_name == str(files["q8_0"].parent)


def test_a_folder_of_two_models_is_refused(folder, files, data):
    shutil.copyfile(files["bf16"], folder / "other.gguf")
    with pytest.raises(ValueError, match=r"it holds 2 GGUF models \(model\.gguf, other\.gguf\)"):
        cpu_vllm.engine_config(folder, data / "hf")


def test_a_file_in_a_folder_of_the_folder(folder, data):
    """`hf download REPOSITORY --include "*UD-Q4_K_XL*" --local-dir FOLDER` makes these."""
    (folder / "UD-Q4_K_XL").mkdir()
    (folder / "model.gguf").rename(folder / "UD-Q4_K_XL" / "GLM-5-UD-Q4_K_XL.gguf")
    config = cpu_vllm.engine_config(folder, data / "hf").model_config
    assert weights_of(config) == str(folder / "UD-Q4_K_XL" / "GLM-5-UD-Q4_K_XL.gguf")
    shutil.copyfile(data / "hf" / "config.json", folder / "config.json")
    config = cpu_vllm.engine_config(folder, None).model_config
    assert config.hf_config_path == str(folder)
    cpu_vllm.load(cpu_vllm.engine_config(folder, None))
    (folder / "Q8_0").mkdir()
    shutil.copyfile(folder / "UD-Q4_K_XL" / "GLM-5-UD-Q4_K_XL.gguf", folder / "Q8_0" / "b.gguf")
    with pytest.raises(ValueError, match=r"2 GGUF models \(Q8_0/b\.gguf, UD-Q4_K_XL/GLM-5-UD"):
        cpu_vllm.engine_config(folder, data / "hf")


@pytest.mark.parametrize("name", ["modell.gguf", "{folder}/modell.gguf", "{folder}/no/x.GGUF"])
def test_a_name_without_a_file(name, folder, data, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"(?i)\.gguf: there is no such file"):
        cpu_vllm.engine_config(name.format(folder=folder), data / "hf")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./no/x.gguf", "there is no such file. Look at the name"),
        ("~/no/x.gguf", "there is no such file. .* The shell has left the ~ in it"),
        ("{folder}/model.gguf/", "Not a directory. Look at the name"),
        ("{folder}/pipe.gguf", "it is no regular file"),
        ("{folder}/link.gguf", "a link to blobs/0, which is not there. .*copy or mount"),
    ],
)
def test_a_name_that_cannot_be_a_repository(name, words, folder, data):
    """The hub's client says of these that a repository's id has another form."""
    os.mkfifo(folder / "pipe.gguf")
    (folder / "link.gguf").symlink_to("blobs/0")
    with pytest.raises(ValueError, match=rf"\.gguf/?: {words}"):
        cpu_vllm.engine_config(name.format(folder=folder), data / "hf")
    # A link that leads somewhere is a file.
    (folder / "blobs").mkdir()
    (folder / "model.gguf").rename(folder / "blobs" / "0")
    cpu_vllm.load(cpu_vllm.engine_config(folder / "link.gguf", data / "hf"))


def test_a_folder_that_may_not_be_entered(folder, data, monkeypatch):
    """It is no missing file: the name is right."""
    from vllm.transformers_utils import gguf_companions

    real = os.stat

    def refuse(path, *arguments, **options):
        if str(path).endswith("model.gguf"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(gguf_companions.os, "stat", refuse)
    words = r"model\.gguf: Permission denied. .* what the server's user may read"
    with pytest.raises(ValueError, match=words):
        cpu_vllm.engine_config(folder / "model.gguf", data / "hf")


def test_a_folder_of_links_without_their_files(files, data, tmp_path):
    """A snapshot of the hub's cache that was copied or mounted alone."""
    for path in files["q8_0"].parent.glob("*.gguf"):
        (tmp_path / path.name).symlink_to(f"../../blobs/{path.name}")
    words = r"00001-of-00006\.gguf: a link to .*, which is not there.*`snapshots` and `blobs`"
    with pytest.raises(ValueError, match=words):
        cpu_vllm.engine_config(tmp_path, data / "hf")


@pytest.mark.parametrize(
    "name", ["GLM-5-imatrix.gguf", "imatrix_of_someone.gguf", "mmproj-F16.gguf"]
)
def test_other_files_of_a_repository_are_no_model(name, files, data, tmp_path):
    """llama-imatrix writes GGUF files, and repositories have them above the shards' folder."""
    (tmp_path / "Q4_K_M").mkdir()
    model = shutil.copyfile(files["Q4_K_M"], tmp_path / "Q4_K_M" / "GLM-5-Q4_K_M.gguf")
    shutil.copyfile(files["Q4_K_M"], tmp_path / name)
    config = cpu_vllm.engine_config(tmp_path, data / "hf").model_config
    assert weights_of(config) == str(model)
    # The control: a model that was quantized with one has the word in its name, too.
    (tmp_path / name).rename(tmp_path / "GLM-5-imatrix-Q4_K_M.gguf")
    config = cpu_vllm.engine_config(tmp_path, data / "hf").model_config
    assert weights_of(config) == str(tmp_path / "GLM-5-imatrix-Q4_K_M.gguf")


@pytest.fixture
def hub(files, tmp_path, monkeypatch):
    """The hub's cache with a repository, as hf_hub lays it out; nothing can be downloaded."""
    from huggingface_hub import constants
    from vllm.transformers_utils.gguf_file import shard_paths

    repository = tmp_path / "models--someone--GLM-5-GGUF"
    snapshot = repository / "snapshots" / ("0" * 40) / "UD-Q8_0"
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for number, path in enumerate(shard_paths(files["q8_0"])):
        blob = shutil.copyfile(path, repository / "blobs" / f"{number:064x}")
        name = path.rsplit("/", 1)[1].replace("-Q8_0-", "-UD-Q8_0-")
        (snapshot / name).symlink_to(blob)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert constants.HF_HUB_OFFLINE
    return snapshot


def test_repository_and_quantization_offline(hub, data):
    """Upstream looks for a repository called `someone/GLM-5-GGUF:UD-Q8_0` then."""
    named = "someone/GLM-5-GGUF:UD-Q8_0"
    engine = cpu_vllm.engine_config(named, data / "hf")
    first = hub / "glm-dsa-micro-UD-Q8_0-00001-of-00006.gguf"
    assert weights_of(engine.model_config) == str(first)
    assert engine.model_config.served_model_name == named
    cpu_vllm.load(engine)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("someone/GLM-5-GGUF:Q4_K_M", "the cache holds no file of the quantization Q4_K_M"),
        ("someone/GLM-6-GGUF:Q4_K_M", "someone/GLM-6-GGUF: it is not in the cache of the hub"),
    ],
)
def test_repository_that_is_not_in_the_cache(named, words, hub, data):
    with pytest.raises(ValueError, match=rf"{words}.*offline"):
        cpu_vllm.engine_config(named, data / "hf")


def test_a_draft_without_its_config(folder, files, data):
    """--hf-config-path is the target's: the error must not name it."""
    if not IN_TREE:
        return  # the plugin's parser says it in its own words
    draft = {"method": "mtp", "num_speculative_tokens": 1, "model": str(folder / "model.gguf")}
    with pytest.raises(ValueError, match=r"needs the config.json .* Put its config.json into"):
        cpu_vllm.engine_config(files["bf16"], data / "hf", speculative_config=draft)


def test_a_folder_of_safetensors_is_left_alone(folder, data):
    shutil.copyfile(data / "hf" / "config.json", folder / "config.json")
    (folder / "model.safetensors").touch()
    config = cpu_vllm.engine_config(folder, None)
    assert config.model_config.model == str(folder)
    assert config.load_config.load_format == "auto"


def test_repository_and_quantization(files, data, monkeypatch, tmp_path):
    """repo:UD-Q4_K_XL finds the shards in the repository's sub-folder."""
    from vllm.model_executor.model_loader import weight_utils
    from vllm.transformers_utils.gguf_file import shard_paths

    snapshot = tmp_path / "UD-Q8_0"
    snapshot.mkdir()
    for path in shard_paths(files["q8_0"]):
        name = path.rsplit("/", 1)[1].replace("-Q8_0-", "-UD-Q8_0-")
        shutil.copyfile(path, snapshot / name)
    monkeypatch.setattr(weight_utils, "download_weights_from_hf", lambda **options: str(tmp_path))
    from vllm.config import LoadConfig
    from vllm.engine import arg_utils

    # As it goes while the hub is online.
    companions = "vllm.transformers_utils.gguf_companions"
    monkeypatch.setattr(f"{companions}._cached_file", lambda *reference: None)
    monkeypatch.setattr(arg_utils, "get_model_path", lambda model, revision=None: model)
    config = cpu_vllm.engine_config("someone/model-GGUF:UD-Q8_0", data / "hf")
    assert config.load_config.load_format == "gguf"
    loader = loader_class()(LoadConfig(load_format="gguf"))
    first = loader._prepare_weights(config.model_config)
    assert first.endswith("UD-Q8_0-00001-of-00006.gguf")
    cpu_vllm.load(config)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((9, 0), "bfloat16"), ((10, 0), "float16"), ((12, 0), "float16"), ((12, 1), "float16")],
)
def test_auto_dtype(capability, dtype, files, data, platform, monkeypatch, caplog_vllm):
    """GGUFConfig refuses bfloat16 from 10.0 on; auto must not end there in an error.

    The plugin's GGUFConfig takes it everywhere.
    """
    dtype = dtype if IN_TREE else "bfloat16"
    monkeypatch.setattr(platform, "faked", capability)
    config = cpu_vllm.engine_config(files["Q4_K_M"], data / "hf")
    assert str(config.model_config.dtype) == f"torch.{dtype}"
    assert ("in float16: bfloat16 is not supported" in caplog_vllm.text) == (dtype == "float16")


def test_bfloat16_is_refused_where_upstream_refuses_it(files, data, platform, monkeypatch):
    if not IN_TREE:
        return
    monkeypatch.setattr(platform, "faked", (12, 0))
    with pytest.raises(ValueError, match="bfloat16 is not supported for quantization"):
        cpu_vllm.engine_config(files["Q4_K_M"], data / "hf", dtype="bfloat16")


def test_the_remedy_names_a_dtype_that_the_file_takes(files, data, platform, monkeypatch):
    """Typed as it stands, it has to start the server: not bfloat16, which GGUFConfig refuses."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.remedy import attention_remedy
    from vllm.v1.attention.selector import AttentionSelectorConfig

    monkeypatch.setattr(platform, "faked", (12, 0))
    asked = AttentionSelectorConfig(576, torch.float32, "auto", None, use_mla=True, use_sparse=True)
    refused = cpu_vllm.engine_config(files["Q4_K_M"], data / "hf", dtype="float32")
    with set_current_vllm_config(refused):
        backends = [AttentionBackendEnum.TRITON_MLA_SPARSE]
        sentence = attention_remedy(DeviceCapability(12, 0), asked, backends)
    dtype = "float16" if IN_TREE else "bfloat16"
    assert f"--dtype {dtype} makes TRITON_MLA_SPARSE valid" in sentence
    cpu_vllm.load(cpu_vllm.engine_config(files["Q4_K_M"], data / "hf", dtype=dtype))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu_offload_gb": 1}, "cannot be offloaded.*Drop --cpu-offload-gb"),
        ({"offload_group_size": 2}, "cannot be offloaded.*--offload-group-size"),
        ({"enable_lora": True}, "take no LoRA adapter.*--lora-target-modules"),
    ],
)
def test_options_that_quantized_weights_cannot_serve(options, words, files, data, monkeypatch):
    """The first two do nothing without a word; LoRA fails when all is loaded."""
    from vllm.model_executor.model_loader.gguf_mla import weights

    with monkeypatch.context() as patch:
        patch.setattr(weights, "tensor_view", None)
        refused = cpu_vllm.engine_config(files["Q4_K_M"], data / "hf", **options)
        with pytest.raises(ValueError, match=words):
            cpu_vllm.load(refused)
    cpu_vllm.load(cpu_vllm.engine_config(files["bf16"], data / "hf", **options))


def test_adapters_of_other_modules_are_taken(files, data):
    options = {"enable_lora": True, "lora_target_modules": ["o_proj"]}
    cpu_vllm.load(cpu_vllm.engine_config(files["Q4_K_M"], data / "hf", **options))


def test_expert_parallelism_is_refused_by_the_loader(files, data):
    config = cpu_vllm.engine_config(files["bf16"], data / "hf")
    config.parallel_config.enable_expert_parallel = True
    with pytest.raises(ValueError, match="do not support expert parallelism"):
        cpu_vllm.load(config)
