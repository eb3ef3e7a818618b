# mypy: ignore-errors
"""Weights of any type as numbers, in registers: what the kernels of linear layers and of experts share.

A step is 128 or 64 columns of some rows. Everything of a group of 32 columns (its codes, scales and minima) is loaded
as [rows, groups], by the same thread, in Triton's first choice of layout (lanes: 8 rows by 4 groups): nothing that
belongs together ever meets in shared memory. A code becomes a float without a conversion and nearly without shifts:
where it stands, at bit p, an exponent is put over it that makes its lowest bit 1, and the float is 2**(23 - p) + code.
Integer instructions have half the rate of fp32 ones on capability 9.0, so one of the first and two of the second make a
weight.

`nil` is a 0 that the compiler does not know: with mask and exponent both immediate, ptxas makes two instructions of
`(word & mask) | exponent`, which is one. Formulas of the types: gguf-py's quants.py. Bytes and planes: layout.py.
"""

import triton
import triton.language as tl

from shim.kernels.ggml import fields


@triton.jit
def _scaled(number, scale, offset):
    """number [x, y, 32] by scale and offset [x, y]."""
    return number * scale[:, :, None] + offset[:, :, None]


@triton.jit
def _scaled_parts(number, scale, offset):
    """number [x, y, 32] by scale and offset [x, y, parts] of 32 / parts each."""
    PARTS: tl.constexpr = scale.shape[2]
    split = tl.reshape(number, [number.shape[0], number.shape[1], PARTS, 32 // PARTS])
    return tl.reshape(split * scale[:, :, :, None] + offset[:, :, :, None], number.shape)


@triton.jit
def _e8m0(exponent):
    """Half of 2**(exponent - 127): gguf-py's e8m0_to_fp32_half."""
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _ue4m3(code):
    """Half of an unsigned e4m3; 0x7F is 0. Its bits are those of a float but for the bias, 120 = 127 - 7."""
    bits = ((code & 127) << 20).to(tl.float32, bitcast=True)
    return tl.where(code == 127, 0.0, bits * 2.0**60 * 2.0**59)


@triton.jit
def _e2m1(half, spot):
    """Doubled e2m1 values: exponent and mantissa in a float's place, the bias made good by a product."""
    magnitude = fields.chain4(
        fields.bits(fields.word(half, spot, 0), 4, 8, 22, 0, 1),
        fields.bits(fields.word(half, spot, 1), 4, 8, 22, 0, 1),
        fields.bits(fields.word(half, spot, 2), 4, 8, 22, 0, 1),
        fields.bits(fields.word(half, spot, 3), 4, 8, 22, 0, 1),
    )  # fmt: skip
    value = (magnitude & 0x01C00000).to(tl.float32, bitcast=True) * 2.0**127
    return (value.to(tl.uint32, bitcast=True) | ((magnitude & 0x02000000) << 6)).to(tl.float32, bitcast=True)


@triton.jit
def _looked_up(table, codes):
    """Values of IQ4_NL by codes of 4 bits: [x, y] words -> [x, y, 8]. One gather for each, of the same 64 bytes."""
    return _gather8(table, codes, 0, 1, 8)


@triton.jit
def _gather8(table, word, FIRST: tl.constexpr, BY: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        return tl.load(table + ((word >> (FIRST * 4)) & 15))
    else:
        even = _gather8(table, word, FIRST, BY * 2, COUNT // 2)
        odd = _gather8(table, word, FIRST + BY, BY * 2, COUNT // 2)
        return tl.reshape(tl.join(even, odd), word.shape + [COUNT])  # noqa: RUF005 - Triton has no *


@triton.jit
def _grid8(table, index, nil):
    """8 values of 8 bits: [x, y] -> [x, y, 8]."""
    entry = tl.load(table + index)
    low, high = (entry & 0xFFFFFFFF).to(tl.uint32), ((entry >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return fields.chain(fields.codes(low, nil, 8), fields.codes(high, nil, 8))


@triton.jit
def _signs(word):
    """IQ2_XXS and IQ3_XXS: in each byte 7 bits of signs become 8, an even number of them set."""
    kept = word & 0x7F7F7F7F
    odd = kept ^ (kept >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    return kept | ((odd & 0x01010101) << 7)


@triton.jit
def _top_bits(word):
    """The top bit of each byte, together: 0 to 15, as a float."""
    return ((((word >> 7) & 0x01010101) * 0x01020408) >> 24 & 15).to(tl.float32)


@triton.jit
def _signed(value, signs):
    """value [x, y, 32], each negated where its bit of signs [x, y] is set."""
    flip = fields.bits(signs, 1, 32, 31, 0, 1)
    return (value.to(tl.uint32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def _grids_of_4(table, word, BITS: tl.constexpr, high, nil):
    """16 values, by 4 indices of 8 bits with a ninth from the low bits of `high`."""
    a = _codes4(tl.load(table + ((word & 255) | ((high & 1) << 8))), nil, BITS)
    b = _codes4(tl.load(table + (((word >> 8) & 255) | ((high & 2) << 7))), nil, BITS)
    c = _codes4(tl.load(table + (((word >> 16) & 255) | ((high & 4) << 6))), nil, BITS)
    d = _codes4(tl.load(table + (((word >> 24) & 255) | ((high & 8) << 5))), nil, BITS)
    return fields.chain4(a, b, c, d)


@triton.jit
def _codes4(entry, nil, BITS: tl.constexpr):
    return fields.fields(entry.to(tl.uint32), nil, BITS, 4, 0, 1)


@triton.jit
def _ternary(table, word, high, nil, STEP: tl.constexpr):
    """32 codes of IQ1, by 4 indices of 8 bits with three more from `high`, every STEP bits."""
    a = _codes8(tl.load(table + ((word & 255) | ((high & 7) << 8))), nil)
    b = _codes8(tl.load(table + (((word >> 8) & 255) | (((high >> STEP) & 7) << 8))), nil)
    c = _codes8(tl.load(table + (((word >> 16) & 255) | (((high >> 2 * STEP) & 7) << 8))), nil)
    d = _codes8(tl.load(table + (((word >> 24) & 255) | (((high >> 3 * STEP) & 7) << 8))), nil)
    return fields.chain4(a, b, c, d)


@triton.jit
def _codes8(entry, nil):
    return fields.fields(entry.to(tl.uint32), nil, 2, 8, 0, 1)


@triton.jit
def _delta(high, BIT: tl.constexpr):
    """IQ1: what is added to a ternary code of 0 to 2."""
    return tl.where((high >> BIT) & 1 != 0, -1.125, -0.875)


@triton.jit
def weights(packed, table, row, tiles, step, TYPE: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr):
    """fp32 [rows, GROUPS, 32]: the weights of `row` (int32 [rows], all valid) in the columns of step `step`.

    packed: uint8 pointer to a matrix; tiles: of a row of tiles; BYTES: of 256 columns of a row, as the file has them;
    table: tables.table, or anything; GROUPS: 2 or 4, of 32 columns
    """
    g = step * GROUPS % 4 + tl.arange(0, GROUPS)
    spot = (row % 16)[:, None] * 4 + g[None, :]
    start = packed + (row // 16).to(tl.int64) * (tiles * (16 * BYTES))
    tile = start[:, None] + (step * GROUPS // 8).to(tl.int64) * (16 * BYTES)
    second = step * GROUPS // 4 % 2
    nil = (tiles >> 30).to(tl.uint32)
    if TYPE == "Q4_0" or TYPE == "IQ4_NL" or TYPE == "Q4_1" or TYPE == "Q5_0" or TYPE == "Q5_1" or TYPE == "Q8_0":
        return _legacy(tile + second * (8 * BYTES), table, spot, nil, TYPE)
    elif TYPE == "MXFP4" or TYPE == "NVFP4":
        half = tile + second * (8 * BYTES)
        if TYPE == "MXFP4":
            return _e2m1(half, spot) * _e8m0(fields.byte(half, spot, 1024))[:, :, None]
        else:
            code = fields.short(half, spot, 4, 0)
            scale = tl.join(_ue4m3(code & 255), _ue4m3(code >> 8))
            return _scaled_parts(_e2m1(half, spot), scale, tl.zeros_like(scale))
    elif TYPE == "Q4_K" or TYPE == "Q5_K" or TYPE == "Q2_K":
        half = tile + second * (8 * (BYTES - 4))
        return _with_minima(half, tile + 16 * (BYTES - 4), spot, nil, TYPE)
    else:
        half = tile + second * (8 * (BYTES - 2))
        d = fields.own(tile + 16 * (BYTES - 2), spot)
        if TYPE == "IQ1_S" or TYPE == "IQ1_M":
            return _iq1(half, table, d, spot, nil, TYPE)
        elif TYPE == "IQ2_XXS" or TYPE == "IQ2_XS" or TYPE == "IQ2_S":
            return _iq2(half, table, d, spot, nil, TYPE)
        elif TYPE == "IQ3_XXS" or TYPE == "IQ3_S":
            return _iq3(half, table, d, spot, nil, TYPE)
        else:
            return _without_minima(half, table, d, spot, nil, TYPE)


@triton.jit
def _legacy(half, table, spot, nil, TYPE: tl.constexpr):
    if TYPE == "Q8_0":
        d = fields.half(half, spot, 8, 0)
        return _scaled(
            fields.chain(fields.eights(half, spot, nil, 0), fields.eights(half, spot, nil, 4)), d, d * -128.0
        )
    elif TYPE == "IQ4_NL":
        return _scaled_values(half, table, spot, fields.half(half, spot, 4, 0))
    elif TYPE == "Q4_0":
        d = fields.half(half, spot, 4, 0)
        return _scaled(fields.fours(half, spot, nil), d, d * -8.0)
    elif TYPE == "Q4_1":
        d = fields.half(half, spot, 4, 0)
        m = fields.half(half, spot, 4, 1)
        return _scaled(fields.fours(half, spot, nil), d, m)
    else:
        codes = fields.fours(half, spot, nil) + 16.0 * fields.codes(fields.word(half, spot, 4), nil, 1)
        d = fields.half(half, spot, 5, 0)
        if TYPE == "Q5_0":
            return _scaled(codes, d, d * -16.0)
        else:
            return _scaled(codes, d, fields.half(half, spot, 5, 1))


@triton.jit
def _scaled_values(half, table, spot, scale):
    values = fields.chain4(
        _looked_up(table, fields.word(half, spot, 0)), _looked_up(table, fields.word(half, spot, 1)),
        _looked_up(table, fields.word(half, spot, 2)), _looked_up(table, fields.word(half, spot, 3)),
    )  # fmt: skip
    return values * scale[:, :, None]


@triton.jit
def _with_minima(half, own, spot, nil, TYPE: tl.constexpr):
    d, least = fields.own_both(own, spot)
    if TYPE == "Q2_K":
        both = fields.short(half, spot, 2, 0)
        scale = tl.join((both & 15).to(tl.float32), (both >> 8 & 15).to(tl.float32)) * d[:, :, None]
        offset = tl.join((both >> 4 & 15).to(tl.float32), (both >> 12).to(tl.float32)) * least[:, :, None]
        return _scaled_parts(fields.twos(half, spot, nil, 0), scale, -offset)
    else:
        codes = fields.fours(half, spot, nil)
        if TYPE == "Q5_K":
            codes = codes + 16.0 * fields.codes(fields.word(half, spot, 4), nil, 1)
        WORDS: tl.constexpr = 5 if TYPE == "Q5_K" else 4
        one = fields.byte(half, spot, WORDS * 256)
        four = fields.nibble(half, spot, WORDS * 256 + 64)
        scale = d * (one & 63).to(tl.float32)
        offset = least * (one >> 6 | four << 2).to(tl.float32)
        return _scaled(codes, scale, -offset)


@triton.jit
def _without_minima(half, table, d, spot, nil, TYPE: tl.constexpr):
    if TYPE == "Q6_K":
        codes = fields.fours(half, spot, nil) + 16.0 * fields.twos(half, spot, nil, 4)
        both = fields.short(half, spot, 6, 0)
        scale = tl.join(_int8(both & 255), _int8(both >> 8)) * d[:, :, None]
        return _scaled_parts(codes, scale, scale * -32.0)
    elif TYPE == "Q3_K":
        codes = fields.twos(half, spot, nil, 0) + 4.0 * fields.codes(fields.word(half, spot, 2), nil, 1)
        one = fields.byte(half, spot, 3 * 256)
        four = fields.nibble(half, spot, 3 * 256 + 64)
        scale = tl.join((one & 63).to(tl.float32), (one >> 6 | four << 2).to(tl.float32)) - 32.0
        scale = scale * d[:, :, None]
        return _scaled_parts(codes, scale, scale * -4.0)
    elif TYPE == "IQ4_XS":
        code = fields.nibble(half, spot, 4 * 256) | fields.crumb(half, spot, 4 * 256 + 32) << 4
        return _scaled_values(half, table, spot, d * (code.to(tl.float32) - 32.0))
    else:
        tl.static_assert(TYPE == "TQ1_0" or TYPE == "TQ2_0")
        return _scaled(fields.twos(half, spot, nil, 0), d, d * -1.0)


@triton.jit
def _int8(byte):
    return (byte ^ 128).to(tl.float32) - 128.0


@triton.jit
def _iq1(half, table, d, spot, nil, TYPE: tl.constexpr):
    word = fields.word(half, spot, 0)
    high = fields.short(half, spot, 1, 0)
    if TYPE == "IQ1_S":
        scale = d * (2 * (high >> 12 & 7) + 1).to(tl.float32)
        return _scaled(_ternary(table, word, high, nil, 3), scale, scale * _delta(high, 15))
    else:
        both = fields.nibble(half, spot, 256 + 128) | fields.crumb(half, spot, 256 + 128 + 32) << 4
        first = d * (2 * (both & 7) + 1).to(tl.float32)
        second = d * (2 * (both >> 3) + 1).to(tl.float32)
        scale = fields.chain(tl.join(first, first), tl.join(second, second))
        delta = fields.chain(tl.join(_delta(high, 3), _delta(high, 7)), tl.join(_delta(high, 11), _delta(high, 15)))
        return _scaled_parts(_ternary(table, word, high, nil, 4), scale, scale * delta)


@triton.jit
def _iq2(half, table, d, spot, nil, TYPE: tl.constexpr):
    word = fields.word(half, spot, 0)
    signs = fields.word(half, spot, 1)
    if TYPE == "IQ2_XXS":
        high = tl.zeros_like(word)
        first = _top_bits(signs)
        second = first
        signs = _signs(signs)
    elif TYPE == "IQ2_XS":
        high = (signs >> 7 & 1) | (signs >> 13 & 4) | (signs >> 19 & 16) | (signs >> 25 & 64)
        both = fields.byte(half, spot, 2 * 256)
        first, second = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
        signs = _signs(signs)
    else:
        high = fields.byte(half, spot, 2 * 256)
        both = fields.byte(half, spot, 2 * 256 + 64)
        first, second = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
    codes = fields.chain4(
        _grid8(table, (word & 255) | (high & 3) << 8, nil), _grid8(table, (word >> 8 & 255) | (high & 12) << 6, nil),
        _grid8(table, (word >> 16 & 255) | (high & 48) << 4, nil), _grid8(table, (word >> 24) | (high & 192) << 2, nil),
    )  # fmt: skip
    scale = (tl.join(first, second) + 0.5) * (0.25 * d)[:, :, None]
    return _signed(_scaled_parts(codes, scale, tl.zeros_like(scale)), signs)


@triton.jit
def _iq3(half, table, d, spot, nil, TYPE: tl.constexpr):
    first = fields.word(half, spot, 0)
    second = fields.word(half, spot, 1)
    signs = fields.word(half, spot, 2)
    if TYPE == "IQ3_XXS":
        BITS: tl.constexpr = 8
        high = tl.zeros_like(first)
        scale = (_top_bits(signs) + 0.5) * (0.5 * d)
        signs = _signs(signs)
    else:
        BITS: tl.constexpr = 4
        high = fields.byte(half, spot, 3 * 256)
        scale = d * (2 * fields.nibble(half, spot, 3 * 256 + 64) + 1).to(tl.float32)
    codes = fields.chain(_grids_of_4(table, first, BITS, high, nil), _grids_of_4(table, second, BITS, high >> 4, nil))
    return _signed(codes * scale[:, :, None], signs)


@triton.jit
def plain(matrix, row, columns, step, GROUPS: tl.constexpr):
    """As `weights`, of F32, F16 and BF16: 0 behind the last column."""
    k = step * (32 * GROUPS) + tl.arange(0, 32 * GROUPS)
    lines = matrix + row.to(tl.int64) * columns
    value = tl.load(lines[:, None] + k[None, :], mask=(k < columns)[None, :], other=0.0)
    return value
