# mypy: ignore-errors
"""The rows that a group of neighbouring tokens chose, each once, with a bit for every token that chose it.

Neighbouring tokens of a prompt choose nearly the same rows (`overlap.py`), so that a group can gather them once. Built
on the device, without a sync, in three steps: `mark` sets one bit per position and group; `rank` counts the bits before
each word, so that a position's place in the union is known; `fill` has each token put its bit there. Entries, each
position * 256 + the tokens' bits, stand in the order of positions, whatever the order of the steps' programs. A group
has no union, and its count is -1, where its tokens are of several requests or the union would save too little. Most of
those are seen by a sample before anything is marked (`_alike`).

Source of the idea: the unions of a tile of query tokens in sgl-project/sglang#32779; a bit vector with rank is from
Jacobson, "Space-efficient static trees and graphs" (1989).
"""

import torch
import triton
import triton.language as tl

MOST = 8  # tokens of a group: bits of an entry beside its position
REACH = 1 << 23  # positions are below this: what an int32 entry holds beside them
COLUMNS, WORDS, CLEARED = 1024, 8192, 1024  # chosen positions, words of 32 bits and entries that one step takes
SAMPLE: tl.constexpr = tl.constexpr(32)


@triton.jit
def _chosen(row, start, columns, length, width, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    position = tl.load(row + column, mask=column < columns, other=-1)
    chosen = (position >= 0) & (position < length) & (position < width)
    return tl.where(chosen, position, 0), chosen


@triton.jit
def _ones(word):
    """How many bits of an int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _alike(topk, first, last, columns, topk_t):
    """Are at least a quarter of some positions of the last token among those of the first? Of 8 tokens that keep 0.85
    of each other's, and whose union is twice one set, it is a third."""
    at = tl.arange(0, SAMPLE) * tl.maximum(columns // SAMPLE, 1)
    some = tl.load(topk + last.to(tl.int64) * topk_t + at, mask=at < columns, other=-1)
    found = tl.zeros([SAMPLE], tl.int32)
    for start in range(0, columns, 256):
        column = start + tl.arange(0, 256)
        row = tl.load(topk + first.to(tl.int64) * topk_t + column, mask=column < columns, other=-1)
        found += tl.sum((row[:, None] == some[None, :]).to(tl.int32), 0)
    real = some >= 0
    return tl.sum((real & (found > 0)).to(tl.int32), 0) * 4 >= tl.sum(real.to(tl.int32), 0)


@triton.jit(do_not_specialize=["columns"])
def mark(topk, req_ids, seq_lens, bits, columns, topk_t, width, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """One program is one token. bits [groups, width / 32], all 0 before."""
    t = tl.program_id(0)
    group = t // GROUP
    request = tl.load(req_ids + t)
    if request != tl.load(req_ids + group * GROUP):
        return  # `rank` sees both too
    if not _alike(topk, group * GROUP, tl.minimum(group * GROUP + GROUP, tl.num_programs(0)) - 1, columns, topk_t):
        return
    length = tl.load(seq_lens + request)
    words = bits + group.to(tl.int64) * (width // 32)
    for start in range(0, columns, BLOCK):
        position, chosen = _chosen(topk + t.to(tl.int64) * topk_t, start, columns, length, width, BLOCK)
        bit = tl.full([BLOCK], 1, tl.int32) << (position % 32)
        tl.atomic_or(words + position // 32, bit, mask=chosen, sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "columns"])
def rank(
    topk, req_ids, seq_lens, bits, before, entries, counts, tokens, columns, topk_t, width, capacity,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """One program is one group. before [groups, width / 32]: set bits in front of each word; counts [groups]."""
    group = tl.program_id(0)
    first = group * GROUP
    request = tl.load(req_ids + first)
    member = first + tl.arange(0, GROUP)
    same = tl.min((tl.load(req_ids + member, mask=member < tokens, other=request) == request).to(tl.int32), 0)
    alike = _alike(topk, first, tl.minimum(first + GROUP, tokens) - 1, columns, topk_t)
    length = tl.load(seq_lens + request)
    used = (tl.minimum(length, width) + 31) // 32
    place = group.to(tl.int64) * (width // 32)
    count = 0
    for start in range(0, used, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ones = _ones(tl.load(bits + place + at, mask=at < used, other=0))
        tl.store(before + place + at, count + tl.cumsum(ones, 0) - ones, mask=at < used)
        count += tl.sum(ones, 0)
    count = tl.where((same != 0) & alike & (count <= capacity) & (length <= width), count, -1)
    tl.store(counts + group, count)
    row = entries + group.to(tl.int64) * capacity
    for start in range(0, count, CLEAR):
        at = start + tl.arange(0, CLEAR)
        tl.store(row + at, tl.zeros([CLEAR], tl.int32), mask=at < count)


@triton.jit(do_not_specialize=["columns"])
def fill(
    topk, req_ids, seq_lens, bits, before, entries, counts, columns, topk_t, width, capacity,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program is one token."""
    t = tl.program_id(0)
    group = t // GROUP
    if tl.load(counts + group) < 0:
        return
    length = tl.load(seq_lens + tl.load(req_ids + t))
    place = group.to(tl.int64) * (width // 32)
    row = entries + group.to(tl.int64) * capacity
    for start in range(0, columns, BLOCK):
        position, chosen = _chosen(topk + t.to(tl.int64) * topk_t, start, columns, length, width, BLOCK)
        word = tl.load(bits + place + position // 32, mask=chosen, other=0)
        lower = (tl.full([BLOCK], 1, tl.int32) << (position % 32)) - 1
        index = tl.load(before + place + position // 32, mask=chosen, other=0) + _ones(word & lower)
        mine = (tl.full([BLOCK], 1, tl.int32) << (t % GROUP)) | (position << 8)
        tl.atomic_or(row + index, mine, mask=chosen, sem="relaxed")


class Unions:
    """Memory for the unions of `groups` groups at a time.

    width:    the most positions of a request; the tokens of a longer one share nothing
    capacity: the most rows of a union; a larger one is not worth it
    """

    def __init__(self, groups: int, width: int, capacity: int, device: torch.device | str) -> None:
        width = -(-width // 32) * 32
        if width > REACH:
            raise ValueError(f"a request has up to {width} positions, expected at most {REACH}")
        self.groups, self.width, self.capacity = groups, width, capacity
        self.bits = torch.empty(groups, width // 32, dtype=torch.int32, device=device)
        self.before = torch.empty_like(self.bits)
        self.entries = torch.empty(groups, capacity, dtype=torch.int32, device=device)
        self.counts = torch.empty(groups, dtype=torch.int32, device=device)

    def build(
        self, topk: torch.Tensor, req_ids: torch.Tensor, seq_lens: torch.Tensor, group: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries int32 [groups, capacity] and counts int32 [groups] of T tokens in groups of `group`.

        topk, req_ids, seq_lens: as `launch.sparse_mla` takes them; a position that a token names twice counts once.
        """
        if group > MOST:
            raise ValueError(f"a group is of {group} tokens, expected at most {MOST}")
        tokens, columns = topk.shape
        count = -(-tokens // group)
        self.bits[:count].zero_()
        mark[(tokens,)](
            topk, req_ids, seq_lens, self.bits, columns, topk.stride(0), self.width,
            GROUP=group, BLOCK=COLUMNS, num_warps=4,
        )  # fmt: skip
        rank[(count,)](
            topk, req_ids, seq_lens, self.bits, self.before, self.entries, self.counts, tokens, columns,
            topk.stride(0), self.width, self.capacity, GROUP=group, BLOCK=WORDS, CLEAR=CLEARED, num_warps=8,
        )  # fmt: skip
        fill[(tokens,)](
            topk, req_ids, seq_lens, self.bits, self.before, self.entries, self.counts, columns, topk.stride(0),
            self.width, self.capacity, GROUP=group, BLOCK=COLUMNS, num_warps=4,
        )  # fmt: skip
        return self.entries[:count], self.counts[:count]
