# mypy: ignore-errors
"""Planes of a tile (layout.py), [rows, groups], and the fields of their words, [rows, groups, fields]."""

import triton
import triton.language as tl


@triton.jit
def load(pointers):
    """Neighbours in memory, but a thread loads one: its others would be of other groups."""
    return tl.load(tl.max_contiguous(pointers, [1, 1]))


@triton.jit
def word(half, spot, INDEX: tl.constexpr):
    """uint32 [rows, groups]: word INDEX of each group."""
    return load((half + INDEX * 256).to(tl.pointer_type(tl.uint32), bitcast=True) + spot)


@triton.jit
def short(half, spot, WORDS: tl.constexpr, INDEX: tl.constexpr):
    return pair(half + (WORDS * 256 + INDEX * 128), spot)


@triton.jit
def half(half, spot, WORDS: tl.constexpr, INDEX: tl.constexpr):
    plane = half + (WORDS * 256 + INDEX * 128)
    return load(plane.to(tl.pointer_type(tl.float16), bitcast=True) + spot).to(tl.float32)


@triton.jit
def byte(half, spot, OFFSET: tl.constexpr):
    """Nothing is loaded by the byte: Triton would take another layout of the MMA's operand for it (kWidth 4)."""
    return (pair(half + OFFSET, spot // 2) >> (spot % 2 * 8).to(tl.uint32)) & 255


@triton.jit
def pair(plane, at):
    return load(plane.to(tl.pointer_type(tl.uint16), bitcast=True) + at).to(tl.uint32)


@triton.jit
def nibble(half, spot, OFFSET: tl.constexpr):
    return (pair(half + OFFSET, spot // 4) >> (spot % 4 * 4).to(tl.uint32)) & 15


@triton.jit
def crumb(half, spot, OFFSET: tl.constexpr):
    return (pair(half + OFFSET, spot // 8) >> (spot % 8 * 2).to(tl.uint32)) & 3


@triton.jit
def own(own, spot):
    """The one fp16 number of each row's super-block."""
    return load(own.to(tl.pointer_type(tl.float16), bitcast=True) + spot // 4).to(tl.float32)


@triton.jit
def both(word):
    """The two fp16 numbers of a uint32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def own_both(own, spot):
    return both(load(own.to(tl.pointer_type(tl.uint32), bitcast=True) + spot // 4))


@triton.jit
def fields(word, nil, BITS: tl.constexpr, COUNT: tl.constexpr, FIRST: tl.constexpr, BY: tl.constexpr):
    """uint32 [...] -> fp32 [..., COUNT]: fields FIRST, FIRST + BY, ... of BITS bits."""
    if COUNT == 1:
        P: tl.constexpr = FIRST * BITS if FIRST * BITS + BITS <= 23 else FIRST * BITS - (24 - BITS)
        if P != FIRST * BITS:
            word = word >> (24 - BITS)
        bits = (word & (((1 << BITS) - 1) << P)) | (nil + ((150 - P) << 23))
        return bits.to(tl.float32, bitcast=True) - 2.0 ** (23 - P)
    else:
        even = fields(word, nil, BITS, COUNT // 2, FIRST, BY * 2)
        odd = fields(word, nil, BITS, COUNT // 2, FIRST + BY, BY * 2)
        return tl.reshape(tl.join(even, odd), word.shape + [COUNT])  # noqa: RUF005 - Triton has no *


@triton.jit
def bits(word, BITS: tl.constexpr, COUNT: tl.constexpr, TO: tl.constexpr, FIRST: tl.constexpr, BY: tl.constexpr):
    """As `_fields`, but uint32, each field moved to bit TO."""
    if COUNT == 1:
        MASK: tl.constexpr = ((1 << BITS) - 1) << TO
        if FIRST * BITS < TO:
            return (word << (TO - FIRST * BITS)) & MASK
        else:
            return (word >> (FIRST * BITS - TO)) & MASK
    else:
        even = bits(word, BITS, COUNT // 2, TO, FIRST, BY * 2)
        odd = bits(word, BITS, COUNT // 2, TO, FIRST + BY, BY * 2)
        return tl.reshape(tl.join(even, odd), word.shape + [COUNT])  # noqa: RUF005 - Triton has no *


@triton.jit
def codes(word, nil, BITS: tl.constexpr):
    """All fields of a uint32: [...] -> fp32 [..., 32 / BITS]."""
    return fields(word, nil, BITS, 32 // BITS, 0, 1)


@triton.jit
def chain(a, b):
    """[x, y, n] and [x, y, n] -> [x, y, 2 * n]."""
    both = tl.permute(tl.join(a, b), (0, 1, 3, 2))
    return tl.reshape(both, [a.shape[0], a.shape[1], 2 * a.shape[2]])


@triton.jit
def chain4(a, b, c, d):
    return chain(chain(a, b), chain(c, d))


@triton.jit
def fours(half, spot, nil):
    """The 32 codes of 4 bits that four words hold."""
    return chain4(
        codes(word(half, spot, 0), nil, 4), codes(word(half, spot, 1), nil, 4),
        codes(word(half, spot, 2), nil, 4), codes(word(half, spot, 3), nil, 4),
    )  # fmt: skip


@triton.jit
def twos(half, spot, nil, INDEX: tl.constexpr):
    """The 32 codes of 2 bits that two words hold."""
    return chain(codes(word(half, spot, INDEX), nil, 2), codes(word(half, spot, INDEX + 1), nil, 2))


@triton.jit
def eights(half, spot, nil, INDEX: tl.constexpr):
    """16 codes of 8 bits."""
    return chain4(
        codes(word(half, spot, INDEX), nil, 8), codes(word(half, spot, INDEX + 1), nil, 8),
        codes(word(half, spot, INDEX + 2), nil, 8), codes(word(half, spot, INDEX + 3), nil, 8),
    )  # fmt: skip
