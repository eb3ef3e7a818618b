"""How `sparse_mla` is launched. Everything that `configuration` can return for 12.x fits it: 101,376 bytes, no spill.

`tests/kernels/test_sparse_mla_compiles.py` compiles all of it. Reasons that begin with "predicted" await a measurement.

Why each configuration is what it is. Figures are medians in us with Triton 3.6, for T tokens. "As 12.x" is an H200 with
kernels built for mma.sync and as many programs on an SM as 12.x holds. "H200" is the card as it is.

| configuration | measured | figure | why |
|---|---|---|---|
| NARROW | as 12.x, T 4096 | 2,701 at uniform positions, 2,203 if neighbours keep 0.99 | |
| NARROW | H200, T 4096 | 2,007 and 1,678 | 96 % of a plain gather |
| NARROW, apart, 4 warps | T 4096 | 6 % slower | not taken |
| NARROW, 7 stages | T 4096 | uniform 6 % faster, 0.99 16 % slower | not taken |
| DEEP, up to FEW tokens | as 12.x, T 1, 8, 64 | 12.8, 18.7, 58.6 | NARROW takes 13.5, 20.6, 60.4 |
| DEEP, not apart | as 12.x, T 1, 8, 64 | 12.8, 18.5, 54.9 | spills with Triton 3.9 |
| DEEP, not apart | H200, T 1, 8, 64 | 12.7, 18.3, 54.9 | LARGE_FEW |
| MIDDLE | as 12.x, T 4096 | 4,489 | 16 rows in two buffers, not apart: 5,180 |
| WIDE | as 12.x, T 4096 | 6,061 | not apart: 7,846 |
| WIDEST | as 12.x, T 4096 | 11,300 | apart: 11,133, but it spills with Triton 3.9. WIDE twice: 11,589 |
| NARROW_FP8 | as 12.x, T 1, 8, 64, 4096 | 14.6, 21.0, 64.8, 3,067 | |
| NARROW_FP8, 16 rows, 2 warps, not apart | the same | 17.3, 25.7, 72.0, 3,435 | not taken |
| NARROW_FP8 | H200, T 1, 8, 64, 4096 | 14.6, 21.4, 64.9, 3,051 | |
| WIDE_FP8 | as 12.x, T 4096 | 16 heads 6,292, 64 heads 24,364 | 12.x gets nothing that spills |
| WIDE_FP8, 32 rows in one buffer, apart | the same | 3,731 and 14,105 | spills 8 bytes (Triton 3.6) or 56 (3.9) |
| HUGE | H200, T 4096, 64 heads | 4,310, Triton 3.8 4,168 | |
| HUGE, swap | H200, T 4096, 64 heads | 4,639, Triton 3.8 4,526 | not taken |
| HUGE, tile 128 | H200, T 4096, 64 heads | 4,378, Triton 3.8 4,556 | not taken |
| HUGE, 32 rows in three buffers | H200, T 4096, 64 heads | 5,205, Triton 3.8 5,214 | not taken |
| HUGE_FP8 | H200, T 4096, 64 heads | 12,810 | 3.6 times FlashMLA, half of WIDE_FP8. Apart it spills 400 bytes |

Gathers that neighbouring tokens share, T 4096 and 8 heads:

| configuration | measured | neighbours keep 0.99, 0.95, 0.9 | not shared | why |
|---|---|---|---|---|
| SHARED bf16: WIDE, group 4 | as 12.x | 1,688, 1,865, 2,094 | 2,203 to 2,290 | |
| WIDEST, group 8 | as 12.x | 1,658, 2,062, 2,507 | | not taken |
| fp8, group 2, 32 rows, apart | as 12.x | 2,094 to 2,284 | 2,940 | would spill as WIDE_FP8 with 32 rows does |
| SHARED_LARGE bf16: HUGE, group 8 | H200 | 0.99: 782, 0.9: 1,087 | 1,676 and 1,732 | |
| SHARED_LARGE fp8: HUGE_FP8, group 4 | H200 | 0.99: 1,893, 0.9: 2,319 | 2,950 | |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

MAX_SPLITS = 64  # of the merge kernel: 32 columns each of a row of 2048
# Costs in tiles
OVERHEAD = 4  # of a program's beginning and end; predicted: three loads that wait for each other, Q, out
SHARE = 1  # of writing a share's fp32 result and reading it again: 8 heads are 2 x 16 KB
MERGE = 4  # of the second launch; predicted: 2 us in a captured graph
MERGE_SHARE = 1.25  # of a share in the merge, per SM; H200: with it 8 tokens take 32 shares. 64 cost 2 to 3 us more
SCAN = 1024  # columns that one step searches for the last one that is not -1; predicted: two steps for a row of 2048
MERGE_VALUES = 2048  # fp32, of a merge program; predicted: 8 heads of 64 shares give 128 programs, each reads 8 KB
MERGE_WARPS = 4


@dataclass(frozen=True)
class Config:
    block_k: int  # cache rows in one tile
    block_n: int  # heads in one program, times `group`
    tile: int  # latent values in one piece of a row; fp8: 64, the even or the odd values of 128
    stages: int  # 4: one tile of rows in shared memory, 7: two (kernel.py has the reason)
    warps: int
    per_sm: int  # programs that one SM of 12.x holds (100 KiB); more elsewhere
    group: int = 1  # neighbouring tokens that share one gather (union.py)
    apart: bool = False  # the products of S have their own arrangement of warps (kernel.py)
    swap: bool = True  # heads are the columns of the second product, else its rows (kernel.py)


@dataclass(frozen=True)
class AttentionPlan:
    config: Config
    splits: int  # shares of a token's row; 1: no merge


# The table above has the figures
NARROW = Config(block_k=32, block_n=8, tile=64, stages=4, warps=2, per_sm=2)
DEEP = Config(block_k=16, block_n=8, tile=64, stages=7, warps=2, per_sm=2, apart=True)
FEW = 128  # tokens, up to which DEEP is launched
MIDDLE = Config(block_k=32, block_n=16, tile=64, stages=4, warps=4, per_sm=1, apart=True)
WIDE = Config(block_k=32, block_n=32, tile=128, stages=4, warps=8, per_sm=1, apart=True)
WIDEST = Config(block_k=16, block_n=64, tile=128, stages=4, warps=8, per_sm=1)
NARROW_FP8 = Config(block_k=32, block_n=8, tile=64, stages=4, warps=4, per_sm=2, apart=True)
WIDE_FP8 = Config(block_k=16, block_n=16, tile=64, stages=7, warps=4, per_sm=2)
# For a card with the shared memory of 9.0 (227 KB)
HUGE = Config(block_k=64, block_n=64, tile=64, stages=4, warps=8, per_sm=1, apart=True, swap=False)
HUGE_FP8 = Config(block_k=64, block_n=32, tile=64, stages=4, warps=8, per_sm=1)

BY_HEADS = {  # the first entry with enough heads, else the last
    False: {8: NARROW, 16: MIDDLE, 32: WIDE, 64: WIDEST},
    True: {8: NARROW_FP8, 16: WIDE_FP8},  # fp8_ds_mla
}
LARGE = {  # the same for a card with the shared memory of 9.0
    False: BY_HEADS[False] | {8: replace(NARROW, per_sm=4), 64: HUGE},
    True: BY_HEADS[True] | {32: HUGE_FP8},
}
BY_HEADS_FEW = {8: DEEP}  # 16-bit, to FEW tokens
LARGE_FEW = {8: replace(DEEP, per_sm=4, apart=False)}

# Prefill: neighbouring tokens that share a gather (union.py), by heads
SHARED: dict[bool, dict[int, Config]] = {
    False: {8: replace(WIDE, group=4)},
    True: {},
}
SHARED_LARGE = {
    False: {8: replace(HUGE, group=8)},
    True: {8: replace(HUGE_FP8, group=4)},
}
SHARE_FROM = 512  # tokens; predicted: with fewer, some SMs have no group
MOST_SETS = {4: 1.5, 8: 2.0}  # by tokens of a group: the most rows of a union, in columns of a token's row
UNION_BYTES = 128 << 20  # a bit for each token and position of its request. Tokens that do not fit are taken afterwards


def sharing(tokens: int, heads: int, cache_dtype: torch.dtype, large: bool = False) -> Config | None:
    """How neighbouring tokens share gathers. None if they do not."""
    table = (SHARED_LARGE if large else SHARED)[cache_dtype == torch.uint8]
    return table.get(heads) if tokens >= SHARE_FROM else None


def config_for(heads: int, cache_dtype: torch.dtype, large: bool = False) -> Config:
    table = (LARGE if large else BY_HEADS)[cache_dtype == torch.uint8]
    return table[min((n for n in table if n >= heads), default=max(table))]


@lru_cache(maxsize=1 << 16)
def configuration(
    tokens: int, heads: int, cache_dtype: torch.dtype, sms: int, columns: int = 2048, large: bool = False
) -> AttentionPlan:
    """The plan for `tokens` rows of `columns` positions on a GPU with `sms` SMs.

    cache_dtype: uint8 is fp8_ds_mla
    large:       the GPU has the shared memory of 9.0 (227 KB), not that of 12.x
    """
    config = config_for(heads, cache_dtype, large)
    if tokens <= FEW and cache_dtype != torch.uint8:
        config = next((c for n, c in (LARGE_FEW if large else BY_HEADS_FEW).items() if n >= heads), config)
    programs = tokens * -(-heads // config.block_n)
    return AttentionPlan(config, splits(programs, -(-columns // config.block_k), sms * config.per_sm, sms))


def splits(programs: int, tiles: int, slots: int, sms: int) -> int:
    """How many shares of a row let the GPU finish first.

    The cost is the rounds of programs, each with its tiles and an overhead, and the merge, which reads all shares. Only
    powers of two are tried: with other numbers some SMs get one program more (H200)."""
    if programs >= 2 * slots:  # predicted: an incomplete last round costs less than partial results
        return 1
    best, chosen, count = None, 1, 1
    while count <= min(tiles, MAX_SPLITS):
        merge = MERGE + MERGE_SHARE * programs * count / sms if count > 1 else 0
        cost = -(-programs * count // slots) * (-(-tiles // count) + OVERHEAD + (count > 1) * SHARE) + merge
        if best is None or cost < best:
            best, chosen = cost, count
        count *= 2
    return chosen
