# mypy: ignore-errors
"""Exact top-k of rows on the GPU: sample, collect, select.

    sample    a few thousand logits of the row give a threshold that about 2k logits of the whole row exceed
    collect   one pass over the row writes those that exceed it to a small buffer
    select    finds the k-th largest of the buffer in registers: it counts each eighth of an interval and keeps one

A short row is its own buffer. The threshold is bad if fewer than k logits exceed it, or more than the buffer holds.
Then the row is narrowed by histograms of 8 bits a pass until the rest fits, and is collected again. So every answer is
exact, whatever the sample was.

Logits are compared as "keys": int32 in the order of the floats, -inf first, every NaN last (as in `torch.topk`: NaN is
the largest). Keys that equal the threshold are counted and kept apart, so any number of ties costs no second pass.

Places in the buffer are counted as [SIZE // WIDTH, WIDTH], one column per thread. Triton then adds along the first axis
within the thread and scans only WIDTH sums across threads. Loads are 4 bytes a thread. With 16 bytes, stores to
computed places need another layout, and Triton moves whole tiles through shared memory for it (seen in the TTGIR).

Sources: floats as ordered integers and radix selection by histograms (Alabi et al., "Fast k-selection algorithms for
graphics processing units"); a threshold from a sample is Floyd and Rivest's SELECT.
"""

import triton
import triton.language as tl

OUTSIDE: tl.constexpr = tl.constexpr(-(2**31))  # below every key: a column behind the window
LOWEST: tl.constexpr = tl.constexpr(-0x7F800001)  # key of -inf
HIGHEST: tl.constexpr = tl.constexpr(2**31 - 1)

# Triton makes no variants by value (1, a multiple of 16) or by alignment of these
_ANY = [
    "logits", "lengths", "starts", "out", "values", "indices", "ties", "counts", "arrived",
    "rows", "columns", "k", "next_n", "logits_m", "out_m", "parts",
]  # fmt: skip


@triton.jit
def _flip(bits):
    """fp32 bits to a key, and back. Not for NaN with a sign."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(row, column, length):
    key = _flip(tl.load(row + column, mask=column < length, other=0))
    return tl.where(column < length, tl.where(key < LOWEST, HIGHEST, key), OUTSIDE)


@triton.jit
def _columns(left, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """left, left + 1, ... as one number a thread plus constants.

    The compiler must not know `left`: it would keep known ranges in registers through the whole kernel, 250 of them.
    So callers pass min(length, 0) for 0."""
    rows = tl.arange(0, SIZE // WIDTH) * WIDTH
    return tl.reshape(rows[:, None] + (left + tl.arange(0, WIDTH))[None, :], [SIZE])


@triton.jit
def _places(flags, WIDTH: tl.constexpr):
    """Running sums of flags [TILE], in the order of the threads' columns, and their total."""
    flags = tl.reshape(flags, [flags.shape[0] // WIDTH, WIDTH])
    sums = tl.sum(flags, 0)
    places = (tl.cumsum(sums, 0) - sums)[None, :] + tl.cumsum(flags, 0)
    return tl.reshape(places, [places.shape[0] * WIDTH]), tl.sum(sums, 0)


@triton.jit
def _add(a, b, c, d, more_a, more_b, more_c, more_d):
    return a + more_a, b + more_b, c + more_c, d + more_d


@triton.jit
def _eighths(keys, high, shift, WIDTH: tl.constexpr):
    """How many keys are in each of 8 ranges of 1 << shift keys, from `high` down. One pass over the keys.

    Returns four int32 of two counts of 16 bits: ranges (0, 2), (1, 3), (4, 6) and (5, 7), the first of each pair in the
    lower half. Range 7 also counts all keys that are in no range."""
    shift = shift.to(tl.uint32)
    down = tl.minimum((high - keys).to(tl.uint32, bitcast=True), tl.full([], 7, tl.uint32) << shift) >> shift
    tl.static_assert(keys.shape[0] < 256 * WIDTH)  # a thread counts in 8 bits
    one = tl.full(keys.shape, 1, tl.int32) << ((down & 3) * 8).to(tl.int32)
    last = tl.sum(tl.reshape(tl.where(down > 3, one, 0), [keys.shape[0] // WIDTH, WIDTH]), 0)
    first = tl.sum(tl.reshape(one, [keys.shape[0] // WIDTH, WIDTH]), 0) - last
    EVEN: tl.constexpr = 0x00FF00FF
    return tl.reduce((first & EVEN, (first >> 8) & EVEN, last & EVEN, (last >> 8) & EVEN), 0, _add)


@triton.jit
def _threshold(keys, total, least, most, WIDTH: tl.constexpr):
    """Returns (t, count(keys >= t)) with least <= count <= most. If ties leave no such t: the largest t with count >=
    least. `total` keys are real, and at least `least`.

    The threshold is in [low, high]. A step cuts this interval into 8 parts, as equal as powers of two allow. A long row
    takes about 5 steps, 2,048 of 2,049 to 5,000 take 6 to 9, and none takes more than 13. The first step looks at 3.5
    octaves below the largest key, where the threshold of most long rows is. Without it the many octaves of tiny floats
    would take two to four more steps.

    Keys outside [low, high] are counted in the eighth of `low` or in a later one. Keys above `high` are too, because
    the numbers wrap around. `reached` corrects that: no count of keys above `low` exceeds it.
    """
    low = LOWEST + tl.zeros([], tl.int32)
    high = tl.max(keys, 0)
    reached = tl.zeros([], tl.int32) + total  # keys >= low
    beyond = tl.zeros([], tl.int32)  # keys > high
    widest = tl.full([], 22, tl.int32)  # the largest shift of the first step: half an octave
    while (low < high) & (reached > most):
        size = (high - low).to(tl.uint32, bitcast=True).to(tl.float32)
        exponent = (size.to(tl.int32, bitcast=True) >> 23) - 127
        shift = tl.minimum(tl.maximum(exponent - 2, 0), widest)
        widest = 29  # an eighth of all possible keys
        even, odd, later_even, later_odd = _eighths(keys, high, shift, WIDTH)
        count = beyond
        short = tl.zeros([], tl.int32)  # eighths that do not reach `least`
        for eighth in tl.static_range(7):
            both = (later_odd if eighth % 2 else later_even) if eighth > 3 else (odd if eighth % 2 else even)
            count += (both >> 16 if eighth % 4 > 1 else both) & 0xFFFF
            fails = count < least
            short += fails.to(tl.int32)
            beyond = tl.where(fails, count, beyond)
            reached = tl.where(fails, reached, tl.minimum(reached, count))
        high -= short << shift
        end = (tl.full([], 1, tl.int32) << shift) - 1
        inside = (high - low).to(tl.uint32, bitcast=True) > end.to(tl.uint32, bitcast=True)
        low = tl.where((short < 7) & inside, high - end, low)
    return low, reached


@triton.jit
def _sampled(row, length, k, WIDTH: tl.constexpr, SAMPLE: tl.constexpr, CHUNK: tl.constexpr):
    """A threshold that about 2 k logits of the row exceed, from CHUNK columns each at even distances."""
    at = _columns(tl.minimum(length, 0), SAMPLE, WIDTH)
    chunk = (at // CHUNK) * (length // CHUNK).to(tl.int64) // (SAMPLE // CHUNK)
    keys = _keys(row, chunk.to(tl.int32) * CHUNK + at % CHUNK, length)
    least = 7 * k * SAMPLE // (4 * length) + 6  # 6: for a k that is only a few of the sample
    limit, _ = _threshold(keys, SAMPLE, least, least + least // 8, WIDTH)
    return limit


@triton.jit
def _collect(
    row, length, first, step, limit, values, indices, ties, counts, k,
    TILE: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Collects from every step-th tile, beginning with tile `first`. Returns ties << 32 | greater.

    What exceeds `limit` goes to values (bits) and indices. The index of what equals it goes to ties. The first free
    place is in `counts` if SHARED, else it is 0."""
    total = tl.zeros([], tl.int64)
    for left in tl.range(first * TILE, length, step * TILE, num_stages=STAGES):
        column = _columns(left, TILE, WIDTH)
        keys = _keys(row, column, length)
        greater = keys > limit
        equal = keys == limit
        place, found = _places(greater.to(tl.int32) + (equal.to(tl.int32) << 16), WIDTH)
        added = ((found >> 16).to(tl.int64) << 32) + (found & 0xFFFF).to(tl.int64)
        base = total
        if SHARED:
            base = tl.atomic_add(counts, added, sem="relaxed")
        total += added
        at = (base & 0x7FFFFFFF).to(tl.int32) + (place & 0xFFFF) - 1
        kept = greater & (at < CAPACITY)
        tl.store(values + at, _flip(keys), mask=kept)
        tl.store(indices + at, column, mask=kept)
        if found > 0xFFFF:
            at = (base >> 32).to(tl.int32) + (place >> 16) - 1
            tl.store(ties + at, column, mask=equal & (at < k))
    return total


@triton.jit
def _narrowed(row, length, k, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    """A limit that always works, by radix selection: at most CAPACITY keys exceed it, at least k exceed or equal it."""
    low = OUTSIDE + tl.zeros([], tl.int32)  # the k-th largest key is in [low, low + (1 << shift))
    above = tl.zeros([], tl.int32)  # keys beyond that
    inside = length
    shift = tl.full([], 32, tl.int32)
    bins = tl.arange(0, 1 << BITS)
    while (shift > 0) & (above + inside > CAPACITY):
        shift -= BITS
        count = tl.zeros([1 << BITS], tl.int32)
        for left in range(0, length, STEP):
            keys = _keys(row, _columns(left, STEP, WIDTH), length)
            bin = (keys - low).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
            here = (bin < (1 << BITS)) & (keys != OUTSIDE)
            count += tl.histogram(tl.where(here, bin, 0).to(tl.int32), 1 << BITS, mask=here)
        reaches = above + tl.cumsum(count, 0, reverse=True) >= k
        best = tl.max(tl.where(reaches, bins, 0), 0)
        inside = tl.sum(tl.where(bins == best, count, 0), 0)
        above += tl.sum(tl.where(bins > best, count, 0), 0)
        low += best << shift
    return tl.where(above + inside > CAPACITY, low, tl.maximum(low, LOWEST) - 1)


@triton.jit
def _enough(
    row, length, total, values, indices, ties, k,
    TILE: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """How many keys were collected. Collects again if they are too many or too few. Every warp can then read them."""
    count = (total & 0x7FFFFFFF).to(tl.int32)
    if (count > CAPACITY) | (count + (total >> 32) < k):
        limit = _narrowed(row, length, k, WIDTH, CAPACITY, STEP, BITS)
        total = _collect(row, length, 0, 1, limit, values, indices, ties, values, k, TILE, WIDTH, CAPACITY, False, 1)
        count = (total & 0x7FFFFFFF).to(tl.int32)
    tl.debug_barrier()
    return count


@triton.jit
def _select_tied(source, count, limit, keys, indices, collected, out, wanted, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Writes what exceeds the limit, and at the end as many of those that equal it as fit."""
    room = wanted - tl.sum((keys > limit).to(tl.int32), 0)
    done = tl.zeros([], tl.int32)
    for left in range(0, count, STEP):
        index = _columns(left, STEP, WIDTH)
        step = _keys(source, index, count)
        greater = step > limit
        equal = step == limit
        place, found = _places(greater.to(tl.int32) + (equal.to(tl.int32) << 16), WIDTH)
        place += done
        done += found
        tie = place >> 16
        chosen = greater | (equal & (tie <= room) & (index < count))
        if collected:
            index = tl.load(indices + index, mask=chosen, other=0)
        tl.store(out + tl.where(greater, (place & 0xFFFF) - 1, wanted - tie), index, mask=chosen)


@triton.jit
def _select(
    source, count, indices, ties, collected, out, k,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Writes the k largest of source[:count], filled up with ties. collected: their columns are in `indices`."""
    wanted = tl.minimum(k, count)
    keys = _keys(source, _columns(tl.minimum(count, 0), CAPACITY, WIDTH), count)
    limit, reached = _threshold(keys, count, wanted, wanted, WIDTH)
    if reached == wanted:
        done = tl.zeros([], tl.int32)
        for left in range(0, count, WRITE):
            index = _columns(left, WRITE, WIDTH)
            chosen = (keys if WRITE == CAPACITY else _keys(source, index, count)) >= limit
            place, found = _places(chosen.to(tl.int32), WIDTH)
            if collected:
                index = tl.load(indices + index, mask=chosen, other=0)
            tl.store(out + done + place - 1, index, mask=chosen)
            done += found
    else:
        _select_tied(source, count, limit, keys, indices, collected, out, wanted, WIDTH, STEP)
    if count < k:
        slot = _columns(tl.minimum(count, 0), MOST, WIDTH)
        rest = (slot >= count) & (slot < k)
        tl.store(out + slot, tl.load(ties + slot - count, mask=rest, other=0), mask=rest)


@triton.jit
def _everything(out, length, k, WIDTH: tl.constexpr, MOST: tl.constexpr):
    slot = _columns(tl.minimum(length, 0), MOST, WIDTH)
    tl.store(out + slot, tl.where(slot < length, slot, -1), mask=slot < k)


@triton.jit
def _window(logits, lengths, starts, row, columns, next_n, logits_m, STARTS: tl.constexpr):
    """Where the window of a row begins, and its length. A window never goes beyond its row."""
    length = tl.load(lengths + row // next_n) - next_n + 1 + row % next_n
    start = tl.zeros([], tl.int32)
    if STARTS:
        start = tl.minimum(tl.maximum(tl.load(starts + row), 0), columns)
    return logits + row.to(tl.int64) * logits_m + start, tl.minimum(tl.maximum(length, 0), columns - start)


@triton.jit(do_not_specialize=_ANY)
def whole_rows(
    logits, lengths, starts, out, values, indices, ties, rows, columns, k, next_n, logits_m, out_m,
    STARTS: tl.constexpr, SAMPLE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, STAGES: tl.constexpr,
    WRITE: tl.constexpr,
):  # fmt: skip
    """One of n programs does every n-th row.

    values, indices: int32 [programs, CAPACITY]; ties: int32 [programs, MOST]
    """
    row = tl.program_id(0)
    values += row * CAPACITY  # below 2^31: `row` is a program here
    indices += row * CAPACITY
    ties += row * MOST
    while row < rows:
        source, length = _window(logits, lengths, starts, row, columns, next_n, logits_m, STARTS)
        chosen = out + row.to(tl.int64) * out_m
        if length <= k:
            _everything(chosen, length, k, WIDTH, MOST)
        else:
            collected = length > CAPACITY
            if collected:
                limit = _sampled(source, length, k, WIDTH, SAMPLE, CHUNK)
                tl.debug_barrier()  # every warp is done with the buffers of the row before
                total = _collect(
                    source, length, 0, 1, limit, values, indices, ties, values, k, TILE, WIDTH, CAPACITY, False, STAGES
                )
                length = _enough(
                    source, length, total, values, indices, ties, k, TILE, WIDTH, CAPACITY, STEP, BITS
                )  # fmt: skip
                source = values
            _select(source, length, indices, ties, collected, chosen, k, WIDTH, CAPACITY, MOST, STEP, WRITE)
        row += tl.num_programs(0)


@triton.jit(do_not_specialize=_ANY)
def shared_rows(
    logits, lengths, starts, out, values, indices, ties, counts, arrived, columns, k, next_n, logits_m, out_m, parts,
    STARTS: tl.constexpr, SAMPLE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, STAGES: tl.constexpr,
    WRITE: tl.constexpr,
):  # fmt: skip
    """`parts` programs collect from one row, and the last to arrive selects. All find the same threshold.

    values, indices: int32 [rows, CAPACITY]; ties: int32 [rows, MOST]; counts: int64 [rows] and arrived: int32 [rows],
    zero before and after.
    """
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    values += row.to(tl.int64) * CAPACITY
    indices += row.to(tl.int64) * CAPACITY
    ties += row.to(tl.int64) * MOST
    source, length = _window(logits, lengths, starts, row, columns, next_n, logits_m, STARTS)
    chosen = out + row.to(tl.int64) * out_m
    working = tl.minimum(parts, tl.cdiv(length, TILE))
    collected = length > CAPACITY
    selects = part == 0
    if length <= k:
        if selects:
            _everything(chosen, length, k, WIDTH, MOST)
        selects = part < 0
    elif collected:
        selects = part < 0
        if part < working:
            limit = _sampled(source, length, k, WIDTH, SAMPLE, CHUNK)
            _collect(
                source, length, part, working, limit, values, indices, ties, counts + row, k,
                TILE, WIDTH, CAPACITY, True, STAGES,
            )  # fmt: skip
            tl.debug_barrier()  # every warp has written before the program counts as arrived
            selects = tl.atomic_add(arrived + row, 1, sem="acq_rel") == working - 1
            if selects:
                total = tl.atomic_xchg(counts + row, 0)
                tl.store(arrived + row, 0)
                length = _enough(source, length, total, values, indices, ties, k, TILE, WIDTH, CAPACITY, STEP, BITS)
                source = values
    if selects:
        _select(source, length, indices, ties, collected, chosen, k, WIDTH, CAPACITY, MOST, STEP, WRITE)
