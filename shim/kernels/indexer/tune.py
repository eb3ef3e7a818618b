"""How the indexer's kernels are launched. Everything here fits 12.x: 101,376 bytes, no spill.

Exceptions: PAGED_MMA spills 8 bytes with Triton 3.7.1. For 12.1 Triton 3.6 makes fp16 products of fp8 ones, which are
as exact, and two programs of PAGED_MMA fit an SM.

`tests/kernels/test_indexer_compiles.py` compiles all of it. `bench --sweep` measures the neighbours. "Predicted"
reasons await a measurement.

| configuration | measured | figure | why |
|---|---|---|---|
| PREFILL_MMA | predicted | 32 QMMA of 16 cycles beside 178 other instructions of a warp | bound by the MMA |
| | | 98 registers, 42 KB | two programs of 8 warps share an SM |
| | | 256 keys | they fetch half as much of Q from L2 as 128 keys do |
| PREFILL_MMA_64 | predicted | 42 KB, 248 registers | 64 heads are one query. Two programs of 4 warps share an SM |
| PREFILL_WGMMA | H200, 4,096 x 65,536, us | 2,397 to 2,561 causal, 2,670 to 2,735 full | |
| PREFILL_WGMMA, 3 stages or 128 keys | H200, 4,096 x 65,536 | within 3 % | |
| 128 keys kept, 128 columns | H200, 4,096 x 65,536, us | 2,770 to 3,160 | not taken |
| 128 keys kept, 64 or 256 columns | H200, 4,096 x 65,536, us | 3,100 to 3,380 | not taken |
| PAGED_MMA | predicted | two pages in each of 3 programs are 50 KB an SM | bound by bytes. 1.79 TB/s need about 10 KB |
| | | 64 columns: 3 programs an SM, by registers | all programs must be resident at once |
| PAGED_WGMMA | H200, 64 x 65,536 | 3.7 TB/s | within 2 % of DeepGEMM |
| PAGED_WGMMA, 128 columns, 7 or 9 stages, 6 programs | H200, 64 x 65,536 | within 1 % | |
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
    group: int  # how many queries a program streams, or at most how many keys
    stages: int  # buffers of what it streams, plus one
    warps: int
    keep: Literal["keys", "queries"] = "keys"


@dataclass(frozen=True)
class Paged:
    columns: int  # at most: rows * heads of one MMA product
    stages: int  # 3: one page in shared memory, 5: two, 7: three. A table entry is loaded before its page
    warps: int
    per_sm: int  # programs per SM


# Triton puts all warps along the keys only if block_n >= columns * warps. Then no sum over heads crosses warps.
PREFILL_MMA = Prefill(block_n=256, columns=32, group=128, stages=3, warps=8)
PREFILL_MMA_64 = Prefill(block_n=256, columns=64, group=128, stages=2, warps=4)
PREFILL_WGMMA = Prefill(block_n=64, columns=128, group=8192, stages=4, warps=4, keep="queries")
LEAST_KEYS = 128  # of a program
PREFILL_PER_SM = 16  # programs, if each still has LEAST_KEYS

PAGED_MMA = Paged(columns=64, stages=5, warps=4, per_sm=3)
PAGED_WGMMA = Paged(columns=64, stages=5, warps=4, per_sm=4)


def prefill(heads: int, capability: tuple[int, int]) -> Prefill:
    if capability[0] == 9:
        return PREFILL_WGMMA
    return PREFILL_MMA_64 if heads > PREFILL_MMA.columns else PREFILL_MMA


def prefill_grid(queries: int, keys: int, heads: int, config: Prefill, sms: int) -> tuple[int, int]:
    """How many programs, and what each streams: `config.group`, or fewer keys if few queries would leave SMs idle."""
    if config.keep == "keys":
        return -(-keys // config.block_n) * -(-queries // config.group), config.group
    tiles = -(-queries // (config.columns // heads))
    parts = max(-(-keys // config.group), min(-(-keys // LEAST_KEYS), -(-sms * PREFILL_PER_SM // max(1, tiles))), 1)
    group = max(1, -(-keys // (parts * config.block_n))) * config.block_n
    return tiles * -(-keys // group), group


def paged(capability: tuple[int, int]) -> Paged:
    return PAGED_WGMMA if capability[0] == 9 else PAGED_MMA


def paged_columns(heads: int, next_n: int, config: Paged) -> int:
    """Columns of one MMA product: as many rows of a request as fit. A power of two."""
    rows = 1 << (next_n - 1).bit_length()
    return max(heads, min(config.columns, rows * heads))
