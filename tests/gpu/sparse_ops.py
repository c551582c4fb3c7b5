"""The sparse MLA and indexer operations of the patched release, and float64 references on the GPU.

VLLM_GLM5_TREE names a patched source tree; without it, the installed vLLM is taken.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))


def load(name: str) -> ModuleType:
    """triton_sparse_mla, triton_sparse_mla_fp8 or triton_mqa_logits."""
    tree = os.environ.get("VLLM_GLM5_TREE")
    if tree:
        from loading import load_op

        return load_op(Path(tree), name)
    import importlib

    return importlib.import_module(f"vllm.v1.attention.ops.{name}")


def reference(q, rows, indices, scale):
    """(out, lse) in float64. rows [N, 512 + rope]; indices [T, K]; what is not in [0, N) is skipped."""
    import torch

    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, 512, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for t in range(tokens):
        names = indices[t].long()
        names = names[(names >= 0) & (names < rows.shape[0])]
        if not len(names):
            continue
        k = rows[names].double()
        scores = q[t].double() @ k.T * scale
        lse[t] = torch.logsumexp(scores, -1)
        out[t] = torch.softmax(scores, -1) @ k[:, :512]
    return out, lse


def ds_mla_rows(latent, rope, *, power_of_two=False):
    """fp8_ds_mla rows uint8 [N, 656] of bfloat16 latent [N, 512] and rope [N, 64].

    512 e4m3 codes, 4 float32 scales (one for each 128 codes), 64 bfloat16: vLLM's
    csrc/cache_kernels.cu, concat_and_cache_ds_mla_kernel. It makes the largest code 448; from
    v0.33.0 on it takes the next power of two for a scale. What reads the rows may mind neither.
    """
    import torch

    groups = latent.float().view(-1, 4, 128)
    scales = (groups.abs().amax(-1) / 448).clamp_min(torch.finfo(torch.float32).tiny)
    if power_of_two:
        scales = scales.double().log2().ceil().exp2().float()
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).view(-1, 512)
    parts = [codes, scales.contiguous(), rope.contiguous()]
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def ds_mla_values(rows):
    """What fp8_ds_mla rows uint8 [N, 656] stand for, float64 [N, 576]."""
    import torch

    codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).double()
    latent = codes.view(-1, 4, 128) * scales[..., None]
    return torch.cat([latent.view(-1, 512), rope], 1)


def check_written_rows(written, latent, rope) -> None:
    """See that fp8_ds_mla rows hold this bfloat16 latent and rope, with scales of either kind.

    A writer divides by the scale with rounding of its own. So a few codes (one in 2,400 by another
    way of dividing, on a CPU) are next to the right one: what lies between two falls to either.
    """
    import torch

    def scales(rows):
        return rows[:, 512:528].contiguous().view(torch.float32)

    # A scale that is a power of two but for its last bit may be that power or the next.
    exact = scales(ds_mla_rows(latent, rope)).double().log2()
    clear = ((exact - exact.round()).abs() > 1e-6).all(1)
    assert clear.double().mean() > 0.5
    written, latent, rope = written[clear], latent[clear], rope[clear]
    either = [ds_mla_rows(latent, rope, power_of_two=kind) for kind in (False, True)]
    fitting = [r for r in either if torch.allclose(scales(r), scales(written), rtol=1e-6, atol=0)]
    assert len(fitting) == 1, f"scales: {scales(written)[:2]}, not as {scales(either[0])[:2]}"
    (right,) = fitting
    assert torch.equal(written[:, 528:], right[:, 528:])
    assert ds_mla_values(written).isfinite().all()
    codes, right_codes = (rows[:, :512].int() for rows in (written, right))
    assert (codes == right_codes).double().mean() > 0.999
    # Codes without their sign bit are in the order of their values.
    places, right_places = (torch.where(of > 0x7F, 0x80 - of, of) for of in (codes, right_codes))
    assert int((places - right_places).abs().max()) <= 1


def deep_gemm_options(function: Callable, most_keys: int) -> dict[str, int]:
    """What DeepGEMM's logits want beside the tensors in one release and do not know in another.

    From v0.33.0 on none blanks the logits outside a row's keys, and that of the prefill has as many
    columns as the longest row has keys.
    """
    options = {"clean_logits": False, "max_seqlen_k": most_keys}
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def error(actual, expected) -> float:
    """Relative L2 error; infinities and NaN must be at the same places."""
    import torch

    actual = actual.double()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(actual), kind(expected)), f"{kind.__name__} at other places"
    finite = torch.isfinite(expected)
    norm = expected[finite].norm()
    return float((actual[finite] - expected[finite]).norm() / norm.clamp_min(1e-30))


def check_replay_with_padded_rows(call, inputs, expected, bound: float) -> None:
    """Three requests replayed in a graph of eight: real rows are right, the others touch nothing.

    inputs: q [8, H, D], cache, indices [8, K]; call and expected take the three and give (out, lse).
    """
    import torch

    q, cache, indices = inputs[0].clone(), inputs[1], inputs[2].clone()
    call(q, cache, indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(q, cache, indices)
    indices[3:] = -1
    q[3:] = torch.nan
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        right, right_lse = expected(q[:3], cache, indices[:3])
        assert error(out[:3], right) < bound
        assert error(lse[:3], right_lse) < 1e-4
        indices[:3] = indices[:3].flip(0)


def check_nothing_compiles(call, warmed_up, inputs) -> None:
    """No batch size compiles a kernel after the sizes of the warm-up; inputs as above, 2,048 tokens."""
    from triton import knobs

    q, cache, indices = inputs
    for tokens in warmed_up:
        call(q[:tokens], cache, indices[:tokens])
    compiled = []
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda **kwargs: compiled.append(kwargs.get("repr"))
    try:
        for tokens in [*range(1, 300), 511, 512, 513, 1000, 2047, 2048]:
            call(q[:tokens], cache, indices[:tokens])
    finally:
        knobs.runtime.jit_cache_hook = before
    assert not compiled, compiled[:3]


class PoisonedTorch:
    """torch, but what empty() returns holds NaN, or 0x7f bytes: nothing may be left unwritten."""

    def __getattr__(self, name):
        import torch

        return getattr(torch, name)

    def empty(self, *args, **kwargs):
        import torch

        tensor = torch.empty(*args, **kwargs)
        tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor


def poisoned(name: str) -> Iterator[ModuleType]:
    """Give the operations' module with a torch of which nothing may be left unwritten."""
    module = load(name)
    plain = module.torch
    module.torch = PoisonedTorch()
    yield module
    module.torch = plain


def gpu_marks() -> list[object]:
    """What every test on a GPU is marked with."""
    import pytest
    import torch

    return [
        pytest.mark.gpu,
        pytest.mark.timeout(120),
        pytest.mark.filterwarnings("default"),
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    ]


class Figures:
    """Figures that the terminal summary prints, and that go to VLLM_GLM5_FIGURES where it is set."""

    def __init__(self) -> None:
        self.rows: dict[str, object] = {}

    def __call__(self, name: str, value: object) -> None:
        self.rows[name] = value
        path = os.environ.get("VLLM_GLM5_FIGURES")
        if not path:
            return
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() and file.stat().st_size else {}
        if isinstance(known, list):
            known.append({"name": name, "value": value})
        else:
            known[name] = value
        file.write_text(json.dumps(known, indent=1))

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.section("figures: sparse MLA and indexer")
        for name, value in self.rows.items():
            text = f"{value:.3e}" if isinstance(value, float) and value < 0.1 else str(value)
            terminalreporter.write_line(f"{name}: {text}")


def figures_of(config) -> Figures:
    plugin = config.pluginmanager.get_plugin("sparse-figures")
    if plugin is None:
        plugin = Figures()
        config.pluginmanager.register(plugin, "sparse-figures")
    return plugin
