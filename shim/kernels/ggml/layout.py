"""How quantised weights lie on the GPU: the file's bits, moved once at load so that every load of a kernel is aligned.

A tile is 16 rows of 256 columns, in two halves of 128 columns, and holds planes one after the other:

    half 0: words | shorts | bytes | nibbles | crumbs        each plane is [16 rows][4 groups], a group is 32 columns
    half 1: likewise
    the super-block's own numbers (d, dmin), [16 rows]

So neighbouring threads load neighbouring words, a thread has all of the groups that it decodes, and codes stand in the
order of their columns, the first in the lowest bits. Rows are filled up to 16 and columns to 256 with zeros, which
decode to 0. Tiles of a row of tiles follow each other; `Weight.data` is [..., row tiles, column tiles, tile bytes].

F32, F16 and BF16 stay as they are. TQ1_0 is laid as TQ2_0 (66 bytes for 54). All other types keep their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

ROWS, COLUMNS, GROUP = 16, 256, 32  # of a tile, and of a group


@dataclass(frozen=True)
class Form:
    """What a tile of a type holds: planes of each kind, and bytes of a super-block's own numbers in each row."""

    words: int  # 4 bytes a group
    shorts: int = 0  # 2 bytes a group
    bytes: int = 0
    nibbles: int = 0  # 4 bits a group
    crumbs: int = 0  # 2 bits a group
    own: int = 0

    @property
    def row_bytes(self) -> int:
        """Of 256 columns of one row."""
        half = 16 * self.words + 8 * self.shorts + 4 * self.bytes + 2 * self.nibbles + self.crumbs
        return 2 * half + self.own

    @property
    def tile_bytes(self) -> int:
        return ROWS * self.row_bytes


FORMS = {
    Type.Q4_0: Form(words=4, shorts=1),
    Type.Q4_1: Form(words=4, shorts=2),
    Type.Q5_0: Form(words=5, shorts=1),
    Type.Q5_1: Form(words=5, shorts=2),
    Type.Q8_0: Form(words=8, shorts=1),
    Type.Q2_K: Form(words=2, shorts=1, own=4),
    Type.Q3_K: Form(words=3, bytes=1, nibbles=1, own=2),
    Type.Q4_K: Form(words=4, bytes=1, nibbles=1, own=4),
    Type.Q5_K: Form(words=5, bytes=1, nibbles=1, own=4),
    Type.Q6_K: Form(words=6, shorts=1, own=2),
    Type.TQ1_0: Form(words=2, own=2),
    Type.TQ2_0: Form(words=2, own=2),
    Type.MXFP4: Form(words=4, bytes=1),
    Type.NVFP4: Form(words=4, shorts=1),
    Type.IQ1_S: Form(words=1, shorts=1, own=2),
    Type.IQ1_M: Form(words=1, shorts=1, nibbles=1, crumbs=1, own=2),
    Type.IQ2_XXS: Form(words=2, own=2),
    Type.IQ2_XS: Form(words=2, bytes=1, own=2),
    Type.IQ2_S: Form(words=2, bytes=2, own=2),
    Type.IQ3_XXS: Form(words=3, own=2),
    Type.IQ3_S: Form(words=3, bytes=1, nibbles=1, own=2),
    Type.IQ4_NL: Form(words=4, shorts=1),
    Type.IQ4_XS: Form(words=4, nibbles=1, crumbs=1, own=2),
}
PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
TYPES = (*PLAIN, *FORMS)


class Weight(NamedTuple):
    """A matrix [rows, columns], or several ([..., rows, columns]), as the kernels take them. Made by `repack`.

    data: uint8 [..., row tiles, column tiles, tile bytes] (module docstring); of PLAIN types [..., rows, columns]
    """

    data: torch.Tensor
    type: Type
    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        """Of one matrix, as the file has it."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.rows * self.columns // block * size


def shape_of(type: Type, rows: int, columns: int) -> tuple[int, ...]:
    """Of one matrix's `Weight.data`. ValueError for a type or columns that do not fit."""
    check(type, columns)
    if type in PLAIN:
        return (rows, columns)
    return (-(-rows // ROWS), -(-columns // COLUMNS), FORMS[type].tile_bytes)


def check(type: Type, columns: int) -> None:
    if type not in FORMS and type not in PLAIN:
        raise ValueError(f"type is {type.name}, expected one of {', '.join(t.name for t in TYPES)}")
    block = GGML_QUANT_SIZES[type][0]
    if columns <= 0 or columns % block:
        raise ValueError(f"columns is {columns}, expected whole blocks of {block}, as {type.name} has them")
