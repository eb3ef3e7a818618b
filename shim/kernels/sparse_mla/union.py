# mypy: ignore-errors
"""The union of the rows that a group of neighbouring tokens chose, with a bit for every token that chose a row.

Neighbouring tokens of a prompt choose nearly the same rows (`overlap.py`), so a group can gather them once. Unions are
built on the device, without a sync, in three steps:

    look  finds, by a sample, most of the groups whose union would save too little
    mark  sets a bit for each position that a token of the other groups chose, in one plane per token
    emit  reads the planes of a group together and writes the positions at which any plane has a bit

An entry is position * 256 + the tokens' bits. A group has no union, and its count is -1, if its tokens are of several
requests or if the union would save too little.

Source of the idea: the unions of a tile of query tokens in sgl-project/sglang#32779.
"""

import torch
import triton
import triton.language as tl

MOST = 8  # tokens of a group: an entry has 8 bits for them
REACH = 1 << 23  # positions are below this: an int32 entry has 23 bits for them
COLUMNS, WORDS = 1024, 1024  # chosen positions, and words of 32 bits of each token, that one step takes
SAMPLE: tl.constexpr = tl.constexpr(32)
# Triton makes no variants by value (1, a multiple of 16) or by alignment of what the caller passes
_ANY = ["topk", "req_ids", "seq_lens", "tokens", "columns", "topk_t"]


@triton.jit
def _ones(word):
    """How many bits of an int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _alike(topk, first, last, columns, topk_t):
    """Does the first token have at least a quarter of some positions of the last token?

    If each of 8 tokens keeps 0.85 of the one before, it has a third, and the union is twice one set. No larger union is
    used."""
    at = tl.arange(0, SAMPLE) * tl.maximum(columns // SAMPLE, 1)
    some = tl.load(topk + last.to(tl.int64) * topk_t + at, mask=at < columns, other=-1)
    found = tl.zeros([SAMPLE], tl.int32)
    for start in range(0, columns, 256):
        column = start + tl.arange(0, 256)
        row = tl.load(topk + first.to(tl.int64) * topk_t + column, mask=column < columns, other=-1)
        found += tl.sum((row[:, None] == some[None, :]).to(tl.int32), 0)
    real = some >= 0
    return tl.sum((real & (found > 0)).to(tl.int32), 0) * 4 >= tl.sum(real.to(tl.int32), 0)


@triton.jit(do_not_specialize=_ANY)
def look(topk, req_ids, seq_lens, counts, tokens, columns, topk_t, width, GROUP: tl.constexpr):
    """One program is one group. counts [groups]: -1 if it has several requests, one that is too long, or too little in
    common by the sample. Else 0."""
    group = tl.program_id(0)
    first = group * GROUP
    last = tl.minimum(first + GROUP, tokens) - 1
    request = tl.load(req_ids + first)
    member = first + tl.arange(0, GROUP)
    same = tl.min((tl.load(req_ids + member, mask=member <= last, other=request) == request).to(tl.int32), 0)
    goes_on = (same != 0) & (tl.load(seq_lens + request) <= width)
    if goes_on:
        goes_on = _alike(topk, first, last, columns, topk_t)
    tl.store(counts + group, goes_on.to(tl.int32) - 1)


@triton.jit(do_not_specialize=_ANY)
def mark(
    topk, req_ids, seq_lens, bits, counts, columns, topk_t, width, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program is one token. bits [T, width / 32]: written only for the positions of the request."""
    t = tl.program_id(0)
    if tl.load(counts + t // GROUP) < 0:
        return
    length = tl.load(seq_lens + tl.load(req_ids + t))
    plane = bits + t.to(tl.int64) * (width // 32)
    for start in range(0, length, 32 * BLOCK):
        at = start // 32 + tl.arange(0, BLOCK)
        tl.store(plane + at, tl.zeros([BLOCK], tl.int32), mask=at * 32 < length)
    tl.debug_barrier()  # all threads have written zeros before any thread sets a bit
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        position = tl.load(topk + t.to(tl.int64) * topk_t + column, mask=column < columns, other=-1)
        chosen = (position >= 0) & (position < length)
        position = tl.where(chosen, position, 0)
        bit = tl.full([BLOCK], 1, tl.int32) << (position % 32)
        tl.atomic_or(plane + position // 32, bit, mask=chosen, sem="relaxed", scope="cta")


@triton.jit(do_not_specialize=_ANY)
def emit(
    req_ids, seq_lens, bits, entries, counts, tokens, width, capacity,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program is one group. entries [groups, capacity]: in the order of positions; counts [groups]: how many."""
    group = tl.program_id(0)
    if tl.load(counts + group) < 0:
        return
    words = tl.cdiv(tl.load(seq_lens + tl.load(req_ids + group * GROUP)), 32)
    row = entries + group.to(tl.int64) * capacity
    count = 0
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        planes = ()
        left = tl.zeros([BLOCK], tl.int32)  # bits that some token has and that are not written yet
        for i in tl.static_range(GROUP):
            t = (group * GROUP + i).to(tl.int64)
            plane = tl.load(bits + t * (width // 32) + at, mask=at < tl.where(t < tokens, words, 0), other=0)
            planes += (plane,)
            left |= plane
        ones = _ones(left)
        place = count + tl.cumsum(ones, 0) - ones
        count += tl.sum(ones, 0)
        for _ in range(tl.max(ones, 0)):
            lowest = left & -left
            entry = (at * 32 + _ones(lowest - 1)) << 8
            for i in tl.static_range(GROUP):
                entry |= ((planes[i] & lowest) != 0).to(tl.int32) << i
            tl.store(row + place, entry, mask=(left != 0) & (place < capacity))
            place += 1  # a word without bits left writes nothing any more
            left ^= lowest
    tl.store(counts + group, tl.where(count <= capacity, count, -1))


class Unions:
    """Memory for the unions of `groups` groups of `group` tokens at a time.

    width:    the most positions of a request. Tokens of a longer request share nothing
    capacity: the most rows of a union. A larger union is not used

    ValueError for more positions than `REACH` or more tokens than `MOST`.
    """

    def __init__(self, groups: int, group: int, width: int, capacity: int, device: torch.device | str) -> None:
        width = -(-width // 32) * 32
        if width > REACH:
            raise ValueError(f"a request has up to {width} positions, expected at most {REACH}")
        if group > MOST:
            raise ValueError(f"a group is of {group} tokens, expected at most {MOST}")
        self.groups, self.group, self.width, self.capacity = groups, group, width, capacity
        self.bits = torch.empty(groups * group, width // 32, dtype=torch.int32, device=device)
        self.entries = torch.empty(groups, capacity, dtype=torch.int32, device=device)
        self.counts = torch.empty(groups, dtype=torch.int32, device=device)

    def build(
        self, topk: torch.Tensor, req_ids: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries int32 [groups, capacity] and counts int32 [groups] of T tokens, at most `groups` * `group`.

        topk, req_ids, seq_lens: as in `launch.sparse_mla`. A position that a token names twice counts once.
        """
        tokens, columns = topk.shape
        count = -(-tokens // self.group)
        requests, row = (req_ids, seq_lens), (columns, topk.stride(0), self.width)
        look[(count,)](topk, *requests, self.counts, tokens, *row, GROUP=self.group, num_warps=4)
        mark[(tokens,)](topk, *requests, self.bits, self.counts, *row, GROUP=self.group, BLOCK=COLUMNS, num_warps=4)
        emit[(count,)](
            *requests, self.bits, self.entries, self.counts, tokens, self.width, self.capacity,
            GROUP=self.group, BLOCK=WORDS, num_warps=8,
        )  # fmt: skip
        return self.entries[:count], self.counts[:count]
