"""Random valid GGUF blocks on a device, of any type and many: tests and benchmarks multiply by them."""

from __future__ import annotations

import gguf
import numpy as np
import torch

# Bytes at which a block has its float16 scales, or scale and minimum; the start for other types.
SCALES = {"Q6_K": [208], "Q5_K": [0, 2], "Q4_K": [0, 2], "Q3_K": [108], "Q2_K": [80, 82]}


def random_blocks(
    kind: gguf.GGMLQuantizationType, *shape: int, scale: float, generator: torch.Generator
) -> torch.Tensor:
    """uint8 [*shape, the last in bytes] on the generator's device; every block has this scale."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    data = torch.randint(
        256,
        (*shape[:-1], shape[-1] // elements, size),
        dtype=torch.uint8,
        generator=generator,
        device=generator.device,
    )
    low, high = np.array([scale], "<f2").tobytes()
    for place in SCALES.get(kind.name, [0]):
        data[..., place], data[..., place + 1] = low, high
    return data.flatten(-2)
