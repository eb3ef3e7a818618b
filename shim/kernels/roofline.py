"""What each kernel needs of an RTX PRO 6000 Blackwell (SM120): bytes, FLOPs, occupancy, a bound on its time. No GPU.

    python -m shim.kernels.roofline [--quick] [--no-compile] [--json FILE]

Each case has two times. Neither forecasts a measurement:

    floor_us      every distinct byte comes from memory once, and every useful product is computed once
    predicted_us  the largest of three times; `bound` names it:
                  memory   the bytes that the launched kernel reads and writes, at the memory's rate. These are each
                           token's rows, or a group's if it shares them, without the time to find those
                  mma      its products, at the rate of the tensor cores that its programs reach
                  latency  its bytes, if all its shared memory and registers were waiting for loads

The table's MB and GFLOP count each token's rows as if no two tokens shared any, and real products only.

floor_us is always a lower bound. predicted_us is one too, unless L2 (128 MB) holds rows for several tokens. Neither
counts launches (about 2 us each, less in a graph), loads that wait for each other, MMA rows that padding wastes,
conversions, partial results of split rows, or the clock under load.

Sources: 188 SMs, 1,792 GB/s, 128 MB L2: NVIDIA's data sheet (the Server Edition has a tenth less). 503.8 dense bf16
TFLOP/s with fp32 sums: NVIDIA's RTX Blackwell PRO architecture white paper, quoted in NVIDIA/cudnn-frontend#597. That
is 1,024 FLOP a clock and SM at 2.617 GHz. fp8 is taken to be twice that: the data sheet's 4,000 TOPS are sparse fp4,
four times dense fp8. Public GEMMs on this card reach 350 to 420 in bf16. `LATENCY` is an assumption.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from shim.kernels.build import Occupancy, occupancy
from shim.process import say

TOPK, ROWS = 2048, 262_144  # of GLM-5; rows of the cache, as in sparse_mla's bench
ROW_BYTES = {"bf16": 1152, "fp8": 656}  # of the cache; fp8_ds_mla
INDEX_HEADS = 32
TENSOR_CORES = 4  # of an SM; a warp uses one
LATENCY = 0.8  # us of a load from memory, under load


@dataclass(frozen=True)
class Card:
    name: str
    capability: int
    sms: int
    gb_s: float
    tflop_s: dict[str, float]  # dense, by the operands' type


RTX_PRO_6000 = Card(
    "RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 1792.0, {"bf16": 503.8, "fp8": 2 * 503.8}
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One case of the benchmark, and what it needs."""

    kernel: str  # sparse_mla | indexer_prefill | indexer_paged | topk
    heads: int | None
    tokens: int  # queries, requests or rows
    keys: int
    dtype: str  # of the cache, of q and k, or of the logits
    inputs: str
    bytes: float  # as if no two tokens shared any
    distinct_bytes: float
    flops: float  # the useful ones of the tensor cores
    mma: str | None  # type of the operands
    keep: float | None = None


@dataclass(frozen=True)
class Launch:
    """How `tune` launches a case on a card: which build, and how many programs."""

    build: str  # key of `BUILDS`
    config: Any
    variant: tuple[Any, ...]
    programs: int
    configuration: str
    bytes: float  # this and the next as launched: a group that shares its rows (sparse_mla/union.py) works on all
    flops: float


def sparse_mla(tokens: int, heads: int, kv: str, keep: float | None = None) -> Work:
    """Cache rows, positions, q, out and lse. Both products have 16-bit operands, for fp8 rows too."""
    from shim.kernels.sparse_mla.overlap import distinct_rows

    row = ROW_BYTES[kv]
    rest = tokens * (4 * TOPK + heads * (2 * 576 + 2 * 512 + 4))
    flops = 2 * tokens * heads * TOPK * (576 + 512)
    distinct = distinct_rows(tokens, TOPK, ROWS, keep) * row + rest
    inputs = "uniform" if keep is None else f"keep {keep}"
    moved = tokens * TOPK * row + rest
    return Work("sparse_mla", heads, tokens, ROWS, kv, inputs, moved, distinct, flops, "bf16", keep)


def indexer_prefill(queries: int, keys: int, heads: int, causal: bool) -> Work:
    """fp8 q and k of 128, fp32 scales, weights and logits. Two FLOP for each of 128 values, head and visible pair."""
    visible = queries * (2 * keys - queries + 1) // 2 if causal else queries * keys
    moved = queries * heads * (128 + 4) + keys * (128 + 4) + 4 * visible
    inputs = "causal" if causal else "full"
    return Work(
        "indexer_prefill", heads, queries, keys, "fp8", inputs, moved, moved, 256.0 * heads * visible, "fp8"
    )  # fmt: skip


def indexer_paged(batch: int, keys: int, heads: int) -> Work:
    """132 bytes per cached key, fp32 logits, one new token per request."""
    moved = batch * (heads * (128 + 4) + keys * (132 + 4) + 4 * keys // 64)
    return Work(
        "indexer_paged", heads, batch, keys, "fp8", "one token", moved, moved, 256.0 * heads * batch * keys, "fp8"
    )  # fmt: skip


def topk(rows: int, columns: int, kind: str = "normal") -> Work:
    """Every logit is read once, 2,048 columns are written. Logits that the indexer just wrote may come from L2."""
    moved = 4 * rows * (columns + TOPK)
    return Work("topk", None, rows, columns, "fp32", kind, moved, moved, 0.0, None)


def cases(quick: bool) -> Iterator[Work]:
    """Decode and prefill of every kernel, uniformly random and overlapping index sets."""
    from shim.kernels.sparse_mla.overlap import KEEP

    for heads, kv in product((8,) if quick else (8, 64), ("bf16", "fp8")):
        for tokens in (1, 64, 4096) if quick else (1, 8, 64, 512, 4096):
            yield sparse_mla(tokens, heads, kv)
        few = quick or heads > 8
        for tokens, keep in product((4096,) if few else (512, 4096), (0.9,) if few else KEEP):
            yield sparse_mla(tokens, heads, kv, keep)
    for queries, keys in ((1024, 16_384),) if quick else product((1024, 4096), (16_384, 65_536)):
        yield indexer_prefill(queries, keys, INDEX_HEADS, causal=True)
    if not quick:
        yield indexer_prefill(4096, 65_536, INDEX_HEADS, causal=False)
    for batch, keys in product((1, 8) if quick else (1, 8, 64), (65_536,) if quick else (8192, 65_536, 131_072)):
        yield indexer_paged(batch, keys, INDEX_HEADS)
    for rows, columns in product((1, 4) if quick else (1, 4, 8, 64), (131_072,) if quick else (8192, 65_536, 131_072)):
        yield topk(rows, columns, "indexer")
    if not quick:
        for columns in (16_384, 65_536):
            yield topk(4096, columns, "indexer")


def launch_of(work: Work, card: Card = RTX_PRO_6000) -> Launch:
    """What `tune` chooses for this work on that card."""
    import torch

    capability = divmod(card.capability, 10)
    if work.kernel == "sparse_mla":
        from shim.kernels.sparse_mla import tune as mla
        from shim.kernels.sparse_mla.overlap import distinct_rows

        assert work.heads is not None
        cache = torch.uint8 if work.dtype == "fp8" else torch.bfloat16
        plan = mla.configuration(work.tokens, work.heads, cache, card.sms)
        if work.keep is not None and (shared := mla.sharing(work.tokens, work.heads, cache)):
            union = distinct_rows(shared.group, TOPK, ROWS, work.keep)
            if union <= mla.MOST_SETS[shared.group] * TOPK:
                groups = math.ceil(work.tokens / shared.group)
                rest = work.bytes - work.tokens * TOPK * ROW_BYTES[work.dtype]
                moved = groups * union * ROW_BYTES[work.dtype] + rest
                flops = work.flops * groups * shared.group * union / (work.tokens * TOPK)
                return Launch("attend", shared, (work.dtype == "fp8", False), groups, str(shared), moved, flops)
        programs = work.tokens * plan.splits * math.ceil(work.heads / plan.config.block_n)
        variant = (work.dtype == "fp8", plan.splits > 1)
        return Launch("attend", plan.config, variant, programs, str(plan), work.bytes, work.flops)
    if work.kernel == "topk":
        from shim.kernels.topk import tune as top

        chosen = top.plan(work.tokens, work.keys, card.sms)
        in_parts = chosen.parts > 1
        programs = work.tokens * chosen.parts if in_parts else chosen.slots(work.tokens)
        return Launch("select", chosen.config, (in_parts,), programs, str(chosen), work.bytes, work.flops)
    from shim.kernels.indexer import tune as indexer

    assert work.heads is not None
    if work.kernel == "indexer_prefill":
        prefill = indexer.prefill(work.heads, capability)
        programs, _ = indexer.prefill_grid(work.tokens, work.keys, work.heads, prefill, card.sms)
        return Launch("mqa", prefill, (work.heads,), programs, str(prefill), work.bytes, work.flops)
    paged = indexer.paged(capability)
    programs = min(work.tokens * math.ceil(work.keys / 64), card.sms * paged.per_sm)
    return Launch("paged_mqa", paged, (work.heads,), programs, str(paged), work.bytes, work.flops)


def predict(
    work: Work,
    programs: int,
    occupancy: Occupancy | None,
    card: Card = RTX_PRO_6000,
    launched: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """`{"floor_us", "predicted_us", "bound", "waves"}` (module docstring).

    occupancy: None: all programs run at once, with as many loads in flight as they need, and waves is None
    launched:  bytes and FLOPs, if they are not the work's
    """
    rate = card.gb_s * 1e3  # bytes a us
    mma = card.tflop_s[work.mma] * 1e6 if work.mma else math.inf
    moved, computed = launched or (work.bytes, work.flops)
    times = {"memory": moved / rate, "mma": computed / mma}
    waves = None
    if occupancy is not None and occupancy.per_sm:
        running = min(programs, occupancy.per_sm * card.sms)
        waves = round(programs / (occupancy.per_sm * card.sms), 2)
        times["mma"] /= min(1.0, running * occupancy.warps / (TENSOR_CORES * card.sms))
        in_flight = running * (occupancy.shared + occupancy.registers * 4 * 32 * occupancy.warps)
        times["latency"] = LATENCY * moved / in_flight
    bound = max(times, key=lambda name: times[name])
    floor = max(work.distinct_bytes / rate, work.flops / mma)
    return {
        "floor_us": round(floor, 3), "predicted_us": round(times[bound], 3), "bound": bound, "waves": waves
    }  # fmt: skip


def _try(launch: Launch) -> Occupancy | str:
    try:
        return occupancy(launch.build, launch.config, launch.variant)
    except Exception as problem:
        return f"{launch.build} {launch.configuration}: {type(problem).__name__}: {problem}"[:200]


def predictions(works: list[Work], compile: bool = True) -> tuple[list[dict[str, Any]], list[str]]:
    """A dict for each work (`predict`'s, "configuration", "occupancy": None if unknown), and the problems."""
    launches = [launch_of(work) for work in works]
    found: dict[tuple[Any, ...], Occupancy | str] = {}
    if compile and os.environ.get("TRITON_INTERPRET"):
        problems = ["occupancy unknown: TRITON_INTERPRET is set, and nothing is compiled under it"]
    else:
        wanted = {(x.build, x.config, x.variant): x for x in launches} if compile else {}
        workers = min(len(wanted), max(1, (os.cpu_count() or 2) - 1))
        if workers:
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                found = dict(zip(wanted, pool.map(_try, wanted.values()), strict=True))
        problems = [f"occupancy unknown: {value}" for value in found.values() if isinstance(value, str)]
    rows = []
    for work, launch in zip(works, launches, strict=True):
        held = found.get((launch.build, launch.config, launch.variant))
        held = held if isinstance(held, Occupancy) else None
        row = predict(work, launch.programs, held, launched=(launch.bytes, launch.flops)) | {
            "programs": launch.programs
        }
        rows.append(row | {"configuration": launch.configuration, "occupancy": asdict(held) if held else None})
    return rows, problems


def unwritable(path: Path) -> str | None:
    """Why this file cannot be written, to know it before minutes of work. Creates an empty file."""
    try:
        path.open("a").close()
    except OSError as problem:
        return f"cannot write {path}: {problem.strerror}; give another path"
    return None


def table(works: list[Work], rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'kernel':<16}{'heads':>5} {'type':<4} {'tokens':>6} {'keys':>7} {'inputs':<10}{'MB':>9} {'GFLOP':>8} "
        f"{'floor us':>9} {'predicted':>9}  {'bound':<8}{'regs':>4} {'shared':>6} {'warps/SM':>8} {'waves':>6}"
    ]
    for work, row in zip(works, rows, strict=True):
        held = row["occupancy"]
        sm = (
            f"{held['registers']:>4} {held['shared']:>6} {held['per_sm'] * held['warps']:>8} "
            if held
            else f"{'-':>20} "
        )
        lines.append(
            f"{work.kernel:<16}{work.heads or '-':>5} {work.dtype:<4} {work.tokens:>6} {work.keys:>7} {work.inputs:<10}"
            f"{work.bytes / 1e6:>9.1f} {work.flops / 1e9:>8.1f} {row['floor_us']:>9.2f} {row['predicted_us']:>9.2f}  "
            f"{row['bound']:<8}{sm}{'-' if row['waves'] is None else row['waves']:>6}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--no-compile", action="store_true", help="without occupancy, in a second")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        works = list(cases(args.quick))
    except ImportError as problem:
        sys.exit(f"the model reads the kernels' own tables, which need torch: {problem}")
    if args.json and (why := unwritable(args.json)):
        sys.exit(why)
    if not args.no_compile:
        say("compiling the kernels for sm_120: a minute or two the first time")
    rows, problems = predictions(works, not args.no_compile)
    print(f"{RTX_PRO_6000.name}: lower bounds, not measurements\n{table(works, rows)}")
    for why in problems:
        print(why)
    if args.json:
        args.json.write_text(json.dumps([asdict(w) | r for w, r in zip(works, rows, strict=True)], indent=1))


if __name__ == "__main__":
    main()
