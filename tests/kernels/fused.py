"""Upstream's fused kernels of a GLM-5 step, for cards without a GPU.

    fused.py TREE STUB_FOLDER compile CAPABILITY...
    fused.py TREE STUB_FOLDER cute CAPABILITY
    fused.py TREE STUB_FOLDER rows CAPABILITY...

`compile` prints a JSON object: for each capability the Triton kernels that were compiled, or the
error. `cute` compiles the one that is in CuTe, and prints the target of its machine code. `rows`
interprets the kernel that writes the cache, as that capability is served, and prints
{capability: {type of the model: rows of the fp8_ds_mla cache in hexadecimal}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "selection")]
ROWS = 24
FUSED = Path("vllm/models/deepseek_v32/common/kernels.py")


def norm_rope(kernels, dtype, empty, kv: str, **changes) -> None:
    """RMS norm and rotation of one step of GLM-5, with the writes to both caches.

    kv names the layout of the cache; "none" is the launch of the memory profile, before there is
    one.
    """
    import torch

    tokens = changes.pop("tokens", 8)
    positions = changes.pop("positions", empty(tokens, dtype=torch.int64))
    cos_sin = empty(4096, 64)
    cache = {
        "auto": lambda: empty(100, 64, 576),
        "fp8_ds_mla": lambda: empty(100, 64, 656, dtype=torch.uint8),
        "none": lambda: None,
    }[kv]()
    arguments = {
        "slot_mapping": positions,
        "indexer_k_cache": empty(100, 64, 132, dtype=torch.uint8),
        "mla_kv_cache": cache,
        "mla_kv_cache_dtype": "fp8_ds_mla" if kv == "none" else kv,
        "mla_k_scale": empty(1, dtype=torch.float32),
        "index_rope_interleave": True,
        "skip_scale": True,
        "kv_c_out": empty(tokens, 512),
        "k_pe_out": empty(tokens, 64),
    }
    kernels.fused_norm_rope(
        positions, empty(tokens, 2048), empty(2048), 1e-5,
        changes.pop("kv_c", empty(tokens, 512)), changes.pop("kv_weight", empty(512)), 1e-5,
        changes.pop("k_pe", empty(tokens, 64)), changes.pop("cos_sin", cos_sin),
        empty(tokens, 128), empty(128, dtype=torch.float32),
        empty(128, dtype=torch.float32), 1e-6, cos_sin, empty(tokens, 2048, dtype=torch.int32),
        **(arguments | changes),
    )  # fmt: skip


def launch(kernels, dtype) -> None:
    """One step of GLM-5: 8 tokens, 8 heads of 64 on this GPU, an indexer of 32 heads."""
    import torch

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    tokens, heads = 8, 8
    for kv in ("auto", "fp8_ds_mla", "none"):
        norm_rope(kernels, dtype, empty, kv)
    cos_sin = empty(4096, 64)
    kernels.fused_q(
        empty(tokens, dtype=torch.int64), empty(tokens, heads, 64), cos_sin,
        empty(tokens, 32, 128), cos_sin, empty(tokens, heads, 512), empty(1, dtype=torch.float32),
        empty(tokens, 32), 1.0, 1.0, index_rope_interleave=True, quantize_mqa=False,
    )  # fmt: skip


def kernels_of(tree: str, stub: str):
    """(platform whose capability is faked, the module of the fused kernels)."""
    import overlay

    overlay.install(Path(tree))
    import no_gpu

    platform = no_gpu.fake_cuda((8, 0), Path(stub))
    from vllm.models.deepseek_v32.common import kernels

    return platform, kernels


def compile_for(tree: str, stub: str, *capabilities: str) -> dict[str, list[str] | str]:
    platform, kernels = kernels_of(tree, stub)
    import torch
    from aot import compiling_for
    from vllm.models.deepseek_v32.nvidia.ops import fused_q_cutedsl

    # From 10.0 on bfloat16 models take the one in CuTe.
    fused_q_cutedsl.is_fused_q_cutedsl_supported = lambda *_, **__: False
    answers: dict[str, list[str] | str] = {}
    for capability in map(int, capabilities):
        platform.faked = divmod(capability, 10)
        try:
            with compiling_for(capability) as compiled:
                for dtype in (torch.bfloat16, torch.float16):
                    launch(kernels, dtype)
            answers[str(capability)] = sorted({name for name, _ in compiled})
        except Exception as error:  # noqa: BLE001 - it is the result
            answers[str(capability)] = f"{type(error).__name__}: {error}"
    return answers


def compile_cute(tree: str, stub: str, capability: str) -> str:
    """The target of upstream's fused_q in CuTe, for 8 heads and an indexer of 32."""
    target = f"sm_{capability}a"
    os.environ |= {
        "CUTE_DSL_ARCH": target, "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": stub,
    }  # fmt: skip
    kernels_of(tree, stub)
    from cutlass import BFloat16
    from vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl import FusedQKernel

    FusedQKernel.compile(
        64, 0, 8, BFloat16, 128, 32, BFloat16, BFloat16, index_rope_interleave=True
    )
    (cubin,) = Path(stub).glob("*.cubin")
    from aot import said_of

    header = said_of(cubin.read_bytes(), "cuobjdump", "-elf")
    return "sm_" + header.partition(" sm=")[2].partition(",")[0]


def latents(dtype):
    """(kv_c [ROWS, 512], weight [512], k_pe [ROWS, 64], cos and sin [4096, 64]), all repeatable.

    Groups of 128 differ by up to 1e5 in size, one is nothing but zeros.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    size = 10 ** (torch.rand(ROWS, 4, 1, generator=generator) * 5 - 4)
    size[0, 1] = 0.0
    kv_c = (torch.randn(ROWS, 4, 128, generator=generator) * size).view(ROWS, 512).to(dtype)
    weight = (1 + torch.rand(512, generator=generator)).to(dtype)
    k_pe = torch.randn(ROWS, 64, generator=generator).to(dtype)
    angle = torch.rand(4096, 32, generator=generator) * 6
    return kv_c, weight, k_pe, torch.cat([angle.cos(), angle.sin()], 1).to(dtype)


def rows_of(tree: str, stub: str, *capabilities: str) -> dict[str, dict[str, list[str]]]:
    os.environ["TRITON_INTERPRET"] = "1"
    platform, kernels = kernels_of(tree, stub)
    import torch
    from interpreting import true_small_floats

    platform.is_arch_support_pdl = classmethod(lambda cls: False)
    answers: dict[str, dict[str, list[str]]] = {}
    for capability in capabilities:
        platform.faked = divmod(int(capability), 10)
        answers[capability] = {}
        for dtype in (torch.bfloat16, torch.float16):

            def zeros(*shape, dtype=dtype):
                return torch.zeros(*shape, dtype=dtype)

            kv_c, kv_weight, k_pe, cos_sin = latents(dtype)
            cache = torch.full((2, 64, 656), 0xFF, dtype=torch.uint8)
            # Each second slot of the second page; the last token is padding.
            slots = 64 + 2 * torch.arange(ROWS)
            slots[-1] = -1
            with true_small_floats():
                norm_rope(
                    kernels, dtype, zeros, "fp8_ds_mla", tokens=ROWS,
                    positions=torch.arange(ROWS), kv_c=kv_c,
                    kv_weight=kv_weight, k_pe=k_pe, cos_sin=cos_sin, mla_kv_cache=cache,
                    slot_mapping=slots, indexer_k_cache=zeros(2, 64, 132, dtype=torch.uint8),
                )  # fmt: skip
            written = cache.view(-1, 656)[64:]
            answers[capability][str(dtype)] = [row.numpy().tobytes().hex() for row in written]
            assert (cache[0] == 0xFF).all()
    return answers


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    tree, stub, what, *capabilities = sys.argv[1:]
    answer = {"compile": compile_for, "cute": compile_cute, "rows": rows_of}[what](
        tree, stub, *capabilities
    )
    print(json.dumps(answer), file=out)
