"""From the file's blocks to the tiles of layout.py. Plain torch, on the device of its input, in bounded memory.

Block layouts: llama.cpp's ggml-common.h, and the dequantize_blocks of gguf-py's quants.py. Each function here takes
uint8 [n, bytes of 256 columns] and returns the planes that `layout.FORMS` names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from shim.kernels.ggml.layout import COLUMNS, FORMS, GROUP, PLAIN, ROWS, Weight, check, shape_of

GROUPS = COLUMNS // GROUP
AT_ONCE = 1 << 24  # weights that are re-laid at a time; each takes some 10 bytes meanwhile
Bytes = torch.Tensor  # uint8


class Planes(NamedTuple):
    """Of n rows of 256 columns, 8 groups each."""

    words: Bytes  # [n, 8, 4 * words]
    shorts: Bytes | None = None  # [n, 8, 2 * shorts]
    bytes: Bytes | None = None  # [n, 8, bytes]
    nibbles: Bytes | None = None  # [n, 8], each below 16
    crumbs: Bytes | None = None  # [n, 8], each below 4
    own: Bytes | None = None  # [n, bytes]


def repack(raw: Bytes, type: Type, out: torch.Tensor | None = None) -> Weight:
    """Lays a matrix, or several, as the kernels read them.

    raw: uint8 [..., rows, bytes of a row], as a GGUF file has it
    out: what to write to, as `layout.shape_of` has it for one matrix, with raw's leading dimensions before it (uint8;
         of a plain type unused)

    ValueError names an argument that does not fit.
    """
    if raw.dtype != torch.uint8 or raw.dim() < 2:
        raise ValueError(f"raw is {list(raw.shape)} of {raw.dtype}, expected uint8 [..., rows, bytes of a row]")
    block, size = GGML_QUANT_SIZES[type]
    rows, row_bytes = raw.shape[-2:]
    if row_bytes % size:
        raise ValueError(f"raw has rows of {row_bytes} bytes, expected whole blocks of {size}, as {type.name} has them")
    columns = row_bytes // size * block
    check(type, columns)
    if type in PLAIN:
        return Weight(raw.contiguous().view(PLAIN[type]), type, rows, columns)
    shape = (*raw.shape[:-2], *shape_of(type, rows, columns))
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=raw.device)
    elif out.shape != shape or out.dtype != torch.uint8 or not out.is_contiguous():
        raise ValueError(f"out is {list(out.shape)} of {out.dtype}, expected contiguous uint8 {list(shape)}")
    step = max(ROWS, AT_ONCE // columns // ROWS * ROWS)
    matrices, targets = raw.reshape(-1, rows, row_bytes), out.view(-1, *shape[-3:])
    for matrix, target in zip(matrices, targets, strict=True):
        for first in range(0, rows, step):
            part = matrix[first : first + step]
            target[first // ROWS : (first + step) // ROWS] = _tiles(part, type, columns)
    return Weight(out, type, rows, columns)


def _tiles(raw: Bytes, type: Type, columns: int) -> Bytes:
    """[rows, bytes of a row] -> [row tiles, column tiles, tile bytes]."""
    block, size = GGML_QUANT_SIZES[type]
    wide, high = -(-columns // COLUMNS), -(-raw.shape[0] // ROWS)
    filled = raw.new_zeros(high * ROWS, wide * (COLUMNS // block) * size)
    filled[: raw.shape[0], : raw.shape[1]] = raw
    planes = SPLIT[type](filled.view(high * ROWS * wide, -1))
    halves = [_plane(word, high, wide) for word in torch.split(planes.words, 4, dim=-1)]
    for plane, unit in ((planes.shorts, 2), (planes.bytes, 1)):
        if plane is not None:
            halves += [_plane(part, high, wide) for part in torch.split(plane, unit, dim=-1)]
    for plane, bits in ((planes.nibbles, 4), (planes.crumbs, 2)):
        if plane is not None:
            halves.append(_plane(pack(plane.view(-1, 2, GROUPS // 2), bits), high, wide))
    tile = torch.cat(halves, dim=-1).flatten(2)
    if planes.own is not None:
        own = planes.own.reshape(high, ROWS, wide, -1).transpose(1, 2)
        tile = torch.cat([tile, own.flatten(2)], dim=-1)
    assert tile.shape[-1] == FORMS[type].tile_bytes, type
    return tile


def _plane(values: Bytes, high: int, wide: int) -> Bytes:
    """[rows * column tiles, ...] -> [row tiles, column tiles, 2 halves, bytes]."""
    halves = values.reshape(high, ROWS, wide, 2, -1)
    return halves.permute(0, 2, 3, 1, 4).flatten(3)


def unpack(packed: Bytes, bits: int) -> Bytes:
    """[..., m] -> [..., 8 / bits, m]: as the file has codes, those of the lowest bits of m bytes first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts[:, None]) & ((1 << bits) - 1)


def pack(codes: Bytes, bits: int) -> Bytes:
    """[..., m] -> [..., m * bits / 8]: neighbouring codes in one byte, the first in the lowest bits."""
    each = 8 // bits
    packed = codes[..., ::each].clone()
    for i in range(1, each):
        packed |= codes[..., i::each] << (i * bits)
    return packed


def _codes(packed: Bytes, bits: int, run: int) -> Bytes:
    """Codes that the file keeps in runs of `run` bytes, in the order of their columns: [n, 8, 32]."""
    n = packed.shape[0]
    return unpack(packed.reshape(n, -1, run), bits).reshape(n, GROUPS, GROUP)


def _fours(packed: Bytes, run: int) -> Bytes:
    return pack(_codes(packed, 4, run), 4)


def _legacy(blocks: Bytes, own: int, high: bool = False) -> Planes:
    """Q4_0 to Q5_1, IQ4_NL: 32 columns a block; fp16 numbers, fifth bits, then low four bits."""
    b = blocks.view(blocks.shape[0], GROUPS, -1)
    fours = _fours(b[..., -16:], 16)
    words = torch.cat([fours, b[..., own : own + 4]], dim=-1) if high else fours
    return Planes(words, shorts=b[..., :own])


def _q8_0(blocks: Bytes) -> Planes:
    """int8 codes become unsigned by 128 more: one bit of each is flipped."""
    b = blocks.view(blocks.shape[0], GROUPS, 34)
    return Planes(b[..., 2:] ^ 0x80, shorts=b[..., :2])


def _scale_min(scales: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits, as a byte and a nibble for each group."""
    d, m, both = scales.view(-1, 3, 4).unbind(1)
    scale = torch.cat([d & 63, (both & 15) | ((d >> 2) & 48)], dim=1)
    least = torch.cat([m & 63, (both >> 4) | ((m >> 2) & 48)], dim=1)
    return (scale | (least << 6)).unsqueeze(-1), least >> 2


def _q4_k(blocks: Bytes) -> Planes:
    one, four = _scale_min(blocks[:, 4:16])
    return Planes(_fours(blocks[:, 16:], 32), bytes=one, nibbles=four, own=blocks[:, :4])


def _q5_k(blocks: Bytes) -> Planes:
    one, four = _scale_min(blocks[:, 4:16])
    words = torch.cat([_fours(blocks[:, 48:], 32), pack(_codes(blocks[:, 16:48], 1, 32), 1)], dim=-1)
    return Planes(words, bytes=one, nibbles=four, own=blocks[:, :4])


def _q6_k(blocks: Bytes) -> Planes:
    words = torch.cat([_fours(blocks[:, :128], 64), pack(_codes(blocks[:, 128:192], 2, 32), 2)], dim=-1)
    return Planes(words, shorts=blocks[:, 192:208].reshape(-1, GROUPS, 2), own=blocks[:, 208:])


def _q2_k(blocks: Bytes) -> Planes:
    words = pack(_codes(blocks[:, 16:80], 2, 32), 2)
    return Planes(words, shorts=blocks[:, :16].reshape(-1, GROUPS, 2), own=blocks[:, 80:])


def _q3_k(blocks: Bytes) -> Planes:
    words = torch.cat([pack(_codes(blocks[:, 32:96], 2, 32), 2), pack(_codes(blocks[:, :32], 1, 32), 1)], dim=-1)
    low, high = unpack(blocks[:, 96:104], 4).flatten(1), unpack(blocks[:, 104:108], 2).flatten(1)
    scales = (low | (high << 4)).view(-1, GROUPS, 2)
    first, second = scales.unbind(-1)
    return Planes(words, bytes=(first | (second << 6)).unsqueeze(-1), nibbles=second >> 2, own=blocks[:, 108:])


def _tq2_0(blocks: Bytes) -> Planes:
    return Planes(pack(_codes(blocks[:, :64], 2, 32), 2), own=blocks[:, 64:])


def _tq1_0(blocks: Bytes) -> Planes:
    """Five codes to a byte, base 3: each by its power of 3, modulo 256, then its top digit."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=blocks.device)[:, None]
    parts = [(blocks[:, None, first:last] * powers[:count]).flatten(1)
             for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]  # fmt: skip
    codes = ((torch.cat(parts, dim=1).short() * 3) >> 8).to(torch.uint8)
    return Planes(pack(codes.view(-1, GROUPS, GROUP), 2), own=blocks[:, 52:])


def _mxfp4(blocks: Bytes) -> Planes:
    b = blocks.view(blocks.shape[0], GROUPS, 17)
    return Planes(_fours(b[..., 1:], 16), bytes=b[..., :1])


def _nvfp4(blocks: Bytes) -> Planes:
    b = blocks.view(blocks.shape[0], 4, 36)
    return Planes(_fours(b[..., 4:], 8), shorts=b[..., :4].reshape(-1, GROUPS, 2))


def _signs_scale(quarters: Bytes) -> Bytes:
    """IQ2_XXS and IQ3_XXS, [n, 8, 4]: four times 7 bits of signs, then 4 of scale. Each byte gets 7 bits of signs and
    one of the scale."""
    word = quarters.contiguous().view(torch.int32).long()
    i = torch.arange(4, device=quarters.device)
    return (((word >> (7 * i)) & 127) | (((word >> (28 + i)) & 1) << 7)).to(torch.uint8)


def _iq2_xxs(blocks: Bytes) -> Planes:
    b = blocks[:, 2:].reshape(-1, GROUPS, 8)
    return Planes(torch.cat([b[..., :4], _signs_scale(b[..., 4:])], dim=-1), own=blocks[:, :2])


def _iq2_xs(blocks: Bytes) -> Planes:
    """Of 16 bits 9 are the index, 7 signs: the low byte, and one of signs with the index's ninth bit on top."""
    low, high = blocks[:, 2:66].reshape(-1, GROUPS, 4, 2).unbind(-1)
    words = torch.cat([low, (high >> 1) | (high << 7)], dim=-1)
    return Planes(words, bytes=blocks[:, 66:].reshape(-1, GROUPS, 1), own=blocks[:, :2])


def _iq2_s(blocks: Bytes) -> Planes:
    words = blocks[:, 2:66].reshape(-1, 2, GROUPS, 4).transpose(1, 2).flatten(2)
    return Planes(words, bytes=blocks[:, 66:].reshape(-1, 2, GROUPS).transpose(1, 2), own=blocks[:, :2])


def _iq3_xxs(blocks: Bytes) -> Planes:
    indices, rest = blocks[:, 2:66].reshape(-1, GROUPS, 8), blocks[:, 66:].reshape(-1, GROUPS, 4)
    return Planes(torch.cat([indices, _signs_scale(rest)], dim=-1), own=blocks[:, :2])


def _iq3_s(blocks: Bytes) -> Planes:
    words = torch.cat([blocks[:, 2:66].reshape(-1, GROUPS, 8), blocks[:, 74:106].reshape(-1, GROUPS, 4)], dim=-1)
    scales = unpack(blocks[:, 106:], 4).transpose(1, 2).flatten(1)
    return Planes(words, bytes=blocks[:, 66:74].unsqueeze(-1), nibbles=scales, own=blocks[:, :2])


def _iq1_s(blocks: Bytes) -> Planes:
    return Planes(
        blocks[:, 2:34].reshape(-1, GROUPS, 4), shorts=blocks[:, 34:].reshape(-1, GROUPS, 2), own=blocks[:, :2]
    )


def _iq1_m(blocks: Bytes) -> Planes:
    """Four uint16 hold four scales of 3 bits each, and in their top bits a quarter of d each."""
    words = blocks[:, 48:].contiguous().view(torch.int16).int() & 0xFFFF
    i = torch.arange(4, device=blocks.device)
    d = ((words >> 12) << (4 * i)).sum(1)
    own = torch.stack([d & 255, d >> 8], dim=1).to(torch.uint8)
    scales = ((words.unsqueeze(-1) >> (3 * i)) & 7).view(-1, GROUPS, 2)
    both = (scales[..., 0] | (scales[..., 1] << 3)).to(torch.uint8)
    return Planes(
        blocks[:, :32].reshape(-1, GROUPS, 4), shorts=blocks[:, 32:48].reshape(-1, GROUPS, 2),
        nibbles=both & 15, crumbs=both >> 4, own=own,
    )  # fmt: skip


def _iq4_xs(blocks: Bytes) -> Planes:
    high = unpack(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = unpack(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    return Planes(_fours(blocks[:, 8:], 16), nibbles=low, crumbs=high, own=blocks[:, :2])


SPLIT: dict[Type, Callable[[Bytes], Planes]] = {
    Type.Q4_0: lambda b: _legacy(b, 2),
    Type.Q4_1: lambda b: _legacy(b, 4),
    Type.Q5_0: lambda b: _legacy(b, 2, high=True),
    Type.Q5_1: lambda b: _legacy(b, 4, high=True),
    Type.Q8_0: _q8_0,
    Type.Q2_K: _q2_k,
    Type.Q3_K: _q3_k,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.TQ1_0: _tq1_0,
    Type.TQ2_0: _tq2_0,
    Type.MXFP4: _mxfp4,
    Type.NVFP4: _nvfp4,
    Type.IQ1_S: _iq1_s,
    Type.IQ1_M: _iq1_m,
    Type.IQ2_XXS: _iq2_xxs,
    Type.IQ2_XS: _iq2_xs,
    Type.IQ2_S: _iq2_s,
    Type.IQ3_XXS: _iq3_xxs,
    Type.IQ3_S: _iq3_s,
    Type.IQ4_NL: lambda b: _legacy(b, 2),
    Type.IQ4_XS: _iq4_xs,
}
