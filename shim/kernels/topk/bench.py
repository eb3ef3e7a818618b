"""Times `topk` against the top-k ops of the installed vLLM on this GPU, checks it, and tunes it.

    python -m shim.kernels.topk.bench [--json FILE]
    python -m shim.kernels.topk.bench --sweep [--json FILE]

Times are medians in us a call, over replays of a graph with one call for each of `SETS` inputs. So L2 is as in a decode
step, where the logits were just written. k is 2,048, rows are full.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from shim.kernels.host import sm_count
from shim.kernels.stopwatch import Run, refusal, time_in_turn_us
from shim.kernels.topk import launch, tune

K, SETS = 2048, 4
DECODE = [(m, n) for m in (1, 4, 8, 64) for n in (8192, 65_536, 131_072)] + [(1, 1 << 20), (8, 1 << 20)]
PREFILL = [(4096, 16_384), (4096, 65_536)]


class Case:
    """Normal logits, or logits like the indexer's: weighted sums over 32 heads of values that are cut at 0."""

    def __init__(self, rows: int, columns: int, kind: str = "normal", seed: int = 0) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        count = SETS if rows * columns < 1 << 26 else 1
        self.logits = [torch.randn(rows, columns, generator=g, device="cuda") for _ in range(count)]
        if kind == "indexer":
            for x in self.logits:
                weights = torch.rand(32, generator=g, device="cuda") / 32
                total = torch.zeros_like(x)
                for weight in weights:
                    total.add_(x.normal_(generator=g).relu_(), alpha=float(weight))
                x.copy_(total.pow_(3))
        self.lengths = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
        self.starts = torch.zeros_like(self.lengths)
        self.out = torch.empty(rows, K, dtype=torch.int32, device="cuda")

    def ours(self, plan: tune.TopKPlan | None = None) -> list[Run]:
        rows, columns = self.logits[0].shape
        plan = plan or tune.plan(rows, columns, sm_count(self.out.device))
        workspace = launch.Workspace.of(plan, rows, self.out.device)
        options: dict[str, Any] = {"out": self.out, "workspace": workspace, "plan": plan}
        return [partial(launch.topk, x, self.lengths, K, **options) for x in self.logits]

    def native(self, name: str) -> list[Run]:
        op, rows = getattr(torch.ops._C, name), len(self.out)
        if name in ("persistent_topk", "cooperative_topk"):
            space = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
            return [partial(op, x, self.lengths, self.out, space, K, x.shape[1]) for x in self.logits]
        if name == "top_k_per_row_decode":
            return [partial(op, x, 1, self.lengths, self.out, rows, *x.stride(), K) for x in self.logits]
        return [partial(op, x, self.starts, self.lengths, self.out, rows, *x.stride(), K) for x in self.logits]

    def agreement(self) -> float:
        """The share of some rows whose last answer has exactly the values of torch.topk."""
        some = torch.linspace(0, len(self.out) - 1, min(64, len(self.out)), device="cuda").long()
        x, chosen = self.logits[-1][some], self.out[some].long()
        unique = (chosen.sort(1).values.diff(dim=1) > 0).all(1) & (chosen >= 0).all(1)
        got = x.gather(1, chosen.clamp(min=0)).sort(1, descending=True).values
        return float(((got == x.topk(K, 1).values).all(1) & unique).float().mean())


NATIVE = ("persistent_topk", "cooperative_topk", "top_k_per_row_decode", "top_k_per_row_prefill")


def compare(rows: int, columns: int, kind: str) -> dict[str, Any]:
    """One line of the table."""
    case = Case(rows, columns, kind)
    plan = tune.plan(rows, columns, sm_count(case.out.device))
    line: dict[str, Any] = {"rows": rows, "columns": columns, "kind": kind, "parts": plan.parts}
    line["ours_us"] = time_in_turn_us(case.ours())
    line["ours_exact"] = case.agreement()
    for name in NATIVE:
        if (rows > 64) != name.endswith("prefill") or (name == "cooperative_topk" and rows > 32):
            continue
        try:
            case.out.fill_(-1)
            line[f"{name}_us"] = time_in_turn_us(case.native(name))
            line[f"{name}_exact"] = case.agreement()
        except Exception as error:  # not in this vLLM, or not for this case: the JSON says so
            line[name] = f"{type(error).__name__}: {error}"[:120]
    others = [line[f"{name}_us"] for name in NATIVE if f"{name}_us" in line]
    line["times_fastest_native"] = line["ours_us"] / min(others) if others else None
    return line


def candidates(base: tune.Config, shared: bool) -> list[tune.Config]:
    """Configurations around one, each with a few changes."""
    changes: list[dict[str, Any]] = [{}]
    changes += [{"tile": t, "stages": s} for t, s in itertools.product((2048, 4096), (1, 3, 4))]
    changes += [{"warps": 8, "registers": 80, "per_sm": 3}, {"warps": 8, "registers": 255, "per_sm": 1},
                {"warps": 16, "registers": 64}, {"warps": 16, "registers": 128, "per_sm": 1},
                {"warps": 32, "registers": 64, "per_sm": 1}, {"write": 4096}]  # fmt: skip
    changes += [{"chunk": 1}, {"chunk": 8}, {"per_sm": 1}] if shared else [{"per_sm": 4, "registers": 64}]
    return list(dict.fromkeys(dataclasses.replace(base, **change) for change in changes))


def compile_first(job: tuple[tune.Config, bool]) -> None:
    """Puts one configuration into Triton's cache on disk. Several processes do this, because one takes seconds."""
    config, shared = job
    logits = torch.zeros(2, 8, device="cuda")
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    try:
        launch.topk(logits, lengths, K, plan=tune.TopKPlan(config, 2 if shared else 1, 1))
    except Exception:  # `sweep` will report it
        return


def sweep() -> list[dict[str, Any]]:
    begin = time.monotonic()
    shared, whole = tune.SHARED[4096], tune.WHOLE[4096]
    jobs = [(c, True) for c in candidates(shared, True)] + [(c, False) for c in candidates(whole, False)]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_first, jobs))
    print(f"{len(jobs)} configurations compiled in {time.monotonic() - begin:.0f} s", flush=True)
    lines: list[dict[str, Any]] = []
    for rows, columns in [(1, 65_536), (1, 131_072), (8, 131_072), (64, 131_072), (64, 8192), *PREFILL]:
        case = Case(rows, columns)
        sms = sm_count(case.out.device)
        found = []
        for config, is_shared in jobs:
            plan = tune.plan_for(config, config, rows, columns, sms)
            if is_shared != (plan.parts > 1):
                continue
            parts = {plan.parts, max(2, plan.parts // 2), 2 * plan.parts} if is_shared else {1}
            for count in sorted(parts):
                plan = dataclasses.replace(plan, parts=count)
                try:
                    us = time_in_turn_us(case.ours(plan))
                except Exception as problem:
                    print(f"  {plan}: {type(problem).__name__}: {problem}"[:160], flush=True)
                    break
                assert case.agreement() == 1, plan
                found.append((us, plan))
        found.sort(key=lambda f: f[0])
        print(f"{rows} x {columns}: {len(found)} tried", flush=True)
        for us, plan in found[:6]:
            print(f"  {us:8.1f} us  {plan}", flush=True)
        lines += [{"rows": rows, "columns": columns, "us": us, "plan": str(plan)} for us, plan in found]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if problem := refusal():
        parser.exit(1, f"{problem}\n")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if args.sweep:
        results = sweep()
    else:
        try:
            import vllm._custom_ops  # noqa: F401  (registers the ops)
        except ImportError as error:
            print(f"no vLLM to compare with: {error}", flush=True)
        names = " ".join(f"{name.replace('top_k_per_row_', 'row_'):>16} exact" for name in NATIVE)
        print(f"{'rows':>5} {'columns':>8} kind    {'parts':>5} {'ours':>8} exact {names}  ratio")
        results = []
        for (rows, columns), kind in itertools.product(DECODE + PREFILL, ("normal", "indexer")):
            line = compare(rows, columns, kind)
            results.append(line)
            nan = float("nan")
            others = " ".join(f"{line.get(f'{n}_us', nan):16.1f} {line.get(f'{n}_exact', nan):5.2f}" for n in NATIVE)
            print(
                f"{rows:>5} {columns:>8} {kind:<7} {line['parts']:>5} {line['ours_us']:8.1f} {line['ours_exact']:5.2f} "
                f"{others} {line['times_fastest_native'] or nan:6.2f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
