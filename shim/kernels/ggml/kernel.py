# mypy: ignore-errors
"""What the products share: a block of weights in 16 bits, a step of a product, and the count by which the last of
several programs knows that it is. And the kernel that writes weights of any type to memory in 16 bits."""

import triton
import triton.language as tl

from shim.kernels.ggml import tile


@triton.jit
def block(
    packed, table, row, columns, tiles, step, dtype: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """[rows, 32 * GROUPS] of dtype: the columns of step `step`. `tile.weights` says what the rest is."""
    if TYPE == "":
        return tile.plain(packed, row, columns, step, GROUPS).to(dtype)
    else:
        values = tile.weights(packed, table, row, tiles, step, TYPE, BYTES, GROUPS)
        return tl.reshape(values.to(dtype), [row.shape[0], 32 * GROUPS])


@triton.jit
def rows_of_threads(BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """0 to BLOCK - 1 in the order in which Triton deals rows to threads (8 to a warp, warp after warp), such that each
    thread gets those that it holds of an MMA operand: of 16 rows those at r and r + 8."""
    n = tl.arange(0, BLOCK)
    return n // (16 * WARPS) * (16 * WARPS) + n // 8 % WARPS * 16 + n // (8 * WARPS) % 2 * 8 + n % 8


@triton.jit
def _operand(w, WARPS: tl.constexpr, WIDTH: tl.constexpr):
    """Weights [n, 2, WARPS, 8, 4, 32] as the MMA's first operand: [rows, 128 columns in the order of `_columns`]."""
    PAIRS: tl.constexpr = w.shape[0]
    w = tl.reshape(w, [PAIRS, 2, WARPS, 8, 4, 16 // WIDTH, 2, WIDTH])
    return tl.reshape(tl.permute(w, 0, 2, 1, 3, 5, 6, 4, 7), [PAIRS * 16 * WARPS, 128])


@triton.jit
def _columns(WIDTH: tl.constexpr):
    """The order of 128 columns in an operand. A thread decodes 32 neighbours, of an operand it has WIDTH of every
    4 * WIDTH; so columns are renumbered, for weights and x alike, and a weight enters the MMA in the thread that
    decoded it. WIDTH is what Triton takes for the operand (kWidth): another is as right, but then weights move between
    threads."""
    i = tl.arange(0, 128)
    return i // WIDTH % 4 * 32 + i // (8 * WIDTH) * (2 * WIDTH) + i // (4 * WIDTH) % 2 * WIDTH + i % WIDTH


@triton.jit
def _groups(packed, table, row, columns, tiles, step, dtype: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr):
    """[rows, 4, 32] of dtype: 128 columns."""
    return tl.reshape(block(packed, table, row, columns, tiles, step, dtype, TYPE, BYTES, 4), [row.shape[0], 4, 32])


@triton.jit
def _x(x, lines, valid, columns, step, WIDTH: tl.constexpr):
    """128 columns of x^T, in an operand's order."""
    k = _columns(WIDTH)
    inside = valid[None, :] & (k < columns - step * 128)[:, None]
    return tl.load(x + step * 128 + (lines[None, :] + k[:, None]), mask=inside, other=0.0)


@triton.jit
def _one(
    packed, table, row, columns, tiles, step, dtype: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """An operand of one matrix."""
    w = _groups(packed, table, row, columns, tiles, step, dtype, TYPE, BYTES)
    return _operand(tl.reshape(w, [row.shape[0] // (16 * WARPS), 2, WARPS, 8, 4, 32]), WARPS, WIDTH)


@triton.jit
def _two(
    gate, gate_table, up, up_table, row, columns, gate_tiles, up_tiles, step, dtype: tl.constexpr,
    GATE: tl.constexpr, GATE_BYTES: tl.constexpr, UP: tl.constexpr, UP_BYTES: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """An operand of two matrices: 8 rows of one, 8 of the other, and so on."""
    g = _groups(gate, gate_table, row, columns, gate_tiles, step, dtype, GATE, GATE_BYTES)
    u = _groups(up, up_table, row, columns, up_tiles, step, dtype, UP, UP_BYTES)
    both = tl.reshape(tl.join(g, u), [row.shape[0] // (8 * WARPS), WARPS, 8, 4, 32, 2])
    return _operand(tl.permute(both, 0, 5, 1, 2, 3, 4), WARPS, WIDTH)


@triton.jit
def add_product(
    acc, packed, table, row, x, lines, valid, columns, tiles, tile_k, TYPE: tl.constexpr, BYTES: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """acc [rows, tokens] + (weights of column tile tile_k) . x^T, weights as the MMA's first operand.

    row: in the order of `rows_of_threads`; lines: where x's rows begin, int32 [tokens], those that are not valid are
    not read. Of two products in a chain Triton puts all warps along the rows; of one alone, with many tokens, not.
    For few tokens all loads come before the first barrier, the one that x's way through shared memory needs.
    """
    step = tile_k * 2
    dtype: tl.constexpr = x.dtype.element_ty
    if lines.shape[0] <= 16:
        x0 = _x(x, lines, valid, columns, step, WIDTH)
        x1 = _x(x, lines, valid, columns, step + 1, WIDTH)
        w0 = _one(packed, table, row, columns, tiles, step, dtype, TYPE, BYTES, WARPS, WIDTH)
        w1 = _one(packed, table, row, columns, tiles, step + 1, dtype, TYPE, BYTES, WARPS, WIDTH)
        return tl.dot(w1, x1, tl.dot(w0, x0, acc))
    else:
        w0 = _one(packed, table, row, columns, tiles, step, dtype, TYPE, BYTES, WARPS, WIDTH)
        acc = tl.dot(w0, _x(x, lines, valid, columns, step, WIDTH), acc)
        w1 = _one(packed, table, row, columns, tiles, step + 1, dtype, TYPE, BYTES, WARPS, WIDTH)
        return tl.dot(w1, _x(x, lines, valid, columns, step + 1, WIDTH), acc)


@triton.jit
def add_products(
    acc, gate, gate_table, up, up_table, row, x, lines, valid, columns, gate_tiles, up_tiles, tile_k,
    GATE: tl.constexpr, GATE_BYTES: tl.constexpr, UP: tl.constexpr, UP_BYTES: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As `add_product`, of the same rows of two matrices: acc [2 * rows, tokens] has 8 rows of gate, then those of up,
    and so on. row: 0, 1, ... on; `split_products` takes the two apart again. One product, so that x is read once."""
    step = tile_k * 2
    dtype: tl.constexpr = x.dtype.element_ty
    if lines.shape[0] <= 16:
        x0 = _x(x, lines, valid, columns, step, WIDTH)
        x1 = _x(x, lines, valid, columns, step + 1, WIDTH)
        w0 = _two(
            gate, gate_table, up, up_table, row, columns, gate_tiles, up_tiles, step, dtype, GATE, GATE_BYTES, UP,
            UP_BYTES, WARPS, WIDTH,
        )  # fmt: skip
        w1 = _two(
            gate, gate_table, up, up_table, row, columns, gate_tiles, up_tiles, step + 1, dtype, GATE, GATE_BYTES, UP,
            UP_BYTES, WARPS, WIDTH,
        )  # fmt: skip
        return tl.dot(w1, x1, tl.dot(w0, x0, acc))
    else:
        w0 = _two(
            gate, gate_table, up, up_table, row, columns, gate_tiles, up_tiles, step, dtype, GATE, GATE_BYTES, UP,
            UP_BYTES, WARPS, WIDTH,
        )  # fmt: skip
        acc = tl.dot(w0, _x(x, lines, valid, columns, step, WIDTH), acc)
        w1 = _two(
            gate, gate_table, up, up_table, row, columns, gate_tiles, up_tiles, step + 1, dtype, GATE, GATE_BYTES, UP,
            UP_BYTES, WARPS, WIDTH,
        )  # fmt: skip
        return tl.dot(w1, _x(x, lines, valid, columns, step + 1, WIDTH), acc)


@triton.jit
def split_products(acc):
    """acc of `add_products` as gate's and up's products, [rows, tokens] each."""
    ROWS: tl.constexpr = acc.shape[0] // 2
    TOKENS: tl.constexpr = acc.shape[1]
    gate, up = tl.split(tl.permute(tl.reshape(acc, [ROWS // 8, 2, 8, TOKENS]), 0, 2, 3, 1))
    return tl.reshape(gate, [ROWS, TOKENS]), tl.reshape(up, [ROWS, TOKENS])


@triton.jit
def is_last(arrived, COUNT: tl.constexpr):
    """True in the last of COUNT programs that come here with this counter, which is 0 before and after. It sees all
    that the others wrote before they came."""
    tl.debug_barrier()  # every warp has written before the program counts
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == COUNT - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit(do_not_specialize=["rows", "tiles", "first", "count"])
def dequantize(
    packed, table, out, rows, columns, tiles, first, count, matrix,
    TYPE: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows first to first + count of each matrix to out [matrices, count, columns]: BLOCK rows, 256 columns and one
    matrix a program (the grid's three axes). matrix: values of packed from one matrix to the next."""
    which = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = first + tl.minimum(n, count - 1)
    lines = out + (which * count + n) * columns
    dtype: tl.constexpr = out.dtype.element_ty
    packed += which * matrix
    step = tl.program_id(1) * 2
    w0 = block(packed, table, row, columns, tiles, step, dtype, TYPE, BYTES, 4)
    w1 = block(packed, table, row, columns, tiles, step + 1, dtype, TYPE, BYTES, 4)
    k = step * 128 + tl.arange(0, 128)
    inside = (n < count)[:, None]
    tl.store(lines[:, None] + k[None, :], w0, mask=inside & (k < columns)[None, :])
    tl.store(lines[:, None] + (k + 128)[None, :], w1, mask=inside & (k + 128 < columns)[None, :])
