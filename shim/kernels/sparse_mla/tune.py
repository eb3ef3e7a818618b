"""How `sparse_mla` is launched. Everything that `configuration` can return fits 12.x: 101,376 bytes, no spill.

`tests/kernels/test_sparse_mla_compiles.py` compiles all of it. Reasons that begin with "predicted" await a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

MAX_SPLITS = 64  # of the merge kernel: 32 columns each of a row of 2048
OVERHEAD = 4  # a program's beginning and end, in tiles; predicted: three loads that wait for each other, Q, out
SHARE = 1  # writing and reading back a share's fp32 result, in tiles: 8 heads are 2 x 16 KB
MERGE = 4  # what the second launch costs, in tiles; predicted: 2 us in a captured graph
MERGE_SHARE = 1.25  # and a share of an SM's; H200: with it 8 tokens take 32 shares, not 64, which costs 2 to 3 us
SCAN = 1024  # columns looked at in one step for the last one that is not -1; predicted: two steps do a row of 2048
MERGE_VALUES, MERGE_WARPS = 2048, 4  # fp32 of one program; predicted: 8 heads of 64 shares give 128, each reads 8 KB


@dataclass(frozen=True)
class Config:
    block_k: int  # cache rows in one tile
    block_n: int  # heads in one program, times `group`
    tile: int  # latent values in one piece of a row; 64 for fp8 (even or odd values of 128)
    stages: int  # 4: one tile of rows in shared memory, 7: two (kernel.py says why)
    warps: int
    per_sm: int  # programs that one SM of 12.x holds (100 KiB); more elsewhere
    group: int = 1  # neighbouring tokens that share one gather (union.py)
    apart: bool = False  # warps are arranged for S by itself (kernel.py)
    swap: bool = True  # heads are the columns of the second product, not its rows (kernel.py)


@dataclass(frozen=True)
class AttentionPlan:
    config: Config
    splits: int  # shares of a token's row; 1: no merge


# "As 12.x": on an H200 built for mma.sync, with as many programs on an SM as 12.x holds. us, medians, Triton 3.6

# T 4096: as 12.x 2,701 at uniform positions, 2,203 where neighbours keep 0.99; H200 2,007 and 1,678, 96 % of a plain
# gather. `apart` and 4 warps are 6 % slower, a second buffer (7) 6 % faster at uniform positions, 16 % slower at 0.99
NARROW = Config(block_k=32, block_n=8, tile=64, stages=4, warps=2, per_sm=2)
# to FEW tokens: as 12.x 12.8, 18.7 and 58.6 at T 1, 8 and 64 (NARROW 13.5, 20.6, 60.4; not apart 12.8, 18.5, 54.9, but
# it spills with Triton 3.9); H200, not apart, 12.7, 18.3 and 54.9
DEEP = Config(block_k=16, block_n=8, tile=64, stages=7, warps=2, per_sm=2, apart=True)
FEW = 128
# T 4096: as 12.x 4,489 (5,180 with 16 rows in two buffers, not apart)
MIDDLE = Config(block_k=32, block_n=16, tile=64, stages=4, warps=4, per_sm=1, apart=True)
# T 4096: as 12.x 6,061 (7,846 if not apart)
WIDE = Config(block_k=32, block_n=32, tile=128, stages=4, warps=8, per_sm=1, apart=True)
# T 4096: as 12.x 11,300 (11,133 if apart, which spills with Triton 3.9; WIDE twice 11,589)
WIDEST = Config(block_k=16, block_n=64, tile=128, stages=4, warps=8, per_sm=1)
# T 1, 8, 64 and 4096: as 12.x 14.6, 21.0, 64.8 and 3,067 (17.3, 25.7, 72.0 and 3,435 with 16 rows and 2 warps, not
# apart); H200 14.6, 21.4, 64.9 and 3,051
NARROW_FP8 = Config(block_k=32, block_n=8, tile=64, stages=4, warps=4, per_sm=2, apart=True)
# T 4096: as 12.x 6,292 with 16 heads, 24,364 with 64. 32 rows in one buffer, apart, take 3,731 and 14,105, but spill 8
# bytes (Triton 3.6) or 56 (3.9), and 12.x is given nothing that spills
WIDE_FP8 = Config(block_k=16, block_n=16, tile=64, stages=7, warps=4, per_sm=2)

# H200 (a card of 227 KB), 64 heads: 4,310 at T 4096, 4,168 with Triton 3.8; heads as columns 4,639 and 4,526, 128 in a
# piece 4,378 and 4,556, 32 rows in three buffers 5,205 and 5,214
HUGE = Config(block_k=64, block_n=64, tile=64, stages=4, warps=8, per_sm=1, apart=True, swap=False)
# H200, 64 heads: 12,810 at T 4096, 3.6 times FlashMLA and half of WIDE_FP8's; apart it spills 400 bytes
HUGE_FP8 = Config(block_k=64, block_n=32, tile=64, stages=4, warps=8, per_sm=1)

BY_HEADS = {  # the first whose heads suffice, else the last
    False: {8: NARROW, 16: MIDDLE, 32: WIDE, 64: WIDEST},
    True: {8: NARROW_FP8, 16: WIDE_FP8},  # fp8_ds_mla
}
LARGE = {  # the same for a card with the shared memory of 9.0
    False: BY_HEADS[False] | {8: replace(NARROW, per_sm=4), 64: HUGE},
    True: BY_HEADS[True] | {32: HUGE_FP8},
}
BY_HEADS_FEW = {8: DEEP}  # 16-bit, to FEW tokens
LARGE_FEW = {8: replace(DEEP, per_sm=4, apart=False)}

# Prefill: tokens that share a gather (union.py). T 4096, where neighbours keep 0.99, 0.95 and 0.9, and without sharing
SHARED: dict[bool, dict[int, Config]] = {
    # as 12.x 1,688, 1,865 and 2,094; 2,203 to 2,290. 8 tokens (WIDEST) 1,658, 2,062 and 2,507
    False: {8: replace(WIDE, group=4)},
    True: {},  # two tokens by 32 rows, apart: 2,094 to 2,284; 2,940. It spills as WIDE_FP8 would
}
SHARED_LARGE = {
    False: {8: replace(HUGE, group=8)},  # H200: 782 at 0.99 and 1,087 at 0.9; 1,676 and 1,732
    True: {8: replace(HUGE_FP8, group=4)},  # H200: 1,893 and 2,319; 2,950
}
SHARE_FROM = 512  # tokens; predicted: fewer leave SMs without a group
MOST_SETS = {4: 1.5, 8: 2.0}  # by tokens of a group: a union has at most so many times the columns of a row
UNION_BYTES = 128 << 20  # a bit for each token and position of its request; tokens that have no room come next


def sharing(tokens: int, heads: int, cache_dtype: torch.dtype, large: bool = False) -> Config | None:
    """How neighbouring tokens share gathers; None where they do not."""
    table = (SHARED_LARGE if large else SHARED)[cache_dtype == torch.uint8]
    return table.get(heads) if tokens >= SHARE_FROM else None


def config_for(heads: int, cache_dtype: torch.dtype, large: bool = False) -> Config:
    table = (LARGE if large else BY_HEADS)[cache_dtype == torch.uint8]
    return table[min((n for n in table if n >= heads), default=max(table))]


@lru_cache(maxsize=1 << 16)
def configuration(
    tokens: int, heads: int, cache_dtype: torch.dtype, sms: int, columns: int = 2048, large: bool = False
) -> AttentionPlan:
    """The plan for `tokens` rows of `columns` positions on a GPU of `sms` SMs. `cache_dtype` uint8 is fp8_ds_mla;
    large: the GPU has the shared memory of 9.0 (227 KB), not that of 12.x."""
    config = config_for(heads, cache_dtype, large)
    if tokens <= FEW and cache_dtype != torch.uint8:
        config = next((c for n, c in (LARGE_FEW if large else BY_HEADS_FEW).items() if n >= heads), config)
    programs = tokens * -(-heads // config.block_n)
    return AttentionPlan(config, splits(programs, -(-columns // config.block_k), sms * config.per_sm, sms))


def splits(programs: int, tiles: int, slots: int, sms: int) -> int:
    """Shares of a row that make the GPU finish first: rounds of programs, each as long as its tiles and an overhead,
    and the merge, which reads all shares. Powers of two: others leave some SMs with a program more (H200)."""
    if programs >= 2 * slots:  # predicted: an incomplete last round costs less than partial results do
        return 1
    best, chosen, count = None, 1, 1
    while count <= min(tiles, MAX_SPLITS):
        merge = MERGE + MERGE_SHARE * programs * count / sms if count > 1 else 0
        cost = -(-programs * count // slots) * (-(-tiles // count) + OVERHEAD + (count > 1) * SHARE) + merge
        if best is None or cost < best:
            best, chosen = cost, count
        count *= 2
    return chosen
