# mypy: ignore-errors
"""Experts with weights in GGML blocks: sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

A slot is one choice of a token: slot t * top_k + j is choice j of token t. Its expert is -1 if it is not
to be computed.
"""

import triton
import triton.language as tl

from shim.kernels.ggml.kernel import add_product, add_products, is_last, rows_of_threads, split_products

_ANY = [
    "slots", "rows", "gate_tiles", "up_tiles", "tiles", "top_k", "tokens", "experts", "first", "count", "blocks",
    "middle",
]  # fmt: skip


@triton.jit
def _silu_product(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gate_up(
    gate, gate_table, up, up_table, row, x, lines, valid, columns, gate_tiles, up_tiles, begin, end,
    GATE: tl.constexpr, GATE_BYTES: tl.constexpr, UP: tl.constexpr, UP_BYTES: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """gate(x) and up(x), fp32 [rows, tokens], of the column tiles from begin to end."""
    acc = tl.zeros([2 * row.shape[0], lines.shape[0]], tl.float32)
    for k in tl.range(begin, end, num_stages=STAGES):
        acc = add_products(
            acc, gate, gate_table, up, up_table, row, x, lines, valid, columns, gate_tiles, up_tiles, k,
            GATE, GATE_BYTES, UP, UP_BYTES, WARPS, WIDTH,
        )  # fmt: skip
    return split_products(acc)


@triton.jit
def _members(same, rank, i, members, begin, TOKENS: tl.constexpr):
    """Slots `begin` to begin + TOKENS of one expert, and which of them there are."""
    at = begin + tl.arange(0, TOKENS)
    of = tl.sum(tl.where(same[None, :] & (rank[None, :] == at[:, None]), i[None, :], 0), 1)
    return of, at < members


@triton.jit(do_not_specialize=_ANY)
def gate_up_few(
    x, gate, gate_table, up, up_table, ids, hidden, partial, arrived,
    slots, top_k, rows, columns, gate_tiles, up_tiles, gate_e, up_e, x_t,
    GATE: tl.constexpr, GATE_BYTES: tl.constexpr, UP: tl.constexpr, UP_BYTES: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """hidden [slots, rows] = silu(gate(x)) * up(x), few slots. A slot's programs (grid's second axis) make all slots
    of its expert, if it is the first of them. First axis: BLOCK_N rows, in SPLITS parts of the columns; the last
    adds up.

    partial: fp32 [SPLITS, 2, slots, rows]; arrived: int32 [slots, tiles of rows], zeros before and after
    gate_e, up_e: values from one expert to the next
    """
    tile_n = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    slot = tl.program_id(1)
    expert = tl.load(ids + slot)
    i = tl.arange(0, SLOTS)
    same = tl.load(ids + i, mask=i < slots, other=-1) == expert
    if (expert >= 0) & (tl.min(tl.where(same, i, SLOTS), 0) == slot):
        rank = tl.cumsum(same.to(tl.int32), 0) - 1
        members = tl.sum(same.to(tl.int32), 0)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.minimum(n, rows - 1)
        gate += expert.to(tl.int64) * gate_e
        up += expert.to(tl.int64) * up_e
        wide = tl.cdiv(columns, 256)
        share = tl.cdiv(wide, SPLITS)
        size = slots.to(tl.int64) * rows
        for begin in range(0, members, TOKENS):
            of, valid = _members(same, rank, i, members, begin, TOKENS)
            g, u = _gate_up(
                gate, gate_table, up, up_table, row, x, of // top_k * x_t, valid, columns, gate_tiles, up_tiles,
                split * share, tl.minimum(split * share + share, wide),
                GATE, GATE_BYTES, UP, UP_BYTES, STAGES, WARPS, WIDTH,
            )  # fmt: skip
            inside = (n < rows)[:, None] & valid[None, :]
            place = of.to(tl.int64)[None, :] * rows + n[:, None]
            if SPLITS == 1:
                tl.store(hidden + place, _silu_product(g, u).to(hidden.dtype.element_ty), mask=inside)
            else:
                tl.store(partial + split * 2 * size + place, g, mask=inside)
                tl.store(partial + (split * 2 + 1) * size + place, u, mask=inside)
        if SPLITS > 1:  # noqa: SIM102 - known when compiled
            if is_last(arrived + slot * tl.cdiv(rows, BLOCK_N) + tile_n, SPLITS):
                for begin in range(0, members, TOKENS):
                    of, valid = _members(same, rank, i, members, begin, TOKENS)
                    inside = (n < rows)[:, None] & valid[None, :]
                    place = of.to(tl.int64)[None, :] * rows + n[:, None]
                    g = tl.zeros([BLOCK_N, TOKENS], tl.float32)
                    u = tl.zeros([BLOCK_N, TOKENS], tl.float32)
                    for other in range(SPLITS):
                        g += tl.load(partial + other * 2 * size + place, mask=inside, other=0.0)
                        u += tl.load(partial + (other * 2 + 1) * size + place, mask=inside, other=0.0)
                    tl.store(hidden + place, _silu_product(g, u).to(hidden.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_ANY)
def down_few(
    hidden, down, table, ids, weights, out, partial, arrived,
    tokens, top_k, rows, columns, tiles, down_e, out_t,
    TYPE: tl.constexpr, BYTES: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [tokens, rows] = sum of weight * down(hidden) over a token's slots, few tokens. Grid: BLOCK_N rows with
    SPLITS parts of the token's slots, by tokens, which run side by side and meet in L2. The last of the parts adds up.

    partial: fp32 [SPLITS, tokens, rows]; arrived: int32 [tokens, tiles of rows], zeros before and after
    """
    token = tl.program_id(0)
    tile_n = tl.program_id(1) // SPLITS
    split = tl.program_id(1) % SPLITS
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(tile_n * BLOCK_N + rows_of_threads(BLOCK_N, WARPS), rows - 1)
    valid = tl.arange(0, TOKENS) == 0
    wide = tl.cdiv(columns, 256)
    share = tl.cdiv(top_k, SPLITS)
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for j in range(split * share, tl.minimum(split * share + share, top_k)):
        slot = token * top_k + j
        expert = tl.load(ids + slot)
        if expert >= 0:
            line = slot * columns + tl.zeros([TOKENS], tl.int32)
            matrix = down + expert.to(tl.int64) * down_e
            acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
            for k in tl.range(0, wide, num_stages=STAGES):
                acc = add_product(
                    acc, matrix, table, row, hidden, line, valid, columns, tiles, k, TYPE, BYTES, WARPS, WIDTH
                )
            total += acc * tl.load(weights + slot)
    inside = (n < rows)[:, None] & valid[None, :]
    place = tl.zeros([1, TOKENS], tl.int32) + n[:, None]
    answer = out + token.to(tl.int64) * out_t
    if SPLITS == 1:
        tl.store(answer + place, total.to(out.dtype.element_ty), mask=inside)
    else:
        size = tokens.to(tl.int64) * rows
        kept = partial + token.to(tl.int64) * rows + place
        tl.store(kept + split * size, total, mask=inside)
        if is_last(arrived + token * tl.cdiv(rows, BLOCK_N) + tile_n, SPLITS):
            total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
            for other in range(SPLITS):
                total += tl.load(kept + other * size, mask=inside, other=0.0)
            tl.store(answer + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_ANY)
def count(ids, counts, ranks, slots, experts, CHUNK: tl.constexpr):
    """How many slots each expert has, and which of them a slot is. counts: int32 [experts], zeros before."""
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + i, mask=i < slots, other=-1)
    known = (expert >= 0) & (expert < experts)
    rank = tl.atomic_add(counts + expert, 1, mask=known, sem="relaxed")
    tl.store(ranks + i, rank, mask=known)


@triton.jit(do_not_specialize=_ANY)
def place(
    ids, counts, ranks, order, plan, slots, experts, blocks,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """order: slots, expert by expert. plan: int32 [blocks, 3]: expert, first and end in `order` of up to TOKENS slots
    of one expert; expert -1 where there are no more."""
    e = tl.arange(0, EXPERTS)
    counted = tl.load(counts + e, mask=e < experts, other=0)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + i, mask=i < slots, other=-1)
    known = (expert >= 0) & (expert < experts)
    before = tl.sum(tl.where(e[None, :] < expert[:, None], counted[None, :], 0), 1)
    tl.store(order + before + tl.load(ranks + i, mask=known, other=0), i, mask=known)

    b = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    filled = (counted + TOKENS - 1) // TOKENS
    upto = tl.cumsum(filled, 0)
    ends = tl.cumsum(counted, 0)
    of = tl.sum((upto[None, :] <= b[:, None]).to(tl.int32), 1)
    mine = of[:, None] == e[None, :]
    first = tl.sum(tl.where(mine, (ends - counted)[None, :] + (b[:, None] - (upto - filled)[None, :]) * TOKENS, 0), 1)
    end = tl.sum(tl.where(mine, ends[None, :], 0), 1)
    tl.store(plan + b * 3, tl.where(of < EXPERTS, of, -1), mask=b < blocks)
    tl.store(plan + b * 3 + 1, first, mask=b < blocks)
    tl.store(plan + b * 3 + 2, tl.minimum(end, first + TOKENS), mask=b < blocks)


@triton.jit(do_not_specialize=_ANY)
def gate_up_many(
    x, gate, gate_table, up, up_table, order, plan, hidden,
    first, count, top_k, rows, columns, gate_tiles, up_tiles, gate_e, up_e, x_t,
    GATE: tl.constexpr, GATE_BYTES: tl.constexpr, UP: tl.constexpr, UP_BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """hidden [slots in `order`, rows] = silu(gate(x)) * up(x). Grid: BLOCK_N rows by blocks of `plan`; those of the
    experts from `first` on, `count` of them, whose weights gate and up begin with."""
    block = tl.program_id(1)
    expert = tl.load(plan + block * 3) - first
    if (expert >= 0) & (expert < count):
        begin = tl.load(plan + block * 3 + 1)
        at = begin + tl.arange(0, TOKENS)
        valid = at < tl.load(plan + block * 3 + 2)
        slot = tl.load(order + at, mask=valid, other=0)
        lines = slot // top_k * x_t
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.minimum(n, rows - 1)
        g, u = _gate_up(
            gate + expert.to(tl.int64) * gate_e, gate_table, up + expert.to(tl.int64) * up_e, up_table,
            row, x, lines, valid, columns, gate_tiles, up_tiles, 0, tl.cdiv(columns, 256),
            GATE, GATE_BYTES, UP, UP_BYTES, STAGES, WARPS, WIDTH,
        )  # fmt: skip
        place = at.to(tl.int64)[None, :] * rows + n[:, None]
        inside = (n < rows)[:, None] & valid[None, :]
        tl.store(hidden + place, _silu_product(g, u).to(hidden.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_ANY)
def down_many(
    hidden, down, table, order, plan, weights, parts,
    first, count, rows, columns, tiles, down_e,
    TYPE: tl.constexpr, BYTES: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """parts [slots, rows] = weight * down(hidden), of `rows` rows. Grid and experts: as of `gate_up_many`."""
    block = tl.program_id(1)
    expert = tl.load(plan + block * 3) - first
    if (expert >= 0) & (expert < count):
        at = tl.load(plan + block * 3 + 1) + tl.arange(0, TOKENS)
        valid = at < tl.load(plan + block * 3 + 2)
        lines = at * columns
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.minimum(tl.program_id(0) * BLOCK_N + rows_of_threads(BLOCK_N, WARPS), rows - 1)
        matrix = down + expert.to(tl.int64) * down_e
        acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
        for k in tl.range(0, tl.cdiv(columns, 256), num_stages=STAGES):
            acc = add_product(
                acc, matrix, table, row, hidden, lines, valid, columns, tiles, k, TYPE, BYTES, WARPS, WIDTH
            )
        slot = tl.load(order + at, mask=valid, other=0)
        weight = tl.load(weights + slot, mask=valid, other=0.0)
        place = slot.to(tl.int64)[None, :] * rows + n[:, None]
        inside = (n < rows)[:, None] & valid[None, :]
        tl.store(parts + place, (acc * weight[None, :]).to(parts.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_ANY)
def add_up(parts, ids, out, top_k, rows, middle, experts, out_t, BLOCK: tl.constexpr):
    """out [tokens, from middle, rows] = sum of a token's parts [slots, rows]. Grid: tokens by BLOCK rows."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(top_k):
        expert = tl.load(ids + token * top_k + j)
        known = (expert >= 0) & (expert < experts)
        total += tl.load(parts + (token * top_k + j) * rows + n, mask=known & (n < rows), other=0.0).to(tl.float32)
    tl.store(out + token * out_t + middle + n, total.to(out.dtype.element_ty), mask=n < rows)


@triton.jit(do_not_specialize=_ANY)
def gate_up_dense(
    x, gate, up, order, plan, hidden, first, count, top_k, rows, columns, gate_e, up_e, x_t,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `gate_up_many`, of weights in 16 bits: gate and up [count, rows, columns]. Tokens are the MMA's rows."""
    block = tl.program_id(1)
    expert = tl.load(plan + block * 3) - first
    if (expert >= 0) & (expert < count):
        at = tl.load(plan + block * 3 + 1) + tl.arange(0, TOKENS)
        valid = at < tl.load(plan + block * 3 + 2)
        slot = tl.load(order + at, mask=valid, other=0)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        lines = x + (slot // top_k).to(tl.int64)[:, None] * x_t + k[None, :]
        place = tl.minimum(n, rows - 1)[None, :] * columns + k[:, None]
        gate += expert.to(tl.int64) * gate_e
        up += expert.to(tl.int64) * up_e
        g = tl.zeros([TOKENS, BLOCK_N], tl.float32)
        u = tl.zeros([TOKENS, BLOCK_N], tl.float32)
        for step in tl.range(0, tl.cdiv(columns, BLOCK_K), num_stages=STAGES):
            begin = step * BLOCK_K
            inside = k < columns - begin
            rows_x = tl.load(lines + begin, mask=valid[:, None] & inside[None, :], other=0.0)
            g = tl.dot(rows_x, tl.load(gate + begin + place, mask=inside[:, None], other=0.0), g)
            u = tl.dot(rows_x, tl.load(up + begin + place, mask=inside[:, None], other=0.0), u)
        answer = hidden + at.to(tl.int64)[:, None] * rows + n[None, :]
        value = _silu_product(g, u).to(hidden.dtype.element_ty)
        tl.store(answer, value, mask=valid[:, None] & (n < rows)[None, :])


@triton.jit(do_not_specialize=_ANY)
def down_dense(
    hidden, down, order, plan, weights, parts, first, count, rows, columns, down_e,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `down_many`, of weights in 16 bits: down [count, ..., columns]. Tokens are the MMA's rows."""
    block = tl.program_id(1)
    expert = tl.load(plan + block * 3) - first
    if (expert >= 0) & (expert < count):
        at = tl.load(plan + block * 3 + 1) + tl.arange(0, TOKENS)
        valid = at < tl.load(plan + block * 3 + 2)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        lines = hidden + at.to(tl.int64)[:, None] * columns + k[None, :]
        place = tl.minimum(n, rows - 1)[None, :] * columns + k[:, None]
        down += expert.to(tl.int64) * down_e
        acc = tl.zeros([TOKENS, BLOCK_N], tl.float32)
        for step in tl.range(0, tl.cdiv(columns, BLOCK_K), num_stages=STAGES):
            begin = step * BLOCK_K
            inside = k < columns - begin
            rows_x = tl.load(lines + begin, mask=valid[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(rows_x, tl.load(down + begin + place, mask=inside[:, None], other=0.0), acc)
        slot = tl.load(order + at, mask=valid, other=0)
        weight = tl.load(weights + slot, mask=valid, other=0.0)
        answer = parts + slot.to(tl.int64)[:, None] * rows + n[None, :]
        value = (acc * weight[:, None]).to(parts.dtype.element_ty)
        tl.store(answer, value, mask=valid[:, None] & (n < rows)[None, :])
