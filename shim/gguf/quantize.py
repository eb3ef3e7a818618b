"""Quantises what gguf-py can only dequantise: Q4_K, Q5_K, Q6_K, and stand-ins for Q2_K, Q3_K, NVFP4 and the IQ types.
For the tiny model only: a good model needs better scales.

Block layouts: llama.cpp's ggml-common.h (block_q4_K, block_q5_K, block_q6_K). gguf-py's dequantize_blocks is their
inverse. A block is 256 values. The scales are plain min-max or absmax per sub-block. llama.cpp searches for better
ones.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

BLOCK = 256
IQ = (
    *(Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL, Type.IQ4_XS),
    Type.IQ1_M,
)
STAND_INS = (*IQ, Type.Q2_K, Type.Q3_K, Type.NVFP4)
# Where in a block its fp16 scales lie; IQ1_M spreads one over the top four bits of its last four uint16,
# and NVFP4 begins with four of 8 bits (e4m3)
SCALES = {
    **dict.fromkeys((*IQ[:-1], Type.Q8_0), (0,)),
    **dict.fromkeys((Type.IQ1_M, Type.NVFP4), ()),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    **dict.fromkeys((Type.Q4_K, Type.Q5_K), (0, 2)),
    Type.Q6_K: (208,),
}


def quantize(values: np.ndarray, kind: Type) -> np.ndarray:
    """float32 [..., n] -> the bytes of `kind`, uint8 [..., n / block * bytes]. F32 and F16 keep their own types.

    STAND_INS become random blocks with the standard deviation of `values`. The weights are random anyway.
    Raises ValueError unless n is a multiple of the block.
    """
    if kind in STAND_INS:
        seed = np.frombuffer(values.tobytes()[:64], dtype=np.uint32)
        return random_blocks(values.shape, kind, float(values.std()), np.random.default_rng(seed))
    blocks = {Type.Q4_K: q4_k, Type.Q5_K: q5_k, Type.Q6_K: q6_k}.get(kind)
    if blocks is None:
        return gguf.quantize(values, kind)
    if values.shape[-1] % BLOCK:
        raise ValueError(f"{kind.name} needs rows of a multiple of {BLOCK}, got {values.shape}")
    packed = blocks(values.astype(np.float32).reshape(-1, BLOCK))
    return packed.reshape(*values.shape[:-1], -1)


def random_blocks(shape: tuple[int, ...], kind: Type, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of `kind`, a key of SCALES, as uint8 [..., n / block * bytes]. `spread`: the standard deviation of
    their values. ValueError unless n is a multiple of the block."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"{kind.name} needs rows of a multiple of {block}, got {shape}")
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    _set_scale(data, kind, 1.0)
    sample = gguf.dequantize(data.reshape(-1, size)[:1024], kind)
    _set_scale(data, kind, spread / float(sample.std()))
    return data.reshape(*shape[:-1], -1)


def _set_scale(data: np.ndarray, kind: Type, scale: float) -> None:
    if kind is Type.IQ1_M:
        words = data[..., -8:].view(np.uint16)
        bits = int(np.float16(scale).view(np.uint16))
        words[...] = words & 0x0FFF | np.array([bits << 12, bits << 8, bits << 4, bits], dtype=np.uint32) & 0xF000
    if kind is Type.NVFP4:
        power = np.arange(8, 120) >> 3
        values = (1 + (np.arange(8, 120) & 7) / 8) * 2.0 ** (power - 7)
        data[..., :4] = 8 + np.abs(values - scale).argmin()
    for place in SCALES[kind]:
        data[..., place : place + 2].view(np.float16)[...] = scale


def q4_k(x: np.ndarray) -> np.ndarray:
    """[n, 256] -> [n, 144]: d, dmin (fp16), 12 bytes of 6-bit scales and minima, 128 bytes of 4-bit values."""
    head, q = _scale_min(x, levels=15)
    return np.concatenate([head, _nibbles(q)], axis=1)


def q5_k(x: np.ndarray) -> np.ndarray:
    """[n, 256] -> [n, 176]: as Q4_K, with 32 bytes of fifth bits before the low four."""
    head, q = _scale_min(x, levels=31)
    fifth = (q >> 4) << np.arange(8, dtype=np.uint8)[None, :, None]
    high = np.bitwise_or.reduce(fifth, axis=1)
    return np.concatenate([head, high, _nibbles(q & 15)], axis=1)


def q6_k(x: np.ndarray) -> np.ndarray:
    """[n, 256] -> [n, 210]: low 4 bits (128 bytes), high 2 bits (64), 16 int8 scales, d (fp16)."""
    n = len(x)
    sub = x.reshape(n, 16, 16)
    wanted = np.abs(sub).max(axis=2) / 31
    d = (wanted.max(axis=1, keepdims=True) / 127).astype(np.float16)
    scale = np.rint(_divide(wanted, d.astype(np.float32))).clip(0, 127).astype(np.int8)
    step = d.astype(np.float32) * scale
    q = (np.rint(_divide(sub, step[:, :, None])).clip(-32, 31) + 32).astype(np.uint8)
    q = q.reshape(n, 2, 4, 32)  # [half, quarter, 32]: quarters 0 and 1 take the low nibbles, 2 and 3 the high ones
    low = (q[:, :, :2] & 15) | ((q[:, :, 2:] & 15) << 4)
    high = np.bitwise_or.reduce((q >> 4) << np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None], axis=2)
    parts = [low.reshape(n, 128), high.reshape(n, 64), scale.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(parts, axis=1)


def _scale_min(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """value = d * scale * q - dmin * minimum, per 32. Returns the first 16 bytes of a block and q [n, 8, 32] uint8."""
    n = len(x)
    sub = x.reshape(n, 8, 32)
    lowest = -np.minimum(sub.min(axis=2), 0)  # a minimum is stored negated and cannot be above zero
    wanted = (sub.max(axis=2) + lowest).clip(0) / levels
    d = (wanted.max(axis=1, keepdims=True) / 63).astype(np.float16)
    dmin = (lowest.max(axis=1, keepdims=True) / 63).astype(np.float16)
    scale = np.rint(_divide(wanted, d.astype(np.float32))).clip(0, 63).astype(np.uint8)
    minimum = np.rint(_divide(lowest, dmin.astype(np.float32))).clip(0, 63).astype(np.uint8)
    step = d.astype(np.float32) * scale
    offset = dmin.astype(np.float32) * minimum
    q = np.rint(_divide(sub + offset[:, :, None], step[:, :, None])).clip(0, levels).astype(np.uint8)
    six_bits = [
        scale[:, :4] | ((scale[:, 4:] >> 4) << 6),
        minimum[:, :4] | ((minimum[:, 4:] >> 4) << 6),
        (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4),
    ]
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *six_bits], axis=1), q


def _nibbles(q: np.ndarray) -> np.ndarray:
    """[n, 8, 32] -> [n, 128]: sub-blocks 2i in the low nibbles, 2i + 1 in the high ones."""
    packed: np.ndarray = q[:, 0::2] | (q[:, 1::2] << 4)
    return packed.reshape(len(q), 128)


def _divide(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """values / by, and 0 where `by` is 0 (a block of zeros)."""
    quotient = np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32)
    np.divide(values, by, out=quotient, where=by != 0)
    return quotient
