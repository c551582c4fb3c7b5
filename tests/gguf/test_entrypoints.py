"""The ways that users start an engine, up to where it would load: vllm.LLM and the command vllm.

They compare the arguments with those of an instance that has the model's name alone, to log what
differs; making EngineArgs and its config alone does not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from release import weights_of

NO_CONFIG = r"'glm-dsa' needs the config\.json.*Pass --hf-config-path"


class ReachedError(Exception):
    """An engine would start with this config."""


@pytest.fixture
def start(monkeypatch, caplog_vllm):
    """vllm.LLM(...) as far as the engine's config, which it returns."""
    from vllm import LLM
    from vllm.engine import arg_utils
    from vllm.entrypoints import llm

    # It would take away what caplog listens to.
    for module in (llm, arg_utils):
        monkeypatch.setattr(module, "configure_logging_if_needed", lambda _: None, raising=False)

    def from_engine_args(engine_args, usage_context):
        raise ReachedError(engine_args.create_engine_config(usage_context))

    monkeypatch.setattr(llm.LLMEngine, "from_engine_args", from_engine_args)

    def start(model, **given):
        options = {"max_model_len": 512, "enforce_eager": True, "moe_backend": "triton"}
        with pytest.raises(ReachedError) as reached:
            LLM(model=str(model), **{"skip_tokenizer_init": True} | options | given)
        return reached.value.args[0].model_config

    return start


@pytest.fixture
def alone(files, tmp_path):
    """A GGUF file in a folder of its own."""
    return Path(shutil.copyfile(files["Q4_K_M"], tmp_path / "model.gguf"))


def test_a_config_elsewhere(alone, start, data, caplog_vllm):
    config = start(alone, hf_config_path=str(data / "hf"))
    assert (weights_of(config), config.hf_config_path) == (str(alone), str(data / "hf"))
    (logged,) = [m for m in caplog_vllm.messages if m.startswith("non-default args")]
    assert f"'hf_config_path': '{data / 'hf'}'" in logged


def test_a_config_elsewhere_and_one_beside(alone, start, data, caplog_vllm):
    """Nothing may say that the one beside is taken."""
    shutil.copyfile(data / "hf" / "config.json", alone.with_name("config.json"))
    config = start(alone, hf_config_path=str(data / "hf"))
    assert config.hf_config_path == str(data / "hf")
    assert "Taking config.json of" not in caplog_vllm.text


@pytest.mark.parametrize("beside", [True, False])
def test_a_folder(beside, alone, start, data, caplog_vllm):
    given = {"hf_config_path": str(data / "hf")}
    if beside:
        shutil.copytree(data / "hf", alone.parent, dirs_exist_ok=True)
        given = {}
    config = start(alone.parent, skip_tokenizer_init=False, **given)
    source = str(alone.parent if beside else data / "hf")
    assert weights_of(config) == str(alone)
    assert config.hf_config_path == config.tokenizer == source
    assert config.served_model_name == str(alone.parent)
    for sentence, times in (
        ("Serving the GGUF model", 1),
        ("Taking config.json of", int(beside)),
        ("Taking the tokenizer of", 1),
    ):
        assert sum(sentence in message for message in caplog_vllm.messages) == times, sentence


def test_a_tokenizer_elsewhere(alone, start, data):
    shutil.copyfile(data / "hf" / "config.json", alone.with_name("config.json"))
    config = start(alone, skip_tokenizer_init=False, tokenizer=str(data / "hf"))
    assert (config.hf_config_path, config.tokenizer) == (str(alone.parent), str(data / "hf"))


@pytest.mark.parametrize("fault", ["no config", "no tokenizer", "cut file"])
def test_what_is_missing_is_said_when_the_engine_is_made(fault, alone, start, data, caplog_vllm):
    """By one error, when the arguments are known and before anything is loaded."""
    words = {"no config": NO_CONFIG, "no tokenizer": "cannot build a tokenizer.*Pass --tokenizer",
             "cut file": r"model\.gguf"}[fault]  # fmt: skip
    if fault != "no config":
        shutil.copyfile(data / "hf" / "config.json", alone.with_name("config.json"))
    if fault == "cut file":
        alone.write_bytes(alone.read_bytes()[:20])
    with pytest.raises(ValueError, match=words) as refused:
        start(alone, skip_tokenizer_init=False)
    assert "create_engine_config" in [entry.name for entry in refused.traceback]
    assert "non-default args" in caplog_vllm.text


@pytest.mark.plugin
def test_a_plugin_that_is_missing_is_said_then_too(alone, start, data, caplog_vllm, monkeypatch):
    from vllm.plugins import gguf_mla

    monkeypatch.setattr(gguf_mla, "_problem", "install it")
    with pytest.raises(ValueError, match=r"model\.gguf: install it"):
        start(alone, hf_config_path=str(data / "hf"))
    assert "non-default args" in caplog_vllm.text


@pytest.mark.plugin
def test_an_instance_made_to_compare_must_not_look_for_a_config(alone, start, data, monkeypatch):
    """The control: looked for when EngineArgs is made, it fails a start that names it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins.gguf_mla import find_gguf_config

    made = EngineArgs.__post_init__

    def look_at_once(self):
        made(self)
        find_gguf_config(self)

    monkeypatch.setattr(EngineArgs, "__post_init__", look_at_once)
    with pytest.raises(ValueError, match=NO_CONFIG):
        start(alone, hf_config_path=str(data / "hf"))


def vllm_command(tree, folder, *arguments):
    """Run `vllm ARGUMENTS`, which ends where an engine would start."""
    script = Path(__file__).with_name("command_line.py")
    return subprocess.run(
        [sys.executable, str(script), str(tree), str(folder), *map(str, arguments)],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_serve(alone, data, tree, tmp_path_factory):
    stub = tmp_path_factory.mktemp("stub")
    options = ["--hf-config-path", data / "hf", "--max-model-len", 512, "--port", 0]
    done = vllm_command(tree, stub, "serve", alone.parent, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((stub / "engine.json").read_text()) == {
        "weights": str(alone),
        "config": str(data / "hf"),
        "served": str(alone.parent),
    }


@pytest.mark.parametrize("command", ["serve", "launch render"])
def test_a_command_without_a_config_ends_in_one_error(command, alone, tree, tmp_path_factory):
    stub = tmp_path_factory.mktemp("stub")
    done = vllm_command(tree, stub, *command.split(), alone, "--port", 0)
    assert done.returncode == 1
    assert len(re.findall(NO_CONFIG, done.stderr)) == 1, done.stderr[-3000:]
