"""How `topk` is launched. Everything that `plan` can return fits 12.x: 101,376 bytes, no spill.

Exception: WHOLE spills 8 bytes with Triton 3.5.1.

`tests/kernels/test_topk_compiles.py` compiles all of it. Reasons that begin with "predicted" await a measurement.

Measured on an H200, us. The configurations were chosen in an earlier form of the kernels, which counted in 64 bits.

| configuration | rows x columns | now | in 64 bits | why |
|---|---|---|---|---|
| SHARED | 1, 4, 8 and 64 x 131,072 | 20.6, 21.5, 22.3 and 52.9 | 4 rows: 20.5 | |
| SHARED | 1 x 1,048,576 | 22.9 | | |
| SHARED, 8 warps, 255 registers | 4 x 131,072 | | 21.7 | 3 more after other kernels ran: longer code |
| SHARED, 32 warps | 4 x 131,072 | | 26.4 | |
| SHARED, tile 8,192 | 64 x 131,072 | | 2 less | spills on 12.x |
| WHOLE | 4,096 x 65,536 | 1,129 | | |
| WHOLE, sample 2,048 | 4,096 x 65,536 | | 1,020 | spills on 12.x (Triton 3.6) |
| WHOLE, 3 programs of 80 registers, or 4 of 64 | | | | spill on 12.x (Triton 3.6) |
| WHOLE, 16 warps, one program an SM | 4,096 x 65,536 | | 1,330 | |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MOST = 2048  # the largest k
CAPACITY = 8192  # keys in registers, and the longest row without a sample: 4 k, twice what a sample aims at
BITS = 8  # of a histogram; predicted: Triton counts bins by ballots, 2^BITS / 32 counters a thread
# One of 32 columns up to 262,144, so that k 2,048 is 64 of the sample. One of 128 at 1,048,576. README.md has the odds
SAMPLES = (4096, 8192)
CHUNK = 4  # neighbouring columns of a sample; predicted: one 16-byte load, of a sector of 32
MAX_PARTS = 128


@dataclass(frozen=True)
class Config:
    sample: int  # logits
    tile: int  # logits in one step of the pass over the row
    stages: int  # n > 1: n - 1 tiles are copied to shared memory while one is worked on
    warps: int
    per_sm: int  # programs launched for one SM
    registers: int = 128  # the most of a thread: 2 programs of 8 warps fit an SM
    chunk: int = CHUNK
    step: int = 1024  # keys of the buffer when ties are written, and of a histogram; more spill with 128 registers
    write: int = 2048  # keys of the buffer when the chosen are written; CAPACITY: from registers


@dataclass(frozen=True)
class TopKPlan:
    config: Config
    parts: int  # programs that share a row; 1: `whole_rows`
    programs: int  # the most of `whole_rows`

    def slots(self, rows: int) -> int:
        """How many buffers a call needs: one for each shared row, or for each program."""
        return rows if self.parts > 1 else min(rows, self.programs)


# The table above has the figures
SHARED = {s: Config(s, 4096, stages=3, warps=16, per_sm=1, write=CAPACITY) for s in SAMPLES}
TILES = 2  # the least of each part of a row
WHOLE = {s: Config(s, tile=2048, stages=3, warps=8, per_sm=2) for s in SAMPLES}


@lru_cache(maxsize=1 << 16)
def plan(rows: int, columns: int, sms: int) -> TopKPlan:
    """The plan depends on shapes alone: `columns` is what a row could hold, and it may hold far fewer."""
    sample = next((s for s in SAMPLES if 32 * s >= columns), SAMPLES[-1])
    return plan_for(SHARED[sample], WHOLE[sample], rows, columns, sms)


def plan_for(shared: Config, whole: Config, rows: int, columns: int, sms: int) -> TopKPlan:
    """A row is shared if there are more programs than rows, unless the longest row fits the buffer."""
    parts = min(MAX_PARTS, -(-columns // (TILES * shared.tile)), sms * shared.per_sm // max(rows, 1))
    if columns > CAPACITY and parts > 1:
        return TopKPlan(shared, parts, 0)
    return TopKPlan(whole, 1, sms * whole.per_sm)
