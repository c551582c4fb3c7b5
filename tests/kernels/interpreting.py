"""Triton's interpreter with the 16-bit and 8-bit floats that numpy lacks, by way of torch's.

The interpreter of Triton 3.6 (and 3.8) keeps bfloat16 as uint16 and e4m3 as uint8, multiplies the
former as whole numbers, and converts the NaN of the latter to 480. Torch is the authority here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@contextmanager
def true_small_floats() -> Iterator[None]:
    """Inside, conversions and products of bfloat16 and e4m3 are what torch makes of them."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    stored = {
        tl.bfloat16: (np.int16, torch.bfloat16),
        tl.float8e4nv: (np.uint8, torch.float8_e4m3fn),
    }
    plain = {tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64}

    def to_torch(handle: Any) -> torch.Tensor:
        data = np.ascontiguousarray(handle.data)
        if handle.dtype.scalar in stored:
            bits, dtype = stored[handle.dtype.scalar]
            return torch.from_numpy(data.view(bits).copy()).view(dtype)
        return torch.from_numpy(data.copy())

    def cast(original: Any) -> Any:
        def convert(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
            to, came = dst_type.scalar, src.dtype.scalar
            floats = stored.keys() | plain.keys()
            if came in floats and to in floats and (came in stored or to in stored):
                _, dtype = stored.get(to, (None, plain.get(to)))
                value = to_torch(src).float().to(dtype)
                bits = value.view(torch.from_numpy(np.empty(0, stored[to][0])).dtype).numpy() \
                    if to in stored else value.numpy()  # fmt: skip
                return TensorHandle(bits.view(_get_np_dtype(to)), to)
            return original(self, src, dst_type, *rest)

        return convert

    def dot(original: Any) -> Any:
        def multiply(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
            if a.dtype.scalar in stored or b.dtype.scalar in stored:
                product = to_torch(a).float() @ to_torch(b).float()
                return TensorHandle(product.numpy().astype(d.data.dtype) + d.data, d.dtype.scalar)
            return original(self, a, b, d, *rest)

        return multiply

    names = {
        "cast_impl": cast,
        "create_fp_ext": cast,
        "create_fp_trunc": cast,
        "create_fp_to_fp": cast,
        "create_dot": dot,
    }
    before = {name: getattr(InterpreterBuilder, name) for name in names}
    for name, wrap in names.items():
        setattr(InterpreterBuilder, name, wrap(before[name]))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(InterpreterBuilder, name, original)
