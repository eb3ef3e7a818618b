"""From the rows of a file to a layer's parameter, on the parameter's device and in bounded memory: the file's bytes are
read once, and of them only this rank's share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType as Type

from shim.kernels.ggml import repack
from shim.kernels.ggml.layout import PLAIN, ROWS, shape_of

AT_ONCE = 32 << 20  # bytes of a file on the device at a time
OF_DTYPE = {dtype: type for type, dtype in PLAIN.items()}


class Piece(NamedTuple):
    """One of `pieces` equal runs of rows or columns."""

    number: int = 0
    pieces: int = 1

    @classmethod
    def of(cls, whole: int, share: int, rank: int, ranks: int) -> Piece:
        """This rank's, of a dimension that is `whole` in all and `share` here. ValueError if it is cut otherwise."""
        if whole == share:
            return cls()
        if whole != share * ranks:
            raise ValueError(f"{share} of {whole} on each of {ranks} ranks: expected all, or equal shares")
        return cls(rank, ranks)


def empty(type: Type, rows: int, columns: int, *matrices: int) -> torch.nn.Parameter:
    """A parameter for a weight, or several, on the default device; see `shim.kernels.ggml.layout`."""
    data = torch.empty(*matrices, *shape_of(type, rows, columns), dtype=PLAIN.get(type, torch.uint8))
    return torch.nn.Parameter(data, requires_grad=False)


def lay(target: torch.Tensor, type: Type, rows: torch.Tensor, columns: Piece) -> None:
    """Writes a piece of the columns of `rows` to `target`, and zeros to what is left of it.

    target: tiles, or plain rows, of as many rows or more
    rows: as the file has them, uint8 [rows, bytes of a row]; of plain types numbers [rows, columns] of any dtype
    ValueError for a piece that is no whole number of blocks, or not as wide as the target.
    """
    width, rest = divmod(rows.shape[1], columns.pieces)
    if rest:
        raise ValueError(f"rows of {rows.shape[1]} are not {columns.pieces} equal pieces")
    share = rows[:, columns.number * width : (columns.number + 1) * width]
    if type in PLAIN:
        if share.shape[1] != target.shape[1]:
            raise ValueError(f"rows are {share.shape[1]} wide, the layer is {target.shape[1]}")
        target[: len(share)].copy_(share)
        target[len(share) :].zero_()
        return
    step = max(ROWS, AT_ONCE // width // ROWS * ROWS)
    for first in range(0, len(share), step):
        some = share[first : first + step].to(target.device)
        repack.repack(some, type, target[first // ROWS : -(-(first + len(some)) // ROWS)])
    target[-(-len(share) // ROWS) :].zero_()
