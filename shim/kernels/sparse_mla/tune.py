"""How `sparse_mla` is launched. Everything that `configuration` can return fits 12.x: 101,376 bytes, no spill.

`tests/kernels/test_sparse_mla_compiles.py` compiles all of it. Reasons that begin with "predicted" await a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

MAX_SPLITS = 64  # of the merge kernel: 32 columns each of a row of 2048
OVERHEAD = 4  # a program's beginning and end, in tiles; predicted: three loads that wait for each other, Q, out
SHARE = 1  # writing and reading back a share's fp32 result, in tiles: 8 heads are 2 x 16 KB
MERGE = 4  # what the second launch costs, in tiles; predicted: 2 us in a captured graph
SCAN = 1024  # columns looked at in one step for the last one that is not -1; predicted: two steps do a row of 2048
MERGE_STEP, MERGE_D, MERGE_WARPS = 16, 128, 4  # predicted: 8 heads of one token give 32 programs, each reads 32 KB


@dataclass(frozen=True)
class Config:
    block_k: int  # cache rows in one tile
    block_n: int  # heads in one program
    tile: int  # latent values in one piece of a row; 64 for fp8 (even or odd values of 128)
    stages: int  # 4: one tile of rows in shared memory, 7: two (kernel.py says why)
    warps: int
    per_sm: int  # programs that one SM of 12.x holds (100 KiB); more elsewhere


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
# H200: 77 us at T 64, 422 at T 512, 3,257 at T 4096, a third of the gather; 7 stages are 3 to 4 % slower; block_k 32 is
# 3 to 10 % faster with Triton 3.6 (74, 392, 2,899) but spills on 12.x with 3.9
NARROW_FP8 = Config(block_k=16, block_n=8, tile=64, stages=4, warps=2, per_sm=4)
# H200, 64 heads: 3,509 us at T 512, 7.8 times FlashMLA: a row is gathered and converted four times over. Untuned; 32
# and 64 heads in one program spill on 12.x
WIDE_FP8 = Config(block_k=16, block_n=16, tile=64, stages=7, warps=4, per_sm=2)

BY_HEADS = {  # the first whose heads suffice, else the last
    False: {8: NARROW, 16: MIDDLE, 32: WIDE, 64: WIDEST},
    True: {8: NARROW_FP8, 16: WIDE_FP8},  # fp8_ds_mla
}


def config_for(heads: int, cache_dtype: torch.dtype) -> Config:
    table = BY_HEADS[cache_dtype == torch.uint8]
    return table[min((n for n in table if n >= heads), default=max(table))]


@lru_cache(maxsize=1 << 16)
def configuration(tokens: int, heads: int, cache_dtype: torch.dtype, sms: int, columns: int = 2048) -> Plan:
    """The plan for `tokens` rows of `columns` positions on a GPU of `sms` SMs. `cache_dtype` uint8 is fp8_ds_mla."""
    config = config_for(heads, cache_dtype)
    programs = tokens * -(-heads // config.block_n)
    return Plan(config, splits(programs, -(-columns // config.block_k), sms * config.per_sm))


def splits(programs: int, tiles: int, slots: int) -> int:
    """Shares of a row that make the GPU finish first: rounds of programs, each as long as its tiles and an overhead."""
    if programs >= 2 * slots:  # predicted: an incomplete last round costs less than partial results do
        return 1
    best, chosen = None, 1
    for count in range(1, min(tiles, MAX_SPLITS) + 1):
        share = -(-tiles // count)
        if -(-tiles // share) != count:
            continue  # as long as a smaller count
        cost = -(-programs * count // slots) * (share + OVERHEAD + (count > 1) * SHARE) + (count > 1) * MERGE
        if best is None or cost < best:
            best, chosen = cost, count
    return chosen
