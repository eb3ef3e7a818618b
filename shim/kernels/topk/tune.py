"""How `topk` is launched. Everything that `plan` can return fits 12.x: 101,376 bytes, no spill (8 bytes of WHOLE with
Triton 3.5.1).

`tests/kernels/test_topk_compiles.py` compiles all of it. Reasons that begin with "predicted" await a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MOST = 2048  # the largest k
CAPACITY = 8192  # what is selected from in registers, and the longest row that is not sampled; 4 k, for 2 k either way
BITS = 8  # of a histogram; predicted: Triton counts bins by ballots, 2^BITS / 32 counters a thread
# Of 4 neighbours at a time, and one of 32 columns up to 262,144, so that k 2,048 is 64 of the sample; one of 128 at
# 1,048,576. README.md has the odds
SAMPLES = (4096, 8192)
CHUNK = 4  # predicted: one 16-byte load, of a sector of 32
MAX_PARTS = 128


@dataclass(frozen=True)
class Config:
    sample: int  # logits
    tile: int  # logits in one step of the pass over the row
    stages: int  # n > 1: n - 1 tiles are on their way to shared memory while one is worked on
    warps: int
    per_sm: int  # programs launched for one SM
    registers: int = 128  # a thread, at most: 2 programs of 8 warps on an SM
    chunk: int = CHUNK
    step: int = 1024  # of the buffer, when ties are written, and of a histogram; more spill with 128 registers
    write: int = 2048  # of the buffer, when the chosen are written; CAPACITY: from registers


@dataclass(frozen=True)
class TopKPlan:
    config: Config
    parts: int  # programs that share a row; 1: `whole_rows`
    programs: int  # of `whole_rows`, at most

    def slots(self, rows: int) -> int:
        """Buffers that a call needs: one for each row that is shared, or for each program."""
        return rows if self.parts > 1 else min(rows, self.programs)


# H200, us of 1, 4, 8 and 64 x 131,072, and of 1 x 1,048,576: 20.6, 21.5, 22.3, 52.9 and 22.9. Chosen in a form that
# counted in 64 bits: 16 warps 20.5 for 4, 8 warps of 255 registers 21.7, and 3 more where other kernels ran in between
# (longer code), 32 warps 26.4; tiles of 8,192 took 2 off 64 rows and spill on 12.x
SHARED = {s: Config(s, 4096, stages=3, warps=16, per_sm=1, write=CAPACITY) for s in SAMPLES}
TILES = 2  # at least, for each part of a row
# H200: 4,096 x 65,536 in 1,129 us; 1,020 with counts in 64 bits and a sample of 2,048, which spill on 12.x (Triton 3.6)
# as 3 or 4 programs with 80 or 64 registers do; 16 warps, one program an SM, counts in 64 bits: 1,330
WHOLE = {s: Config(s, tile=2048, stages=3, warps=8, per_sm=2) for s in SAMPLES}


@lru_cache(maxsize=1 << 16)
def plan(rows: int, columns: int, sms: int) -> TopKPlan:
    """Of shapes alone: `columns` is what a row could hold, which may be far more than it does."""
    sample = next((s for s in SAMPLES if 32 * s >= columns), SAMPLES[-1])
    return plan_for(SHARED[sample], WHOLE[sample], rows, columns, sms)


def plan_for(shared: Config, whole: Config, rows: int, columns: int, sms: int) -> TopKPlan:
    """Rows are shared while there are programs to spare, unless the longest is selected from as it is."""
    parts = min(MAX_PARTS, -(-columns // (TILES * shared.tile)), sms * shared.per_sm // max(rows, 1))
    if columns > CAPACITY and parts > 1:
        return TopKPlan(shared, parts, 0)
    return TopKPlan(whole, 1, sms * whole.per_sm)
