# mypy: ignore-errors
"""The indexer's scores on the GPU: logit[m, n] = k_scale[n] * sum_h w[m, h] * relu(q[m, h] . k[n]).

Keys are the rows of the MMA, (query, head) its columns. So most of the sum over heads stays within a thread, and the
fp32 work is one maximum and one FMA for 2 * 128 operations of the MMA:

    S [BLOCK_N, COLUMNS] = K [BLOCK_N, 128] . Q^T [128, COLUMNS]        COLUMNS = queries * heads of one product

The interface is that of DeepGEMM's `fp8_mqa_logits` and `fp8_paged_mqa_logits`.
"""

import triton
import triton.language as tl

DIM: tl.constexpr = tl.constexpr(128)
PAGE: tl.constexpr = tl.constexpr(64)

# Triton makes no variants by value (1, a multiple of 16) or by alignment of these. Strides of q, k and the cache are
# counted in 16 bytes, which tells the compiler as much. The caller checks it.
_MQA_ANY = [
    "k_scale", "w", "ks", "ke", "out", "queries", "keys", "width", "compressed", "group",
    "q_m", "q_h", "k_n", "w_m", "w_h", "out_m",
]  # fmt: skip
_PAGED_ANY = [
    "w", "lens", "table", "out", "batch", "next_n", "counts", "limit", "groups",
    "q_b", "q_j", "q_h", "cache_block", "w_r", "w_h", "lens_b", "lens_j", "table_b", "out_r",
]  # fmt: skip


@triton.jit
def _operand(x):
    """The MMA's operand. e4m3 stays as it is, unless it comes as uint8, for a card whose MMA does not take e4m3.

    Then it becomes fp16, which is exact: exponent and mantissa are shifted into place, and a product corrects the bias,
    also of subnormals. (NaN becomes 480.)"""
    if x.dtype == tl.uint8:
        wide = x.to(tl.uint16)
        value = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return value * tl.full([1, 1], 2.0 ** (15 - 7), tl.float16)
    else:
        return x


@triton.jit
def _scores(k, q, w, HEADS: tl.constexpr):
    """sum_h w * relu(k . q) of k [N, 128], q [COLUMNS, 128] and w [COLUMNS]: fp32 [N, COLUMNS // HEADS]."""
    s = tl.maximum(tl.dot(k, tl.trans(q)), 0.0) * w[None, :]
    return tl.sum(tl.reshape(s, [s.shape[0], s.shape[1] // HEADS, HEADS]), 2)


@triton.jit
def _scores_in_a_chain(k, q, w, HEADS: tl.constexpr):
    """As `_scores`, if all warps stand along the keys. Of every 8 neighbouring columns a thread holds the same two.

    A thread adds up its own columns one by one, all in FMA. Triton 3.8 turns a sum over the axis into a tree with half
    as many FMA."""
    s = tl.maximum(tl.dot(k, tl.trans(q)), 0.0)
    ROWS: tl.constexpr = s.shape[1] // HEADS
    OWN: tl.constexpr = HEADS // 4
    s = tl.permute(tl.reshape(s, [s.shape[0], ROWS, HEADS // 8, 4, 2]), 0, 1, 3, 2, 4)
    w = tl.permute(tl.reshape(w, [ROWS, HEADS // 8, 4, 2]), 0, 2, 1, 3)
    parts = _unstack(tl.reshape(s, [s.shape[0], ROWS, 4, OWN]), OWN)
    weights = _unstack(tl.reshape(w, [ROWS, 4, OWN]), OWN)
    total = parts[0] * weights[0][None, :, :]
    for i in tl.static_range(1, OWN):
        total += parts[i] * weights[i][None, :, :]
    return tl.sum(total, 2)


@triton.jit
def _unstack(x, COUNT: tl.constexpr):
    """The slices of x's last axis, COUNT of them, a power of two."""
    if COUNT == 1:
        return (tl.reshape(x, x.shape[:-1]),)
    elif COUNT == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, x.shape[:-1] + (COUNT // 2, 2)))  # noqa: RUF005 - Triton has no *
        return _unstack(even, COUNT // 2) + _unstack(odd, COUNT // 2)


@triton.jit(do_not_specialize=_MQA_ANY)
def mqa_keep_keys(
    q, k, k_scale, w, ks, ke, out,
    queries, keys, width, compressed,
    q_m, q_h, k_n,  # in 16 bytes
    w_m, w_h, out_m,  # in values
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program keeps BLOCK_N keys and streams those of GROUP queries that see any of them. `compressed`: 0 or 1.

    For mma.sync: its warps stand along the keys only if there are few columns."""
    ROWS: tl.constexpr = COLUMNS // HEADS
    UNIT: tl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth  # values in 16 bytes
    tiles = tl.cdiv(keys, BLOCK_N)
    pid = tl.program_id(0)
    first_key = pid % tiles * BLOCK_N  # programs side by side share their queries in L2
    first = pid // tiles * GROUP
    m = first + tl.arange(0, GROUP)
    start = tl.load(ks + m, mask=m < queries, other=0)
    stop = tl.load(ke + m, mask=m < queries, other=0)
    sees = (tl.maximum(start, first_key) < tl.minimum(stop, first_key + BLOCK_N)) & (m < queries)
    begin = tl.min(tl.where(sees, m, first + GROUP), 0)
    end = tl.max(tl.where(sees, m + 1, first), 0)
    if begin < end:
        n = first_key + tl.arange(0, BLOCK_N)
        d = tl.arange(0, DIM)
        column = tl.arange(0, COLUMNS)  # of the MMA: query c, head h
        rows = k + n.to(tl.int64) * k_n * UNIT
        held = _operand(tl.load(rows[:, None] + d[None, :], mask=(n < keys)[:, None], other=0.0))
        scale = tl.load(k_scale + n, mask=n < keys, other=0.0)
        c = column // HEADS
        h = column % HEADS
        r = tl.arange(0, ROWS)
        lines = (c * q_m + h * q_h) * UNIT
        for row in tl.range(begin, end, ROWS, num_stages=STAGES):
            wide = tl.cast(row, tl.int64)
            left = end - row
            line = (q + wide * q_m * UNIT) + lines
            query = tl.load(line[:, None] + d[None, :], mask=(c < left)[:, None], other=0.0)
            weight = tl.load((w + wide * w_m) + (c * w_m + h * w_h), mask=c < left, other=0.0)
            r_start = tl.load(ks + row + r, mask=r < left, other=0)
            r_stop = tl.load(ke + row + r, mask=r < left, other=0)
            logits = _scores_in_a_chain(held, _operand(query), weight, HEADS) * scale[:, None]  # [BLOCK_N, ROWS]
            shift = r_start * compressed
            r_stop = tl.minimum(tl.minimum(r_stop, shift + width), keys)
            inside = (n[:, None] >= r_start[None, :]) & (n[:, None] < r_stop[None, :])
            place = (out + wide * out_m) + (r.to(tl.int64) * out_m - shift)
            tl.store(place[None, :] + n[:, None], logits, mask=inside)


@triton.jit(do_not_specialize=_MQA_ANY)
def mqa_keep_queries(
    q, k, k_scale, w, ks, ke, out,
    queries, keys, width, compressed,
    q_m, q_h, k_n,  # in 16 bytes
    w_m, w_h, out_m,  # in values
    group,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program keeps COLUMNS // HEADS queries and streams those of `group` keys that any of them sees.

    `group` is a multiple of BLOCK_N. `compressed`: 0 or 1. For wgmma, which takes many columns: the weights are loaded
    once."""
    ROWS: tl.constexpr = COLUMNS // HEADS
    UNIT: tl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth  # values in 16 bytes
    tiles = tl.cdiv(queries, ROWS)
    pid = tl.program_id(0)
    row = pid % tiles * ROWS  # programs side by side share their keys in L2
    first = pid // tiles * group
    r = row + tl.arange(0, ROWS)
    start = tl.load(ks + r, mask=r < queries, other=0)
    stop = tl.load(ke + r, mask=r < queries, other=0)
    shift = start * compressed
    stop = tl.minimum(tl.minimum(stop, shift + width), keys)
    sees = tl.maximum(start, first) < tl.minimum(stop, first + group)
    begin = tl.min(tl.where(sees, tl.maximum(start, first), first + group), 0) // BLOCK_N * BLOCK_N
    end = tl.max(tl.where(sees, tl.minimum(stop, first + group), first), 0)
    if begin < end:
        n = tl.arange(0, BLOCK_N)
        d = tl.arange(0, DIM)
        column = tl.arange(0, COLUMNS)  # of the MMA: query c, head h
        c = column // HEADS
        h = column % HEADS
        wide = tl.cast(row, tl.int64)
        line = (q + wide * q_m * UNIT) + (c * q_m + h * q_h) * UNIT
        held = _operand(tl.load(line[:, None] + d[None, :], mask=(c < queries - row)[:, None], other=0.0))
        weight = tl.load((w + wide * w_m) + (c * w_m + h * w_h), mask=c < queries - row, other=0.0)
        place = (out + r.to(tl.int64) * out_m) - shift
        lines = n * k_n * UNIT
        for key in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            rows = (k + tl.cast(key, tl.int64) * k_n * UNIT) + lines
            tile = tl.load(rows[:, None] + d[None, :], mask=(n < keys - key)[:, None], other=0.0)
            scale = tl.load(k_scale + key + n, mask=n < keys - key, other=0.0)
            logits = _scores_in_a_chain(_operand(tile), held, weight, HEADS) * scale[:, None]  # [BLOCK_N, ROWS]
            inside = (key + n[:, None] >= start[None, :]) & (key + n[:, None] < stop[None, :])
            tl.store((place + key)[None, :] + n[:, None], logits, mask=inside)


@triton.jit
def _lengths(lens, b, batch, counts, limit, lens_b, lens_j):
    """How many keys each of the requests `b` has: those of its longest row."""
    length = tl.zeros_like(b)
    for j in range(counts):
        length = tl.maximum(length, tl.load(lens + b * lens_b + j * lens_j, mask=b < batch, other=0))
    return tl.minimum(length, limit)


@triton.jit
def _length(lens, counts, limit, lens_j):
    """How many keys one request has."""
    length = 0
    for j in range(counts):
        length = tl.maximum(length, tl.load(lens + j * lens_j))
    return tl.minimum(length, limit)


@triton.jit(do_not_specialize=_PAGED_ANY)
def paged_mqa(
    q, cache, w, lens, table, out,
    batch, next_n, counts, limit, groups,
    q_b, q_j, q_h, cache_block,  # in 16 bytes
    w_r, w_h, lens_b, lens_j, table_b, out_r,  # in values
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The pages of all requests, one after the other, are divided evenly among the programs, whatever the lengths.

    counts: how many lengths a request has, 1 or next_n
    groups: of COLUMNS // HEADS rows of a request. Each group goes through all pages
    limit:  how many keys the answer and the table have room for
    """
    ROWS: tl.constexpr = COLUMNS // HEADS
    group = tl.program_id(0) % groups  # programs side by side share their keys in L2
    share = tl.program_id(0) // groups
    request = 0  # the one that `page` is of
    before = 0  # pages before it
    if batch == 1:  # saves two scans and five sums
        total = tl.cdiv(_length(lens, counts, limit, lens_j), PAGE)
    else:
        total = 0
        for first in range(0, batch, SCAN):
            b = first + tl.arange(0, SCAN)
            total += tl.sum(tl.cdiv(_lengths(lens, b, batch, counts, limit, lens_b, lens_j), PAGE), 0)
    span = tl.cdiv(total, tl.num_programs(0) // groups)
    page = share * span
    end = tl.minimum(page + span, total)
    if batch > 1:
        seen = 0
        for first in range(0, batch, SCAN):
            b = first + tl.arange(0, SCAN)
            pages = tl.cdiv(_lengths(lens, b, batch, counts, limit, lens_b, lens_j), PAGE)
            upto = seen + tl.cumsum(pages, 0)
            passed = (upto <= page) & (b < batch)
            request += tl.sum(passed.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(passed, upto, 0), 0))
            seen += tl.sum(pages, 0)

    d = tl.arange(0, DIM)
    r = group * ROWS + tl.arange(0, ROWS)
    c = group * ROWS + tl.arange(0, COLUMNS) // HEADS
    h = tl.arange(0, COLUMNS) % HEADS
    n = tl.arange(0, PAGE)
    rows = n[:, None] * DIM + d[None, :]
    while page < end:
        length = _length(lens + request * lens_b, counts, limit, lens_j)
        its_pages = tl.cdiv(length, PAGE)
        its_end = tl.minimum(end - before, its_pages)
        wide = request.to(tl.int64)
        lines = q + (wide * q_b + c * q_j + h * q_h) * 16
        query = tl.load(lines[:, None] + d[None, :], mask=(c < next_n)[:, None], other=0.0)
        weight = tl.load(w + (wide * next_n + c) * w_r + h * w_h, mask=c < next_n, other=0.0)
        visible = tl.load(lens + request * lens_b + r * lens_j, mask=r < next_n, other=0)
        visible += tl.where(counts == next_n, 0, r - next_n + 1)
        visible = tl.where(r < next_n, tl.minimum(visible, length), 0)
        place = out + (wide * next_n + r) * out_r
        blocks = table + wide * table_b
        for t in tl.range(page - before, its_end, num_stages=STAGES):
            left = length - t * PAGE
            block = cache + tl.load(blocks + t).to(tl.int64) * cache_block * 16
            k = tl.load(block + rows, mask=(n < left)[:, None], other=0.0)
            scales = (block + PAGE * DIM).to(tl.pointer_type(tl.float32), bitcast=True)
            scale = tl.load(scales + n, mask=n < left, other=0.0)
            logits = _scores(_operand(k), _operand(query), weight, HEADS) * scale[:, None]  # [PAGE, ROWS]
            tl.store(place[None, :] + t * PAGE + n[:, None], logits, mask=n[:, None] < (visible - t * PAGE)[None, :])
        page = before + its_end
        before += its_pages
        request += 1
