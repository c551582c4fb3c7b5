"""The real series on real releases: unattended it never crashes, and claims nothing that is false.

VLLM_GLM5_RELEASES names releases (all after v0.20.2: about 500 MB of sdists); by default the next one
and the one from which GGUF is gone.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.commands import ROOT, TAG, run_builder

pytestmark = pytest.mark.upstream
RELEASES = os.environ.get("VLLM_GLM5_RELEASES", "v0.21.0 v0.33.0").split()


class Project:
    def __init__(self, root):
        self.root = root
        (root / "patches").mkdir(parents=True)
        (root / "upstream").mkdir()
        shutil.copy(ROOT / "upstream" / f"{TAG}.toml", root / "upstream")
        for name in ("common", TAG):
            shutil.copytree(ROOT / "patches" / name, root / "patches" / name)

    def run(self, *arguments, codes=(0,)):
        process = run_builder("--project", self.root, *arguments, cwd=self.root, check=False)
        assert "Traceback" not in process.stderr, process.stderr
        assert process.returncode in codes, process.stderr
        return process


@pytest.mark.parametrize("onto", RELEASES)
def test_unattended(network, tmp_path, onto):
    """It stops where `upstream` said it would; with those patches left out the rest is a series."""
    project = Project(tmp_path / "project")
    project.run("pin", onto)
    said = project.run("upstream", "--tag", TAG, "--onto", onto, "--json").stdout
    (release,) = json.loads(said)["releases"]
    states = {p["patch"]: p["state"] for p in release["patches"]}
    wanting = [n for n, state in states.items() if state not in ("clean", "moved", "merged")]
    before = {p: p.read_bytes() for p in (project.root / "patches").rglob("*") if p.is_file()}
    process = project.run("rebase", "--from", TAG, "--onto", onto, codes=(0, 30))
    stops = []
    while process.returncode == 30:
        (state,) = json.loads(project.run("rebase", "--status", "--json").stdout)
        stops.append(state["stop"]["line"])
        assert all(path.read_bytes() == data for path, data in before.items())
        assert not (project.root / "patches" / onto).exists()
        number = stops[-1].rpartition("/")[2][:4]
        process = project.run("rebase", "--continue", "--drop", number, codes=(0, 30))
    assert stops == wanting
    # The lint applies it strictly and compiles every file after every patch.
    project.run("series", "--tag", onto)
    project.run("export", "--check", "--tag", onto, codes=(0, 19))
    lines = (project.root / "patches" / onto / "series").read_text().split()
    assert lines == [line for line in states if line not in wanting]


def test_what_upstream_did_to_us_is_found_by_itself(network, tmp_path):
    """v0.33.0 has the speculators' guard in other words, and lacks the base class that we import."""
    project = Project(tmp_path / "project")
    said = project.run("upstream", "--tag", TAG, "--onto", "v0.33.0", "--json").stdout
    (release,) = json.loads(said)["releases"]
    (guard,) = [p for p in release["patches"] if "speculators" in p["subject"]]
    assert (guard["state"], guard["upstream"]["extent"]) == ("upstreamed", "full")
    assert "its probe holds" in guard["reason"]
    missing = {item["what"] for item in release["imports"]}
    assert "vllm.v1.attention.backend has no SparseMLAAttentionImpl" in missing
    broken = {item["name"] for item in release["contracts"] if item["gone"]}
    assert "SparseMLAAttentionImpl" in broken
