"""Patch 0002: no file of weights is opened to look for a speculators config."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

from tests.commands import ROOT

PROBE = Path(__file__).with_name("probe_speculators.py")
CHANGED = ["org/verifier", "org/verifier"]
FILES = ("glm.gguf", "glm-UD-Q4_K_XL-00001-of-00002.gguf", "no-suffix", "weights.bin")
REFERENCES = (
    "org/repo:Q8_0",
    "org/repo:UD-Q4_K_XL",
    "org/repo/file.gguf",
    "org/repo/UD-Q4_K_XL/file-00001-of-00002.gguf",
)


def _gguf_header() -> bytes:
    """Return a whole GGUF file without tensors, of an architecture unknown to Transformers."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    metadata = text(b"general.architecture") + struct.pack("<I", 8) + text(b"glm-dsa")
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + metadata


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in (
        "glm.gguf",
        *(f"glm-UD-Q4_K_XL-0000{n}-of-00002.gguf" for n in (1, 2)),
        "no-suffix",
    ):
        (folder / name).write_bytes(_gguf_header())
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(64 << 20)
    shards = folder / "shards"
    shards.mkdir()
    (shards / "a-00001-of-00001.gguf").write_bytes(_gguf_header())
    plain = folder / "plain"
    plain.mkdir()
    (plain / "config.json").write_text('{"model_type": "llama"}')
    for name in ("speculator", "speculator.gguf"):
        speculator = folder / name
        speculator.mkdir()
        (speculator / "config.json").write_text(json.dumps({
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "proposal_methods": [{"speculative_tokens": 3}],
                "verifier": {"name_or_path": "org/verifier"},
            },
            "transformer_layer_config": {},
        }))  # fmt: skip
    bad = folder / "bad"
    bad.mkdir()
    (bad / "config.json").write_text('{"model_type": ')
    return folder


def _probe(tree, site_without_vllm, renamed_distribution, models, tmp_path):
    python, view = site_without_vllm
    folders = ("shards", "plain", "speculator", "speculator.gguf", "bad")
    names = [str(models / name) for name in (*FILES, *folders)] + list(REFERENCES)
    done = subprocess.run(
        [python, "-I", "-S", PROBE, models, tree, renamed_distribution, view],
        check=False, capture_output=True, text=True, cwd=tmp_path, timeout=240,
        input=json.dumps(names),
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "",
             "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    last = (done.stdout.splitlines() or [""])[-1]
    assert last.startswith("RESULTS "), done.stdout + done.stderr
    results = json.loads(last.removeprefix("RESULTS "))
    return {name.removeprefix(f"{models}/"): value for name, value in results.items()}


@pytest.fixture(scope="module")
def patched(patched_tree, site_without_vllm, renamed_distribution, models, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return _probe(patched_tree, site_without_vllm, renamed_distribution, models, home)


@pytest.fixture(scope="module")
def unpatched(base_tree, site_without_vllm, renamed_distribution, models, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return _probe(base_tree, site_without_vllm, renamed_distribution, models, home)


@pytest.mark.parametrize("name", FILES)
def test_a_local_file_is_left_alone(patched, models, name):
    model = str(models / name)
    assert patched[name] == {"found": [model, "org/tokenizer", {"method": "mtp"}], "opened": []}


@pytest.fixture
def upstream_has_it(tag):
    """v0.33.0 returns for local files by itself; what a repository holds is its GGUF plugin's."""
    return "0002-" not in (ROOT / "patches" / tag / "series").read_text()


@pytest.mark.parametrize("name", FILES)
def test_unpatched_it_is_read_and_refused(unpatched, patched, name, upstream_has_it):
    if upstream_has_it:
        assert unpatched[name] == patched[name]
        return
    assert name in unpatched[name]["opened"]
    expected = "not a valid JSON file" if name == "weights.bin" else "glm-dsa is not supported"
    assert expected in unpatched[name]["error"]


@pytest.mark.parametrize("name", REFERENCES)
def test_a_gguf_in_a_repository_is_left_alone(patched, unpatched, name, upstream_has_it):
    if upstream_has_it:
        assert patched[name] == unpatched[name]
        return
    assert patched[name] == {"found": [name, "org/tokenizer", {"method": "mtp"}], "opened": []}


@pytest.mark.parametrize("name", REFERENCES)
def test_unpatched_it_is_looked_for(unpatched, name):
    """Offline, asking for the repository's config.json is an error."""
    assert "error" in unpatched[name]


@pytest.mark.parametrize("name", ["shards", "plain"])
def test_a_folder_without_speculators_config_is_left_alone(patched, models, name):
    assert patched[name]["found"] == [str(models / name), "org/tokenizer", {"method": "mtp"}]


@pytest.mark.parametrize("name", ["speculator", "speculator.gguf"])
def test_a_speculators_folder_is_detected(patched, models, name):
    assert patched[name]["found"][:2] == CHANGED
    assert patched[name]["found"][2] == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "model": str(models / name),
    }


def test_a_bad_config_stays_an_error(patched, unpatched):
    assert "not a valid JSON file" in patched["bad"]["error"]
    assert patched["bad"] == unpatched["bad"]
