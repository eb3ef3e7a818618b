"""How the indexer's kernels are launched. Everything here fits 12.x: 101,376 bytes, no spill (8 bytes of PAGED_MMA with
Triton 3.7.1). For 12.1 Triton 3.6 makes fp16 products of fp8 ones, as exact, and two programs of PAGED_MMA fit an SM.

`tests/kernels/test_indexer_compiles.py` compiles all of it; `bench --sweep` measures the neighbours. Reasons that begin
with "predicted" await a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HEADS = (16, 32, 64)
SCAN = 128  # requests whose lengths a program of the paged kernel adds up at once


@dataclass(frozen=True)
class Prefill:
    block_n: int  # keys of one MMA product
    columns: int  # of one MMA product: queries * heads
    group: int  # what a program streams past what it keeps: queries, or at most so many keys
    stages: int  # buffers of what it streams, and one
    warps: int
    keep: Literal["keys", "queries"] = "keys"


@dataclass(frozen=True)
class Paged:
    columns: int  # at most: rows * heads of one MMA product
    stages: int  # a table entry, then its page: 3: one page in shared memory, 5: two, 7: three
    warps: int
    per_sm: int  # programs per SM


# Triton puts all warps along the keys, so that no sum over heads crosses warps, only if block_n >= columns * warps.
# predicted: bound by the MMA, whose 32 QMMA of 16 cycles a warp stand against 178 other instructions; 98 registers and
# 42 KB let two programs of 8 warps share an SM, and 256 keys halve what 128 fetch of Q from L2
PREFILL_MMA = Prefill(block_n=256, columns=32, group=128, stages=3, warps=8)
# predicted: 64 heads are one query; two programs of 4 warps (42 KB, 248 registers) share an SM
PREFILL_MMA_64 = Prefill(block_n=256, columns=64, group=128, stages=2, warps=4)
# H200: 4,096 x 65,536 in 2,397 to 2,561 us causal, 2,670 to 2,735 full; 3 stages or 128 keys are within 3 %; what keeps
# 128 keys by 128 columns takes 2,770 to 3,160, 64 or 256 columns 3,100 to 3,380
PREFILL_WGMMA = Prefill(block_n=64, columns=128, group=8192, stages=4, warps=4, keep="queries")
LEAST_KEYS = 128  # that a program goes through
PREFILL_PER_SM = 16  # programs, where parts of at least so many keys make as many

# predicted: bound by bytes; two pages in flight in each of 3 programs are 50 KB an SM, and 1.79 TB/s need about 10. All
# programs must be resident at once: 3 of 64 columns are, by registers
PAGED_MMA = Paged(columns=64, stages=5, warps=4, per_sm=3)
# H200: 64 x 65,536 at 3.7 TB/s, within 2 % of DeepGEMM; 128 columns, 7 or 9 stages and 6 programs an SM are within 1 %
PAGED_WGMMA = Paged(columns=64, stages=5, warps=4, per_sm=4)


def prefill(heads: int, capability: tuple[int, int]) -> Prefill:
    if capability[0] == 9:
        return PREFILL_WGMMA
    return PREFILL_MMA_64 if heads > PREFILL_MMA.columns else PREFILL_MMA


def prefill_grid(queries: int, keys: int, heads: int, config: Prefill, sms: int) -> tuple[int, int]:
    """Programs, and what each streams (`config.group`, or fewer keys where few queries would leave SMs idle)."""
    if config.keep == "keys":
        return -(-keys // config.block_n) * -(-queries // config.group), config.group
    tiles = -(-queries // (config.columns // heads))
    parts = max(-(-keys // config.group), min(-(-keys // LEAST_KEYS), -(-sms * PREFILL_PER_SM // max(1, tiles))), 1)
    group = max(1, -(-keys // (parts * config.block_n))) * config.block_n
    return tiles * -(-keys // group), group


def paged(capability: tuple[int, int]) -> Paged:
    return PAGED_WGMMA if capability[0] == 9 else PAGED_MMA


def paged_columns(heads: int, next_n: int, config: Paged) -> int:
    """Columns of one MMA product: as many of a request's rows as fit, a power of two."""
    rows = 1 << (next_n - 1).bit_length()
    return max(heads, min(config.columns, rows * heads))
