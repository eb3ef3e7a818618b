# mypy: ignore-errors
"""y = x . W^T with W in GGML blocks (shim/kernels/ggml)."""

import triton
import triton.language as tl

from shim.kernels.ggml.kernel import add_product, is_last, rows_of_threads

_ANY = ["tokens", "rows", "tiles"]  # no variant per value of these; columns are whole 16, which lets x be loaded wide


@triton.jit(do_not_specialize=_ANY)
def product(
    x, packed, table, out, partial, arrived, tokens, rows, columns, tiles, x_t, out_t,
    TYPE: tl.constexpr, BYTES: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y of BLOCK_N of W's rows (grid's first axis, with the splits) and of TOKENS tokens (second axis).

    Of SPLITS programs each takes a part of W's columns, the last adds up. partial: fp32 [SPLITS, tokens, rows];
    arrived: int32 [tiles of y], zeros before and after
    """
    tile_n = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(tile_n * BLOCK_N + rows_of_threads(BLOCK_N, WARPS), rows - 1)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    x += tl.program_id(1).to(tl.int64) * TOKENS * x_t
    lines = tl.arange(0, TOKENS) * x_t
    wide = tl.cdiv(columns, 256)
    share = tl.cdiv(wide, SPLITS)
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for k in tl.range(split * share, tl.minimum(split * share + share, wide), num_stages=STAGES):
        acc = add_product(acc, packed, table, row, x, lines, t < tokens, columns, tiles, k, TYPE, BYTES, WARPS, WIDTH)
    inside = (n < rows)[:, None] & (t < tokens)[None, :]
    place = t.to(tl.int64)[None, :] * out_t + n[:, None]
    if SPLITS == 1:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
    else:
        kept = partial + t.to(tl.int64)[None, :] * rows + n[:, None]
        size = tokens.to(tl.int64) * rows
        tl.store(kept + split * size, acc, mask=inside)
        counter = arrived + tl.program_id(1) * tl.cdiv(rows, BLOCK_N) + tile_n
        if is_last(counter, SPLITS):
            total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
            for other in range(SPLITS):
                total += tl.load(kept + other * size, mask=inside, other=0.0)
            tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
