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


@dataclass(frozen=True)
class Plan:
    config: Config
    splits: int  # shares of a token's row; 1: no merge


# H200: 267 us at T 512, 2,057 at T 4096, within 1 % of the best of 30 and 95 % of a plain gather; a second buffer (7)
# is 10 to 14 % slower, tile 128 12 to 18 %, 4 warps are not among the best six
NARROW = Config(block_k=32, block_n=8, tile=64, stages=4, warps=2, per_sm=2)
# predicted: 16 heads fill the MMA; two tiles of 18 KB overlap gather and MMA within the program
MIDDLE = Config(block_k=16, block_n=16, tile=64, stages=7, warps=4, per_sm=1)
# predicted: a row is gathered once for 32 heads; 8 warps share the 64 KB of accumulators without a spill
WIDE = Config(block_k=32, block_n=32, tile=128, stages=4, warps=8, per_sm=1)
# H200, 64 heads: 1,642 us at T 512, 4.8 times FA3 (which has wgmma's 64 rows). Untuned; Q takes 72 KB of shared memory
WIDEST = Config(block_k=16, block_n=64, tile=128, stages=4, warps=8, per_sm=1)
# H200: 77 us at T 64, 422 at T 512, 3,257 at T 4096, a third of the gather; 7 stages are 3 to 4 % slower
NARROW_FP8 = Config(block_k=16, block_n=8, tile=64, stages=4, warps=2, per_sm=4)
# H200, 64 heads: 3,509 us at T 512, 7.8 times FlashMLA: a row is gathered and converted four times over. Untuned; 32
# and 64 heads in one program spill on 12.x
WIDE_FP8 = Config(block_k=16, block_n=16, tile=64, stages=7, warps=4, per_sm=2)

# H200, Triton 3.6: 74 us at T 64, 392 at T 512, 2,899 at T 4096. With 3.9 it spills, on 12.x too, where it is not for
DEEP_FP8 = replace(NARROW_FP8, block_k=32)
# H200, to 64 tokens: 18.1, 21.6 and 61.8 us at T 1, 8 and 64 with 32, 32 and 8 shares, NARROW 18.7, 24.0 and 61.5
DEEP = Config(block_k=16, block_n=8, tile=64, stages=7, warps=2, per_sm=4)
FEW = 128  # tokens, the most that DEEP is for
# H200 (a card of 227 KB): 5.8 ms at T 4096, 2.5 times FA3 and 2.3 times faster than WIDEST; 256 and 512 in a piece are
# 3 and 11 % slower, 32 rows 38 %
HUGE = Config(block_k=64, block_n=64, tile=128, stages=4, warps=8, per_sm=1)
# H200: 12.8 ms at T 4096, 3.7 times FlashMLA and 2.1 times faster than WIDE_FP8; 64 heads in one program spill
HUGE_FP8 = Config(block_k=64, block_n=32, tile=64, stages=4, warps=8, per_sm=1)

BY_HEADS = {  # the first whose heads suffice, else the last
    False: {8: NARROW, 16: MIDDLE, 32: WIDE, 64: WIDEST},
    True: {8: NARROW_FP8, 16: WIDE_FP8},  # fp8_ds_mla
}
LARGE = {  # the same for a card with the shared memory of 9.0, which holds more of the narrow ones
    False: BY_HEADS[False] | {8: replace(NARROW, per_sm=4), 64: HUGE},
    True: {8: DEEP_FP8, 16: WIDE_FP8, 32: HUGE_FP8},
}

# Prefill: tokens that share a gather (union.py)
SHARED: dict[bool, dict[int, Config]] = {
    # predicted: 64 rows fill the MMA; 4 tokens with 32 rows of cache are slower on the H200 (2.8 ms, this one 2.1)
    False: {8: replace(WIDEST, group=8)},
    True: {},  # two tokens, all that 12.x has registers for, lose on the H200
}
SHARED_LARGE = {
    False: {8: replace(HUGE, group=8)},
    True: {8: replace(HUGE_FP8, group=4)},
}
SHARE_FROM = 512  # tokens; predicted: fewer leave SMs without a group
# H200: unions of 1.07, 1.35 and 1.69 sets (8 tokens that keep 0.99, 0.95, 0.9) take 0.65, 0.75 and 0.87 of the time
# without sharing; 2.36 (keep 0.8) would take longer
MOST_SETS = 2  # a union has at most so many times the columns of a row
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
) -> Plan:
    """The plan for `tokens` rows of `columns` positions on a GPU of `sms` SMs. `cache_dtype` uint8 is fp8_ds_mla;
    large: the GPU has the shared memory of 9.0 (227 KB), not that of 12.x."""
    config = config_for(heads, cache_dtype, large)
    if large and heads <= 8 and tokens <= FEW and cache_dtype != torch.uint8:
        config = DEEP
    programs = tokens * -(-heads // config.block_n)
    return Plan(config, splits(programs, -(-columns // config.block_k), sms * config.per_sm, sms))


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
