"""The main job on the real release: from the package index to a wheel that is what it says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.build.killing import Span
from tests.commands import EACH_RELEASE, ROOT, TAG, run_builder

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(900)]


def sha256(path):
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commands_of_readme():
    """The two set-up lines of the README, as they stand there."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line.strip() for line in lines if line.strip().startswith("pip install -e")]


def test_the_first_readme_line_on_a_clean_clone_with_an_empty_cache(network, tmp_path, built):
    first, second = commands_of_readme()
    assert second == "pip install -e '.[test]' && pytest"
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    env = os.environ | {
        "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}",
        "VLLM_GLM5_CACHE": str(tmp_path / "cache"),
    }
    env.pop("PYTHONPATH", None)
    run = subprocess.run(
        ["bash", "-ec", first], cwd=clone, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    version = built["version"]
    wheel = clone / "dist" / f"vllm_glm5-{version}-cp38-abi3-manylinux_2_35_x86_64.whl"
    assert sha256(wheel) == built["sha256"], "two builds in different folders differ"
    assert f"pip install vllm-glm5=={version}" in run.stdout
    assert f"uv pip install vllm-glm5=={version}" in run.stdout
    assert "download vllm-0.20.2.tar.gz" in run.stderr


@EACH_RELEASE
def test_the_wheel_is_the_official_one_but_for_what_the_series_says(built, official_wheel):
    """Compared here without the tool's own audit: by zipfile alone."""
    with zipfile.ZipFile(official_wheel) as official, zipfile.ZipFile(built["wheel"]) as ours:
        before = {i.filename: i.CRC for i in official.infolist() if "dist-info" not in i.filename}
        after = {i.filename: i.CRC for i in ours.infolist() if "dist-info" not in i.filename}
        assert ours.testzip() is None
    touched = {item["path"] for item in built["touched"] if item["kind"] == "ships as it is"}
    differs = {name for name in before | after if before.get(name) != after.get(name)}
    assert differs == touched | {"vllm/_version.py"}


def test_a_second_run_changes_nothing_and_offline_works(built, tmp_path):
    env = os.environ | {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}
    again = run_builder("--tag", TAG, "--out", tmp_path, "--json", env=env)
    assert json.loads(again.stdout)["sha256"] == built["sha256"]
    assert "download" not in again.stderr


@EACH_RELEASE
def test_setup_py_gives_the_same_wheel(built, tag, tmp_path, cache):
    fresh = _cache_without_wheels(cache, tmp_path / "cache")
    if cache.environments.is_dir():
        (fresh / "environments").symlink_to(cache.environments)
    mode = ("--mode", "setup-py")
    cross = json.loads(
        run_builder("--tag", tag, *mode, "--out", tmp_path / "d", "--json", cache=fresh).stdout
    )
    assert not cross["staged"], "a cross-check must not be staged"
    assert cross["sha256"] == built["sha256"]


def test_another_zlib_gives_the_same_wheel(built, tmp_path, cache):
    """zlib-ng deflates to other bytes; swapped in for zlib it must not show in the wheel."""
    swap = tmp_path / "swap"
    swap.mkdir()
    (swap / "sitecustomize.py").write_text(
        "import sys\nfrom zlib_ng import zlib_ng\nsys.modules['zlib'] = zlib_ng\n"
    )
    probe = "import zlib, zipfile; print(zlib.__name__, zipfile.zlib is zlib)"
    env = os.environ | {"PYTHONPATH": str(swap)}
    said = subprocess.run(
        [sys.executable, "-c", probe], env=env, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["zlib_ng.zlib_ng", "True"], "the swap does not work"
    fresh = _cache_without_wheels(cache, tmp_path / "cache")
    result = run_builder("--tag", TAG, "--out", tmp_path / "d", "--json", env=env, cache=fresh)
    assert json.loads(result.stdout)["sha256"] == built["sha256"]


def _cache_without_wheels(cache, folder):
    """A cache that has the downloads (by link) and nothing else."""
    for path in cache.downloads.glob("*/vllm-*"):
        if path.suffix in (".whl", ".gz"):
            target = folder / "downloads" / path.parent.name / path.name
            target.parent.mkdir(parents=True)
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target)
    return folder


def test_killed_five_times_it_ends_as_if_it_had_not_been(built, tmp_path, cache):
    import random
    import time

    folder = _cache_without_wheels(cache, tmp_path / "cache")
    env = os.environ | {"VLLM_GLM5_CACHE": str(folder)}
    command = [sys.executable, "-m", "builder", "--tag", TAG, "--out", str(tmp_path / "d")]
    chance = random.Random(5)
    span = Span()
    whole = [*command, "--no-stage"]
    span.of(lambda: subprocess.run(whole, env=env, check=True, capture_output=True))
    killed = 0
    for _ in range(5):
        shutil.rmtree(folder)
        _cache_without_wheels(cache, folder)
        with subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            after = chance.uniform(0.2, span.seconds)
            time.sleep(after)
            process.kill()
        killed += process.returncode == -9
        if process.returncode == 0:
            span.saw(after)
        result = json.loads(run_builder(*command[3:], "--json", env=env).stdout)
        assert result["sha256"] == built["sha256"]
        assert sha256(result["wheel"]) == built["sha256"]
        left = [p for p in folder.rglob(".vllm-glm5-tmp-*") if not p.name.endswith(".lock")]
        assert not left, left
    assert killed, "every build was quicker than its kill: nothing was tested"


def test_aarch64_from_the_same_series(network, tmp_path, built):
    result = json.loads(
        run_builder("--tag", TAG, "--arch", "aarch64", "--out", tmp_path, "--json").stdout
    )
    assert Path(result["wheel"]).name.endswith("-cp38-abi3-manylinux_2_35_aarch64.whl")
    assert result["version"] == built["version"]
    ours = {d["member"] for d in built["audit"]["differences"]}
    assert {d["member"] for d in result["audit"]["differences"]} == ours


def test_verify_names_a_tampered_member(built, tmp_path):
    """One byte of a copied member is changed, and its CRC made right again."""
    import struct
    import zlib

    bad = tmp_path / Path(built["wheel"]).name
    shutil.copyfile(built["wheel"], bad)
    assert run_builder("verify", bad).returncode == 0, "the untouched copy passes"
    name = "vllm/distribution.py"
    with zipfile.ZipFile(bad) as archive:
        info = archive.getinfo(name)
        assert info.compress_type == zipfile.ZIP_STORED
        data = bytearray(archive.read(name))
        central = archive.start_dir
    data[100] ^= 1
    crc = struct.pack("<L", zlib.crc32(bytes(data)))
    with bad.open("r+b") as file:
        file.seek(info.header_offset)
        header = file.read(30)
        offset = info.header_offset + 30 + sum(struct.unpack("<2H", header[26:30]))
        file.seek(offset)
        file.write(data)
        file.seek(info.header_offset + 14)
        file.write(crc)
        file.seek(central)
        directory = file.read()
        at = directory.index(name.encode()) - 46
        file.seek(central + at + 16)
        file.write(crc)
    with zipfile.ZipFile(bad) as archive:
        assert archive.read(name) == bytes(data), "zip itself is content"
    refused = run_builder("verify", bad, check=False)
    assert refused.returncode == 16
    assert name in refused.stderr
    assert "Traceback" not in refused.stderr


@EACH_RELEASE
def test_the_series_is_what_an_export_writes_and_passes_the_lint(network, tag):
    assert run_builder("export", "--check", "--tag", tag).returncode == 0
    assert run_builder("series", "--tag", tag).returncode == 0
    assert run_builder("contracts", "--tag", tag).returncode == 0
