"""Times `sparse_mla` against the native kernels of the installed vLLM on this GPU, checks it, and tunes it.

    python -m shim.kernels.sparse_mla.bench --json FILE [--heads 8 64] [--tokens 1 8 64 512 4096] [--kv bf16 fp8]
    python -m shim.kernels.sparse_mla.bench --check
    python -m shim.kernels.sparse_mla.bench --tune --heads 8 --tokens 1 64 4096 --kv bf16

Times are medians of CUDA-event pairs around replays of a captured graph. `SETS` query and index sets take turns, on a
cache larger than L2, as in a layer of a decode step (FlashInfer's way). The ceiling is the rate of a plain gather.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton

from shim.kernels.host import sm_count
from shim.kernels.sparse_mla import kernel, launch, native, reference, tune
from shim.kernels.sparse_mla.overlap import overlapping_sets
from shim.kernels.stopwatch import Run, refusal, time_us

COLUMNS, PAGE, ROWS, SCALE = 2048, 64, 262_144, 576**-0.5
SETS = 4


class Case:
    """Random queries and indices over one request of `ROWS` rows, whose blocks are shuffled.

    keep: the share of its indices that a token has of its neighbour (`overlap.py`); None: uniformly random indices
    """

    def __init__(self, tokens: int, heads: int, kv: str, seed: int = 0, keep: float | None = None) -> None:
        self.tokens, self.heads, self.kv = tokens, heads, kv
        g = torch.Generator("cuda").manual_seed(seed)
        rows = torch.randn(ROWS, 576, generator=g, device="cuda", dtype=torch.bfloat16)
        rows = reference.pack_fp8_ds_mla(rows) if kv == "fp8" else rows
        self.cache = rows.view(ROWS // PAGE, PAGE, -1)
        self.table = torch.randperm(ROWS // PAGE, generator=g, device="cuda").int()[None]
        self.req_ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.tensor([ROWS], dtype=torch.int32, device="cuda")
        shape = (SETS, tokens, heads, 576)
        self.q = torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)
        if keep is None:
            self.topk = torch.randint(ROWS, (SETS, tokens, COLUMNS), generator=g, device="cuda", dtype=torch.int32)
        else:
            some = SETS if tokens <= 64 else 1  # more would not fit into L2 anyway, and take seconds
            self.topk = overlapping_sets(some, tokens, COLUMNS, ROWS, keep, seed).to("cuda").repeat(SETS // some, 1, 1)
        self.slots = (self.table[0, (self.topk // PAGE).long()] * PAGE + self.topk % PAGE).int()
        self.out = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(tokens, heads, device="cuda")
        self.bytes = tokens * COLUMNS * self.cache.shape[-1] * self.cache.element_size()

    def ours(self, plan: tune.AttentionPlan | None = None, workspace: launch.Workspace | None = None) -> list[Run]:
        def one(s: int) -> Run:
            return lambda: launch.sparse_mla(
                self.q[s], self.cache, self.topk[s], self.req_ids, self.table, self.seq_lens, SCALE,
                self.out, self.lse, workspace, self.tokens, plan,
            )  # fmt: skip

        return [one(s) for s in range(SETS)]

    def gathers(self) -> list[Run]:
        def one(s: int) -> Run:
            return lambda: kernel.gather[(len(out),)](
                words, self.slots[s], out, width, triton.next_power_of_2(width), block, num_warps=4
            )

        block = 16
        words = self.cache.view(torch.int32)
        width = words.shape[-1]
        out = torch.empty(self.tokens * COLUMNS // block, dtype=torch.int32, device="cuda")
        return [one(s) for s in range(SETS)]

    def error(self, got: torch.Tensor, s: int = 0, count: int = 8) -> float:
        """The relative error of `got` against the reference in float64, on a few tokens."""
        some = torch.linspace(0, self.tokens - 1, min(count, self.tokens), device="cuda").long()
        want, want_lse = reference.sparse_mla(
            self.q[s][some], self.cache, self.topk[s][some], self.req_ids[some], self.table, SCALE, torch.float64
        )
        if got is self.out:
            lse_error = ((self.lse[some] - want_lse).abs() / (1 + want_lse.abs())).max().item()
            assert lse_error < 1e-5, f"lse is off by {lse_error:.2e}"
        return float((got[some].double() - want).norm() / want.norm())


def compare(tokens: int, heads: int, kv: str, keep: float | None = None) -> dict[str, Any]:
    """One line of the table: ours, each native kernel that takes this case, and the gather alone."""
    case = Case(tokens, heads, kv, keep=keep)
    sms = sm_count(case.q.device)
    plan = tune.configuration(tokens, heads, case.cache.dtype, sms, large=launch.is_large(case.q.device))
    workspace = launch.Workspace(max(tokens, 1), heads, case.cache.dtype, "cuda", positions=ROWS)
    row: dict[str, Any] = {"tokens": tokens, "heads": heads, "kv": kv, "keep": keep, "plan": str(plan)}
    runs = case.ours(workspace=workspace)
    case.out.fill_(torch.nan)
    runs[0]()
    row["error"] = case.error(case.out)
    assert row["error"] < 1e-2, row
    ours = case.out.clone()
    row["ours_us"] = time_us(runs)
    row["gather_us"] = time_us(case.gathers())
    row["gather_TB_s"] = case.bytes / row["gather_us"] / 1e6
    row["of_ceiling"] = row["gather_us"] / row["ours_us"]
    for name, make in native.KERNELS.items():
        try:
            runs = [make(case.q[s], case.cache, case.slots[s], SCALE) for s in range(SETS)]
            result = runs[0]()
        except Exception as error:  # not in this vLLM, or not for this case: the table says so
            row[name] = f"{type(error).__name__}: {error}"[:120]
            continue
        row[f"{name}_error"] = case.error(result)
        row[f"{name}_difference"] = ((result.double() - ours.double()).norm() / ours.double().norm()).item()
        try:
            row[f"{name}_us"] = time_us(runs)
        except Exception:  # a kernel that cannot be captured
            torch.cuda.synchronize()
            row[f"{name}_us"] = time_us(runs, graph=False)
            row[f"{name}_eager"] = True
    natives = [row[k] for k in row if k.endswith("_us") and k not in ("ours_us", "gather_us")]
    row["times_fastest_native"] = row["ours_us"] / min(natives) if natives else None
    return row


def neighbours(config: tune.Config, fp8: bool) -> Iterator[tune.Config]:
    """Configurations around one. `tune_case` reports and skips those that do not compile or fit."""
    tiles = (64,) if fp8 else (64, 128)
    heads = sorted({config.block_n, max(8, config.block_n // 2), config.block_n * 2}) if config.block_n > 8 else (8,)
    for block_k, block_n, tile, stages, warps in itertools.product((16, 32, 64), heads, tiles, (4, 7), (2, 4, 8)):
        if tile // warps >= 16 and block_k * block_n <= 2048:
            yield dataclasses.replace(config, block_k=block_k, block_n=block_n, tile=tile, stages=stages, warps=warps)


def compile_first(job: tuple[tune.Config, int, str]) -> None:
    """Puts one configuration into Triton's cache on disk. Several processes do this, because one takes seconds."""
    config, heads, kv = job
    q = torch.ones(1, heads, 576, dtype=torch.bfloat16, device="cuda")
    width, dtype = (656, torch.uint8) if kv == "fp8" else (576, torch.bfloat16)
    cache = torch.zeros(1, PAGE, width, dtype=dtype, device="cuda")
    one = torch.ones(1, 1, dtype=torch.int32, device="cuda")
    for splits in (1, 2):
        try:
            topk = torch.full((1, COLUMNS), -1, dtype=torch.int32, device="cuda")
            launch.sparse_mla(q, cache, topk, one[0] - 1, one - 1, one[0], 1.0, plan=tune.AttentionPlan(config, splits))
        except Exception:  # `tune_case` will report it
            return


def tune_case(tokens: int, heads: int, kv: str, deadline: float) -> list[tuple[float, tune.AttentionPlan]]:
    case = Case(tokens, heads, kv)
    sms = sm_count(case.q.device)
    found: list[tuple[float, tune.AttentionPlan]] = []
    default = tune.configuration(tokens, heads, case.cache.dtype, sms, large=launch.is_large(case.q.device))
    base = default.config
    configs = [base, *(c for c in neighbours(base, kv == "fp8") if c != base)]
    for config in configs:
        programs = tokens * -(-heads // config.block_n)
        tiles = COLUMNS // config.block_k
        counts = {tune.splits(programs, tiles, sms * per_sm, sms) for per_sm in (1, 2, 3, 4)} if tokens < 4096 else {1}
        for splits in sorted(counts):
            if time.monotonic() > deadline:
                return sorted(found, key=lambda f: f[0])
            plan = tune.AttentionPlan(config, splits)
            try:
                case.out.fill_(torch.nan)
                runs = case.ours(plan)
                runs[0]()
                error = case.error(case.out, count=2)
                assert error < 1e-2, f"error {error:.1e}"
                found.append((time_us(runs), plan))
            except Exception as problem:
                print(f"  {plan}: {type(problem).__name__}: {problem}"[:160], flush=True)
                break
    return sorted(found, key=lambda f: f[0])


def check() -> None:
    """A quick correctness sweep. Raises on the first failure."""
    for tokens, heads, kv in itertools.product((1, 3, 64, 600), (8, 16, 32, 64, 128), ("bf16", "fp8")):
        case = Case(tokens, heads, kv, seed=tokens + heads)
        case.topk[0, :, 1000:] = -1
        case.topk[0, ::2, ::3] = -1
        case.out.fill_(torch.nan)
        case.lse.fill_(torch.nan)
        case.ours()[0]()
        error = case.error(case.out)
        assert error < 1e-2 and not case.out.isnan().any() and not case.lse.isnan().any(), (tokens, heads, kv, error)
        print(f"T {tokens:>4}  heads {heads:>3}  {kv}: {error:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--kv", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--seconds", type=float, default=140, help="of --tune, in all")
    args = parser.parse_args()
    if problem := refusal():
        parser.exit(1, f"{problem}\n")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    cases = list(itertools.product(args.heads, args.kv, args.tokens))
    results: list[Any] = []
    if args.check:
        check()
    elif args.tune:
        start = time.monotonic()
        bases = [(tune.config_for(n, torch.uint8 if kv == "fp8" else torch.bfloat16), n, kv)
                 for n, kv in itertools.product(args.heads, args.kv)]  # fmt: skip
        jobs = [(config, n, kv) for base, n, kv in bases for config in {base, *neighbours(base, kv == "fp8")}]
        with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_first, jobs))
        print(f"{len(jobs)} configurations compiled in {time.monotonic() - start:.0f} s", flush=True)
        for i, (heads, kv, tokens) in enumerate(cases):
            found = tune_case(tokens, heads, kv, start + args.seconds * (i + 1) / len(cases))
            print(f"T {tokens}, heads {heads}, {kv}: {len(found)} tried", flush=True)
            for us, plan in found[:6]:
                print(f"  {us:8.1f} us  {plan}", flush=True)
            results.append([{"us": us, "plan": str(plan), "tokens": tokens, "heads": heads} for us, plan in found])
    else:
        for heads, kv, tokens in cases:
            results.append(compare(tokens, heads, kv))
            print(json.dumps(results[-1]), flush=True)
        print(
            f"{'T':>5} heads kv   {'ours':>8} {'gather':>8} {'of it':>6} {'FA3':>8} {'FlashMLA':>8} {'ratio':>6}  error"
        )
        for r in results:
            times = [f"{r.get(f'{name}_us', float('nan')):8.1f}" for name in native.KERNELS]
            ratio = r["times_fastest_native"] or float("nan")
            print(f"{r['tokens']:>5} {r['heads']:>5} {r['kv']:<4} {r['ours_us']:8.1f} {r['gather_us']:8.1f} "
                  f"{r['of_ceiling']:6.2f} {' '.join(times)} {ratio:6.2f}  {r['error']:.1e}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
