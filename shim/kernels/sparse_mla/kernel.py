# mypy: ignore-errors
"""Sparse MLA on the GPU. One program of `attend` is one token, one group of heads and one share of the token's row.

A tile of cache rows is copied to shared memory once, as K^T [512, BLOCK_K]. Both products read that copy:

    S     [N, BLOCK_K]  = Q [N, 576] . K^T [576, BLOCK_K]
    acc^T [512, N]     += K^T [512, BLOCK_K] . P^T [BLOCK_K, N]     "swap-AB": heads on the MMA's 8-column side

Swap-AB makes 8 heads fill the second product, which is the larger one, and its accumulators. With SWAP off the second
product is acc [N, 512] += P . K: wgmma takes 64 heads as rows, and neither P nor its sums have to be transposed. (For
mma.sync Triton drops cp.async in that form.) The first product is never swapped. S^T = K . Q^T would read the tile in
both orientations, and Triton 3.6 then drops cp.async and makes a second copy (seen in the TTGIR). So at 8 heads the
first product fills half of its MMA. The kernel is bound by the gather.

Triton gives one arrangement of warps to products that feed each other. Here all warps stand along the latent, so they
repeat each other's S. With APART each product of S (fp8: each pair) stands in a branch of its own, and Triton arranges
the warps for it alone. The branches are always taken. Each has its own condition, because Triton would merge equal
ones. APART takes registers: tune.py.

The latent is taken in pieces, because an fp8 row has one scale per 128 values. e4m3 values enter the MMA unscaled, as
fp16, which is exact. The scale multiplies the partial score in fp32. For the output it is part of P. The query is fp16,
divided by a power of two for each head that keeps it in range. P is fp16, divided by the largest scale of the tile.

With GROUP > 1 a program is a group of neighbouring tokens. It goes once through the union of their rows (`union.py`),
and each row counts for the tokens that chose it. GROUP times the heads then fill the MMA, and a row that several
tokens chose is gathered once.

Sources: DeepSeek's FlashMLA (sparse decode: one latent for keys and values, softmax in base 2); flash-decoding (split-K
whose shares leave normalised outputs and an LSE); FlashAttention 2 (online softmax).
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
TINY: tl.constexpr = tl.constexpr(1.0e-30)  # a divisor that is not 0
FAR: tl.constexpr = tl.constexpr(-1.0e30)  # "minus infinity" that can be subtracted from itself

# Triton makes no variants by value (1, a multiple of 16) or by alignment of these. Strides are counted in 16 bytes,
# which tells the compiler as much. The caller checks it, and the alignment of the other pointers.
_ATTEND_ANY = [
    "topk", "req_ids", "table", "seq_lens", "counts", "lse", "tokens", "heads", "columns", "span", "splits",
    "q_latent_t", "q_latent_n", "q_rope_t", "q_rope_n", "cache_block", "cache_row", "topk_t", "table_r",
    "out_t", "out_s", "out_n", "lse_t", "lse_s", "lse_n",
]  # fmt: skip
_MERGE_ANY = ["lse", "heads", "splits", "out_t", "out_n", "lse_t", "lse_n"]


@triton.jit
def _e4m3_half(two, ODD: tl.constexpr, CVT: tl.constexpr):
    """The even or the odd values, as fp16, of words of two e4m3 values. Exact; a NaN stays one only with CVT.

    CVT: by the conversion that GPUs of capability 8.9 and up have. Else by hand: exponent and mantissa are shifted into
    place, and a product corrects the bias, also of subnormals.

    A call returns one half. An operation that returned both would cost a second tile in shared memory with Triton 3.8:
    it reads the first result from the tile of words that was copied, and writes the second one to a new tile.
    """
    if CVT:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 both, rest;
            .reg .b32 bytes;
            prmt.b32 bytes, $1, 0, """
            + ("0x4431;" if ODD else "0x4420;")
            + """
            mov.b32 {both, rest}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, both;
            }""",
            "=r,r",
            [two],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return _e4m3(two if ODD else two << 8)


@triton.jit
def _e4m3(bits):
    value = ((bits & 0x8000) | ((bits & 0x7F00) >> 1)).to(tl.float16, bitcast=True)
    return value * tl.full([1, 1], 2.0 ** (15 - 7), tl.float16)


@triton.jit
def _values_of(piece, TILE: tl.constexpr, FP8: tl.constexpr):
    """Which latent values piece `piece` holds. fp8 is loaded in words of two values: one piece has the even values of
    128, the next piece has the odd ones."""
    if FP8:
        return (piece // 2) * 128 + 2 * tl.arange(0, 64) + piece % 2
    else:
        return piece * TILE + tl.arange(0, TILE)


@triton.jit
def _query(q, row, d, mask):
    return tl.load(q + row[:, None] * 8 + d[None, :], mask=mask[:, None], other=0)  # [N, TILE]


@triton.jit
def _in_fp16(q, PIECES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The power of two below each head's largest value, and the query divided by it, as fp16."""
    largest = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.static_range(PIECES):
        largest = tl.maximum(largest, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.where(power > 0, power, 1.0)
    scaled = ()
    for i in tl.static_range(PIECES):
        scaled += ((q[i].to(tl.float32) / unit[:, None]).to(tl.float16),)
    return unit, scaled


@triton.jit
def _last_chosen(row, first, stop, length, SCAN: tl.constexpr):
    """The column behind the last chosen one in [first, stop). Most rows are padded with -1 at their end."""
    last = first
    for start in range(first, stop, SCAN):
        column = start + tl.arange(0, SCAN)
        position = tl.load(row + column, mask=column < stop, other=-1)
        last = tl.maximum(last, tl.max(tl.where((position >= 0) & (position < length), column + 1, first), 0))
    return last


@triton.jit(do_not_specialize=_ATTEND_ANY)
def attend(
    q_latent, q_rope, cache, topk, req_ids, table, seq_lens, counts, out, lse,
    scale, tokens, heads, columns, span, splits,
    q_latent_t, q_latent_n, q_rope_t, q_rope_n,  # in 16 bytes
    cache_block, cache_row,  # in 16 bytes
    topk_t, table_r,  # in values
    out_t, out_s, out_n,  # in 8 values
    lse_t, lse_s, lse_n,  # in values
    PAGE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr,
    FP8: tl.constexpr, CVT: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, LEFT: tl.constexpr, APART: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Share `split` is columns [split * span, split * span + span) of the row. It writes attention over these alone.

    GROUP > 1: `topk` holds entries of unions (position * 256 + one bit per token of the group), and `counts` how many.
    A group without a union has count -1 and is skipped. A second launch with LEFT = tokens of a group does only those.
    """
    HEADS: tl.constexpr = BLOCK_N // GROUP
    HEAD: tl.constexpr = 1 if SWAP else 0  # axis of the accumulators
    groups = tl.cdiv(heads, HEADS)
    pid = tl.program_id(0)  # head groups of one token run side by side and find its rows in L2
    group = pid % groups
    split = (pid // groups) % splits
    which = (pid // groups // splits).to(tl.int64)  # a token, or a group of tokens
    if LEFT > 0:  # noqa: SIM102 - `and` would read `counts` where there is none
        if tl.load(counts + which // LEFT) >= 0:
            return
    row = topk + which * topk_t
    t = which * GROUP
    n = (group * HEADS + tl.arange(0, BLOCK_N) % HEADS).to(tl.int64)
    member = tl.arange(0, BLOCK_N) // HEADS  # which token of the group
    in_heads = n < heads
    if GROUP > 1:
        in_heads &= t + member < tokens

    request = tl.load(req_ids + t).to(tl.int64)
    blocks = table + request * table_r
    if GROUP > 1:
        first = 0
        stop = tl.load(counts + which)
        if stop < 0:  # no union
            return
    else:
        length = tl.load(seq_lens + request)
        first = split * span
        stop = tl.minimum(first + span, columns)
        if span > SCAN // 2:  # for shorter shares the search costs more than the tiles that it saves
            stop = _last_chosen(row, first, stop, length, SCAN)

    row_latent = n * q_latent_n
    row_rope = n * q_rope_n
    row_out = n * out_n
    row_lse = n * lse_n
    if GROUP > 1:
        row_latent += member * q_latent_t
        row_rope += member * q_rope_t
        row_out += member * out_t
        row_lse += member * lse_t
    q_latent += t * q_latent_t * 8
    q_rope += t * q_rope_t * 8
    q = ()
    for i in tl.static_range(PIECES):
        q += (_query(q_latent, row_latent, _values_of(i, TILE, FP8), in_heads),)
    q_r = _query(q_rope, row_rope, tl.arange(0, 64), in_heads)
    if FP8:
        unit, q = _in_fp16(q, PIECES, BLOCK_N)

    top = tl.full([BLOCK_N], FAR, tl.float32)  # largest score so far, base 2
    total = tl.zeros([BLOCK_N], tl.float32)
    acc = ()
    for _ in tl.static_range(PIECES):
        acc += (tl.zeros([TILE, BLOCK_N] if SWAP else [BLOCK_N, TILE], tl.float32),)

    # At least one round, even if nothing is chosen: if there might be none, the accumulators would be copied behind the
    # loop, and ptxas would then make each wgmma wait for the one before (its note C7515).
    end = stop
    if not SWAP:
        end = tl.maximum(stop, first + 1)
        tl.assume(first < end)
    # The pipeliner divides STAGES - 1 among three loads that feed each other: position, block, rows. STAGES 4 keeps one
    # tile of rows in shared memory, 7 keeps two.
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)
        position = tl.load(row + column, mask=column < stop, other=-1)
        if GROUP > 1:
            chosen = position >= 0
            by_row = ((position[None, :] >> member[:, None]) & 1) != 0
            by_row &= chosen[None, :]  # [N, BLOCK_K]
            position = position >> 8
        else:
            chosen = (position >= 0) & (position < length)
            by_row = chosen[None, :]
        position = tl.where(chosen, position, 0)
        block = tl.load(blocks + position // PAGE, mask=chosen, other=0).to(tl.int64)
        rows = cache + (block * cache_block + (position % PAGE) * cache_row) * (16 if FP8 else 8)  # [BLOCK_K]
        k = ()
        scales = ()
        if FP8:
            words = rows.to(tl.pointer_type(tl.uint16), bitcast=True)
            scale_of = (rows + 512).to(tl.pointer_type(tl.float32), bitcast=True)
            for i in tl.static_range(4):
                d = i * 64 + tl.arange(0, 64)
                two = tl.load(words[None, :] + d[:, None], mask=chosen[None, :], other=0)  # [64, BLOCK_K]
                k += (_e4m3_half(two, False, CVT), _e4m3_half(two, True, CVT))
                scales += (tl.load(scale_of + i, mask=chosen, other=0),)
            ropes = (rows + 528).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        else:
            for i in tl.static_range(PIECES):
                d = i * TILE + tl.arange(0, TILE)
                k += (tl.load(rows[None, :] + d[:, None], mask=chosen[None, :], other=0),)  # [TILE, BLOCK_K]
            ropes = rows + 512
        k_r = tl.load(ropes[None, :] + tl.arange(0, 64)[:, None], mask=chosen[None, :], other=0).to(q_r.dtype)

        weight = tl.zeros([BLOCK_K, BLOCK_N] if SWAP else [BLOCK_N, BLOCK_K], k[0].dtype)
        p = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        fade = top
        if (tokens > 0) if APART else True:  # always
            s = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            if FP8:
                for i in tl.static_range(4):
                    part = s
                    if (tokens > -1 - i) if APART else True:
                        part = tl.dot(q[2 * i + 1], k[2 * i + 1], tl.dot(q[2 * i], k[2 * i]))
                    s += part * scales[i][None, :]
                s *= unit[:, None]
            else:
                for i in tl.static_range(PIECES):
                    if (tokens > -1 - i) if APART else True:
                        s = tl.dot(q[i], k[i], s)
            if (tokens > -1 - PIECES) if APART else True:
                s = tl.dot(q_r, k_r, s)  # [N, BLOCK_K]

            s = tl.where(by_row, s * (scale * LOG2E), FAR)
            new_top = tl.maximum(top, tl.max(s, 1))
            p = tl.where(by_row, tl.exp2(s - new_top[:, None]), 0.0)
            fade = tl.exp2(top - new_top)
            total = total * fade + tl.sum(p, 1)
            top = new_top
            if not FP8:
                weight = tl.trans(p.to(k[0].dtype)) if SWAP else p.to(k[0].dtype)
        faded = ()
        if FP8:
            for i in tl.static_range(4):
                most = tl.maximum(tl.max(scales[i], 0), TINY)
                weight = tl.trans((p * (scales[i] / most)[None, :]).to(tl.float16))  # [BLOCK_K, N]
                for j in tl.static_range(2):
                    added = tl.dot(k[2 * i + j], weight) * most
                    faded += (acc[2 * i + j] * fade[None, :] + added,)  # [TILE, N]
        else:
            for i in tl.static_range(PIECES):
                old = acc[i] * tl.expand_dims(fade, 1 - HEAD)
                faded += (tl.dot(k[i], weight, old) if SWAP else tl.dot(weight, tl.trans(k[i]), old),)
        acc = faded

    full = total > 0  # the largest score alone adds 1. Nothing chosen: out 0, lse -inf
    inverse = tl.expand_dims(tl.where(full, 1.0 / tl.where(full, total, 1.0), 0.0), 1 - HEAD)
    out += t * out_t * 8 + split * out_s * 8
    for i in tl.static_range(PIECES):
        place = out + tl.expand_dims(row_out * 8, 1 - HEAD) + tl.expand_dims(_values_of(i, TILE, FP8), HEAD)
        tl.store(place, (acc[i] * inverse).to(out.dtype.element_ty), mask=tl.expand_dims(in_heads, 1 - HEAD))
    result = tl.where(full, (top + tl.log2(tl.where(full, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse + t * lse_t + split * lse_s + row_lse, result, mask=in_heads)


@triton.jit(do_not_specialize=_MERGE_ANY)
def merge(
    part_out, part_lse, out, lse, heads, splits,
    out_t, out_n,  # in 8 values
    lse_t, lse_n,  # in values
    SHARES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program is BLOCK_D outputs of one head of one token: the sum of its shares, up to SHARES.

    part_out: fp32 [T, splits, heads, 512], part_lse: fp32 [T, splits, heads], both contiguous. All loads are in flight
    at the same time, so the time is that of one load.
    """
    PIECES: tl.constexpr = 512 // BLOCK_D
    pid = tl.program_id(0).to(tl.int64)
    piece = pid % PIECES
    t = pid // PIECES // heads
    n = pid // PIECES % heads
    d = piece * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, SHARES)
    share = (t * splits + s) * heads + n
    values = tl.load(part_out + share[:, None] * 512 + d[None, :], mask=(s < splits)[:, None], other=0)
    part = tl.load(part_lse + share, mask=s < splits, other=float("-inf"))
    top = tl.maximum(tl.max(part, 0), FAR)
    weight = tl.exp2((part - top) * LOG2E)  # [SHARES]
    total = tl.sum(weight, 0)
    full = total > 0
    total = tl.where(full, total, 1.0)
    acc = tl.sum(values * weight[:, None], 0) / total  # none chosen: 0 / 1
    tl.store(out + t * out_t * 8 + n * out_n * 8 + d, acc.to(out.dtype.element_ty))
    if piece == 0:
        result = tl.where(full, top + tl.log2(total) * LN2, float("-inf"))
        tl.store(lse + t * lse_t + n * lse_n, result)


@triton.jit
def gather(cache, slots, out, WORDS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """The ceiling of `bench.py`: reads the chosen rows of WORDS int32. It adds them up, so that no load is removed."""
    pid = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + pid * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    word = tl.arange(0, PADDED)
    rows = tl.load(cache + slot[:, None] * WORDS + word[None, :], mask=(word < WORDS)[None, :], other=0)
    tl.store(out + pid, tl.sum(tl.sum(rows, 1), 0))
