"""The real wheels for x86-64 and for aarch64 (GB10, DGX Spark): one series, one index."""

from __future__ import annotations

import json

import pytest

from builder.index import list_wheels
from tests.commands import TAG, run_builder

from .release import sha256

PLATFORMS = {"x86_64": "manylinux_2_35_x86_64", "aarch64": "manylinux_2_35_aarch64"}


@pytest.mark.upstream
@pytest.mark.timeout(600)
def test_both_from_one_series_on_one_page(network, tmp_path, environment):
    out = tmp_path / "dist"
    built = {
        arch: json.loads(run_builder("--tag", TAG, "--arch", arch, "--out", out, "--json").stdout)
        for arch in PLATFORMS
    }
    for arch, done in built.items():
        assert done["wheel"].endswith(f"{arch}.whl")
        assert done["patches"] == built["x86_64"]["patches"]
        assert all(each["explained_by"] for each in done["audit"]["differences"])
        run_builder("verify", done["wheel"])
    wheels = list_wheels(out / "index", "staging")
    assert {w.path.name for w in wheels} == {d["wheel"].rsplit("/")[-1] for d in built.values()}
    assert {w.sha256 for w in wheels} == {done["sha256"] for done in built.values()}
    url = (out / "index" / "staging" / "simple").as_uri()
    for arch, platform in PLATFORMS.items():
        folder = tmp_path / arch
        environment.pip(
            "download", "--no-deps", "--only-binary=:all:", "--platform", platform,
            "--python-version", "3.12", "--index-url", url, "--dest", folder, "vllm-glm5",
        )  # fmt: skip
        (wheel,) = folder.iterdir()
        assert sha256(wheel) == built[arch]["sha256"]
        wheel.unlink()
