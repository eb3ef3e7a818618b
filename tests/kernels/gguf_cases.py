"""Weights of any type, as the kernels take them and as numbers; and the measure of an answer: no further from float64
than a layer of 16 bits on the same numbers is."""

import torch
from gguf import GGMLQuantizationType as Type

from shim.kernels.ggml import launch, repack
from shim.kernels.ggml.blocks import random_blocks
from shim.kernels.gguf_linear import reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter cuts what it converts to bf16 (a GPU rounds): errors are larger, all of one sign, and add up
SLACK = {torch.float16: 1.05, torch.bfloat16: 1.05 if GPU else 8.0}
if not GPU:
    launch.BLOCK = 256  # it is as fast with 256 rows as with 16


def weight(kind: Type, *shape: int, seed: int = 0):
    """Laid, and fp32 numbers."""
    raw = random_blocks(shape, kind, DEVICE, seed)
    return repack.repack(raw, kind), reference.weights(raw, kind)


def error(got, want) -> float:
    return float((got.double() - want).norm() / want.norm())


def check(got, want, in_16_bits):
    assert got.isfinite().all()
    limit = error(in_16_bits, want) * SLACK[got.dtype]
    assert error(got, want) <= limit, (error(got, want), limit)
