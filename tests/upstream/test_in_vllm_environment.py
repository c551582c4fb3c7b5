"""The tests that need torch, triton or an installed vLLM, run in an environment that has them.

`.[test]` holds neither torch nor triton: which ones are right depends on the release. One test here
is one file of tests/benchmarks, tests/gguf, tests/kernels or tests/selection, run by the environment's
own pytest.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.commands import ROOT, each_release

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "gguf", "kernels", "selection")
    for path in (ROOT / "tests" / folder).glob("test_*.py")
)

pytest_generate_tests = each_release
pytestmark = [pytest.mark.upstream, pytest.mark.resolve, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("file", FILES)
def test_file(file, tag, vllm_environment, patched_tree, base_tree, official_package, built):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_GLM5_TAG": tag,
        "VLLM_GLM5_TREE": str(patched_tree),
        "VLLM_GLM5_BASE_TREE": str(base_tree),
        "VLLM_GLM5_OFFICIAL": str(official_package),
        "VLLM_GLM5_WHEEL": built["wheel"],
        "VLLM_GLM5_PYTHON": str(vllm_environment),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [str(vllm_environment), "-m", "pytest", "-q", "-rsx", file],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    tail = "\n".join(done.stdout.splitlines()[-60:])
    print(tail)
    assert done.returncode == 0, f"{tail}\n{done.stderr[-3000:]}"
