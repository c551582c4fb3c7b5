"""The install lines that the tool prints, run as printed, with pip and uv, dependencies and all."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from tests.commands import TAG, run_builder

pytestmark = [pytest.mark.upstream, pytest.mark.resolve, pytest.mark.timeout(1800)]

CHECK = """
import importlib.metadata, json, vllm
print(json.dumps([vllm.__version__, importlib.metadata.version("vllm-glm5"),
                  importlib.metadata.version("transformers"), vllm.__file__]))
"""


@pytest.fixture(scope="module")
def served(built):
    """The same index over HTTP, below a sub-path."""
    with subprocess.Popen(
        [sys.executable, "-m", "builder", "serve", "--index", built["index"], "--port", "0",
         "--prefix", "/glm5"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as server:  # fmt: skip
        said = ""
        deadline = time.monotonic() + 20
        while "http://" not in said and time.monotonic() < deadline:
            said += server.stdout.readline()
        found = re.search(r"http://[^\s'\"]*?/glm5", said)
        assert found, said
        yield found[0]
        server.terminate()


def venv(folder):
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    env = os.environ | {
        "PATH": f"{folder}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
    }
    env.pop("PYTHONPATH", None)
    return env


def run(line, env, *extra):
    command = [*shlex.split(line), *extra]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def imported(folder, env):
    import json

    done = subprocess.run(
        [f"{folder}/bin/python", "-c", CHECK], env=env, cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(folder, env, version):
    module, installed, transformers, file = imported(folder, env)
    assert module == installed == version
    assert file.startswith(str(folder))
    assert tuple(map(int, transformers.split(".")[:2])) >= (5, 5), "glm_moe_dsa needs it"
    # GLM-5's config class is what the tightened requirement is for.
    subprocess.run(
        [f"{folder}/bin/python", "-c", "from transformers import GlmMoeDsaConfig"],
        env=env, check=True, capture_output=True,
    )  # fmt: skip


def test_the_uv_line_installs_everything_from_a_folder(built, tmp_path):
    env = venv(tmp_path / "v")
    _, line = built["install"]
    assert line.startswith("uv pip install ")
    done = run(line, env)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "v", env, built["version"])


def test_the_pip_line_installs_everything_over_http(built, served, tmp_path):
    env = venv(tmp_path / "v")
    line, _ = built["install"]
    assert line.startswith("pip install ")
    from pathlib import Path

    done = run(line.replace(f"{Path(built['index']).as_uri()}/staging", f"{served}/staging"), env)
    assert served in " ".join(done.args)
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path / "v", env, built["version"])


def test_both_lines_resolve_the_other_way_round(built, served, tmp_path):
    """pip from the folder and uv over HTTP, without installing."""
    from pathlib import Path

    env = venv(tmp_path / "v")
    pip_line, uv_line = built["install"]
    done = run(pip_line, env, "--dry-run", "--quiet", "--report", "-")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert f'"version": "{built["version"]}"' in done.stdout
    done = run(
        uv_line.replace(f"{Path(built['index']).as_uri()}/staging", f"{served}/staging"),
        env, "--dry-run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"vllm-glm5=={built['version']}" in done.stderr


def test_doctor_calls_a_fresh_install_healthy(built, tmp_path):
    env = venv(tmp_path / "v")
    done = run(f"pip install --quiet --no-deps {shlex.quote(built['wheel'])}", env)
    assert done.returncode == 0, done.stderr
    said = run_builder("doctor", "--python", tmp_path / "v" / "bin" / "python")
    assert built["version"] in said.stdout
    assert TAG[1:] in said.stdout
