"""Every compiled op of a GLM-5 step has machine code for the cards without DeepGEMM.

Read from the extension modules of the vLLM beside this Python, or of VLLM_GLM5_EXTENSIONS.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Kernel of each op, as it stands in the mangled name. Which extension holds it differs by release.
KERNELS = [
    "indexer_k_quant_and_cache_kernel",
    "cp_gather_indexer_k_quant_cache_kernel",
    "concat_and_cache_mla_kernel",
    "concat_and_cache_ds_mla_kernel",
    "topKPerRowPrefill",
    "topKPerRowDecode",
    "persistent_topk_kernel",
    "rms_norm_kernel",
    "rotary_embedding_kernel",
    "act_and_mul_kernel",
    "per_token_group_quant_8bit_kernel",
    "moe_align_block_size_kernel",
    "grouped_topk",
]
# Of a release with GGUF in its tree; a plugin has them for the later ones.
GGUF_KERNELS = [
    "dequantize_block_q4_K",
    "dequantize_block_q6_K",
    "mul_mat_vec_q",
    "mul_mat_q4_K",
    "mul_mat_q8_0",
    "moe_q4_K",
    "moe_q8_0",
    "moe_vec_q",
]
GGUF_IN_TREE = Path("vllm/model_executor/layers/quantization/gguf.py")
CARDS = [(8, 0), (8, 6), (8, 9), (12, 0), (12, 1)]


def extensions() -> Path:
    folder = os.environ.get("VLLM_GLM5_EXTENSIONS")
    if folder:
        return Path(folder)
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("no vLLM beside this Python, and VLLM_GLM5_EXTENSIONS is not set")
    folder = Path(spec.origin).parent
    if not list(folder.glob("_C*.so")):
        pytest.skip("the vLLM beside this Python has no compiled extensions")
    return folder


@pytest.fixture(scope="module")
def functions() -> dict[tuple[str, str], set[str]]:
    """{(extension, function): architectures of its machine code}."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    table: dict[tuple[str, str], set[str]] = defaultdict(set)
    for library in sorted([*extensions().glob("_C*.so"), *extensions().glob("_moe_C*.so")]):
        text = subprocess.run(
            [tool, "-symbols", library], capture_output=True, text=True, check=True
        ).stdout
        architecture = ""
        for line in text.splitlines():
            if line.startswith("arch = sm_"):
                architecture = line.removeprefix("arch = sm_")
            elif line.startswith("STT_FUNC"):
                table[library.name, line.split()[-1]].add(architecture)
    return table


def runs_on(architectures: set[str], major: int, minor: int) -> bool:
    """Machine code runs on later minor versions of its major one; "90a" on 9.0 alone."""
    plain = [int(a) for a in architectures if re.fullmatch(r"\d+", a)]
    return any(a // 10 == major and a % 10 <= minor for a in plain)


@pytest.mark.parametrize(("major", "minor"), CARDS, ids=[f"{a}.{b}" for a, b in CARDS])
def test_every_op_of_a_step_runs(functions, tree, major, minor):
    for kernel in [*KERNELS, *(GGUF_KERNELS if (tree / GGUF_IN_TREE).exists() else [])]:
        rows = {name: sets for name, sets in functions.items() if kernel in name[1]}
        assert rows, f"no extension has {kernel}"
        # 7.5 alone has a few variants that stand in for bfloat16.
        missing = [n for n, a in rows.items() if a != {"75"} and not runs_on(a, major, minor)]
        assert not missing, f"{kernel}: {missing[:3]}"


def test_the_reader_can_say_no(functions):
    """The control: no kernel of these extensions has code for a card that does not exist yet."""
    rows = [a for name, a in functions.items() if "concat_and_cache_mla_kernel" in name[1]]
    assert rows
    assert not any(runs_on(a, 13, 0) for a in rows)
    assert not any(runs_on({"90a"}, 9, 0) for _ in rows)
