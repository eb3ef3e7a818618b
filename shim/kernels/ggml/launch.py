"""The host side of what the products share: a weight as a kernel's arguments, and weights of any type to 16 bits."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from shim.kernels.ggml import kernel, tables
from shim.kernels.ggml.layout import COLUMNS, FORMS, PLAIN, ROWS, Weight, shape_of
from shim.kernels.sparse_mla import launch as _  # noqa: F401 - mends bf16 under the interpreter

ACTIVATIONS = (torch.bfloat16, torch.float16)
BLOCK, WARPS = 64, 4  # of `dequantize`


class Operand(NamedTuple):
    """What a kernel is given of a weight."""

    data: torch.Tensor
    table: torch.Tensor
    tiles: int  # of a row of tiles
    matrix: int  # values of data from one matrix to the next
    type: str  # "": plain
    bytes: int  # of 256 columns of a row


def operand(weight: Weight) -> Operand:
    data = weight.data
    matrix = data.stride(0) if data.dim() > (2 if weight.type in PLAIN else 3) else 0
    if weight.type in PLAIN:
        return Operand(data, data, 0, matrix, "", 0)
    found = tables.table(weight.type, data.device)
    tiles = -(-weight.columns // COLUMNS)
    type = "TQ2_0" if weight.type.name == "TQ1_0" else weight.type.name
    return Operand(data, data if found is None else found, tiles, matrix, type, FORMS[weight.type].row_bytes)


@lru_cache
def operand_width(device: torch.device) -> int:
    """kWidth of Triton's MMA operand: 2 of wgmma; 4 of mma.sync, where an operand of 16 bits comes from a join."""
    return 2 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else 4


def check_weight(name: str, weight: Weight, matrices: int | None = None) -> None:
    """matrices: None: one, without a dimension for it."""
    shape = shape_of(weight.type, weight.rows, weight.columns)
    shape = shape if matrices is None else (matrices, *shape)
    dtype = PLAIN.get(weight.type, torch.uint8)
    data = weight.data
    inner = shape if matrices is None else shape[1:]
    steps = [1]
    for size in inner[:0:-1]:
        steps.insert(0, steps[0] * size)
    if tuple(data.shape) != shape or data.dtype != dtype or list(data.stride()[-len(inner) :]) != steps:
        raise ValueError(
            f"{name} has data {list(data.shape)} of {data.dtype} with strides {data.stride()}, expected {list(shape)} "
            f"of {dtype} with contiguous matrices, as {weight.type.name} of {weight.rows} x {weight.columns} has it"
        )


def dequantize(
    weight: Weight,
    dtype: torch.dtype,
    first: int = 0,
    count: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows first to first + count of a weight, or of each of several, as numbers.

    out: [..., count, columns] of dtype to be written, contiguous

    Returns [..., count, columns] of dtype. ValueError names an argument that does not fit.
    """
    count = weight.rows - first if count is None else count
    if first < 0 or first + count > weight.rows:
        raise ValueError(f"rows {first} to {first + count} are not all of weight's {weight.rows}")
    matrices = weight.data.shape[:-2] if weight.type in PLAIN else weight.data.shape[:-3]
    check_weight("weight", weight, matrices[0] if matrices else None)
    shape = (*matrices, count, weight.columns)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=weight.data.device)
    elif out.shape != shape or not out.is_contiguous() or out.dtype != dtype:
        raise ValueError(f"out is {list(out.shape)} of {out.dtype}, expected contiguous {list(shape)} of {dtype}")
    if out.numel():
        w = operand(weight)
        grid = (-(-count // BLOCK), -(-weight.columns // COLUMNS), matrices.numel())
        kernel.dequantize[grid](
            w.data, w.table, out, weight.rows, weight.columns, w.tiles, first, count, w.matrix,
            TYPE=w.type, BYTES=w.bytes, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def rows_view(weight: Weight, first: int, count: int) -> Weight:
    """Rows of a weight, or of each of several, as a weight of their own that shares its memory. ValueError unless they
    begin at whole 16, where a tile begins."""
    if weight.type in PLAIN:
        return weight._replace(data=weight.data[..., first : first + count, :], rows=count)
    if first % ROWS or not 0 <= first <= first + count <= weight.rows:
        raise ValueError(f"rows {first} to {first + count} of {weight.rows}: expected a beginning at whole {ROWS}")
    tiles = weight.data[..., first // ROWS : -(-(first + count) // ROWS), :, :]
    return weight._replace(data=tiles, rows=count)
