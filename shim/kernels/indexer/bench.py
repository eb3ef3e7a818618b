"""Times the indexer's kernels against the native ones of the installed vLLM on this GPU, checks them, and sweeps.

    python -m shim.kernels.indexer.bench [--json FILE] [--heads 32] [--only prefill | paged]
    python -m shim.kernels.indexer.bench --sweep      # configurations around tune's, best first

Times are medians of CUDA-event pairs around replays of a captured graph; L2 is overwritten before each
(`stopwatch.time_us`). Native is DeepGEMM through `vllm.utils.deep_gemm`. Its schedule of a decode step is not timed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from shim.kernels.host import sm_count
from shim.kernels.indexer import launch, reference, tune
from shim.kernels.stopwatch import refusal, time_us

PAGES = 64 * 131_072 // 64  # 64 requests of 128K keys: 1.1 GB
Run = Callable[[], torch.Tensor]
Config = tune.Prefill | tune.Paged
FP8 = torch.float8_e4m3fn


def native_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
) -> Run | None:
    """vLLM's prefill kernel on the arguments of `launch.mqa_logits`, or None. That of 0.33.0 is compressed."""
    function = _native("fp8_fp4_mqa_logits", "fp8_mqa_logits")
    if function is None:
        return None
    names = inspect.signature(function).parameters
    last: dict[str, Any] = {"clean_logits": False} if "clean_logits" in names else {"max_seqlen_k": k.shape[0]}
    query = (q, None) if function.__name__.startswith("fp8_fp4") else q
    return lambda: function(query, (k, k_scale), weights, ks, ke, **last)


def native_paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
) -> Run | None:
    """vLLM's decode kernel on the arguments of `launch.paged_mqa_logits` (lengths [B]), or None."""
    function = _native("fp8_fp4_paged_mqa_logits", "fp8_paged_mqa_logits")
    if function is None:
        return None
    deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
    two_dimensional = function.__name__.startswith("fp8_fp4")
    next_n = q.shape[1]
    lens = context_lens
    if two_dimensional:  # each row's own count
        lens = context_lens[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32, device=q.device)
    metadata = deep_gemm.get_paged_mqa_logits_metadata(lens, reference.BLOCK, sm_count(q.device))
    last: dict[str, Any] = {"max_model_len": max_len}
    if "clean_logits" in inspect.signature(function).parameters:
        last["clean_logits"] = False
    query = (q, None) if two_dimensional else q
    return lambda: function(query, cache.unsqueeze(2), weights, lens, block_table, metadata, **last)


def _native(*names: str) -> Any:
    try:
        deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
    except ImportError:
        return None
    if not deep_gemm.has_deep_gemm():
        return None
    return next((function for name in names if (function := getattr(deep_gemm, name, None))), None)


class PrefillCase:
    """The last `queries` tokens of a prompt of `keys`, causal, or all of them against all keys."""

    def __init__(self, queries: int, keys: int, heads: int, causal: bool) -> None:
        g = torch.Generator("cuda").manual_seed(0)
        self.name = f"prefill {queries:>5} x {keys:>6} {'causal' if causal else 'full  '}"
        q = torch.randn(queries, heads, 128, generator=g, device="cuda").to(FP8)
        k = torch.randn(keys, 128, generator=g, device="cuda").to(FP8)
        scale = torch.rand(keys, generator=g, device="cuda") + 0.01
        weights = torch.randn(queries, heads, generator=g, device="cuda")
        ks = torch.zeros(queries, dtype=torch.int32, device="cuda")
        ke = keys - queries + 1 + torch.arange(queries, dtype=torch.int32, device="cuda") if causal else ks + keys
        self.arguments = (q, k, scale, weights, ks, ke)
        self.visible = ke
        self.work = 256 * heads * int(ke.sum()) / 1e6  # divided by us: TFLOP/s
        self.unit = "TFLOP/s"
        self.out = torch.empty(queries, keys, device="cuda")

    def ours(self, config: Any = None) -> Run:
        return lambda: launch.mqa_logits(*self.arguments, self.out, config=config)

    def native(self) -> Run | None:
        return native_prefill(*self.arguments)

    def truth(self, rows: torch.Tensor) -> torch.Tensor:
        q, k, scale, weights, ks, ke = self.arguments
        return reference.mqa_logits(q[rows], k, scale, weights[rows], ks[rows], ke[rows], torch.float64)


class PagedCase:
    """`batch` requests of `keys` keys in shuffled blocks of one large cache."""

    cache: torch.Tensor

    def __init__(self, batch: int, keys: int, next_n: int, heads: int) -> None:
        g = torch.Generator("cuda").manual_seed(0)
        self.name = f"decode B {batch:>2} x {keys:>6}, next_n {next_n}"
        if not hasattr(PagedCase, "cache"):
            PagedCase.cache = self.random_cache(g)
        q = torch.randn(batch, next_n, heads, 128, generator=g, device="cuda").to(FP8)
        weights = torch.randn(batch * next_n, heads, generator=g, device="cuda")
        lens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        table = torch.randperm(PAGES, generator=g, device="cuda")[: batch * keys // 64].int().view(batch, -1)
        self.arguments = (q, self.cache, weights, lens, table, keys)
        self.visible = (lens[:, None] - next_n + 1 + torch.arange(next_n, device="cuda")).flatten()
        self.work = batch * keys * reference.FP8_TOKEN_BYTES / 1e3  # divided by us: GB/s
        self.unit = "GB/s"
        self.out = torch.empty(batch * next_n, keys, device="cuda")

    @staticmethod
    def random_cache(g: torch.Generator) -> torch.Tensor:
        cache = torch.empty(PAGES, 64, reference.FP8_TOKEN_BYTES, dtype=torch.uint8, device="cuda")
        for i in range(0, PAGES, PAGES // 16):
            part = cache[i : i + PAGES // 16]
            k = torch.randn(len(part), 64, 128, generator=g, device="cuda").to(FP8)
            part.copy_(reference.pack_blocks(k, torch.rand(len(part), 64, generator=g, device="cuda") + 0.01))
        return cache

    def ours(self, config: Any = None) -> Run:
        return lambda: launch.paged_mqa_logits(*self.arguments, self.out, config)

    def native(self) -> Run | None:
        return native_paged(*self.arguments)

    def truth(self, rows: torch.Tensor) -> torch.Tensor:
        q, cache, weights, lens, table, keys = self.arguments
        next_n = q.shape[1]
        some = torch.tensor(sorted(set((rows // next_n).tolist())), device="cuda")
        all_rows = (some[:, None] * next_n + torch.arange(next_n, device="cuda")).flatten()
        full = reference.paged_mqa_logits(
            q[some], cache, weights[all_rows], lens[some], table[some], keys, torch.float64
        )
        return full[torch.searchsorted(all_rows, rows)]


Case = PrefillCase | PagedCase


def error(case: Case, got: torch.Tensor, count: int = 4) -> float:
    """Largest difference from float64 on the valid columns of a few rows, relative to the row's largest value."""
    rows = torch.linspace(0, got.shape[0] - 1, min(count, got.shape[0]), device="cuda").long()
    want = case.truth(rows)
    valid = want > -torch.inf
    difference = torch.where(valid, got[rows][:, : want.shape[1]] - want, 0)
    return float((difference.abs().amax(1) / torch.where(valid, want, 0).abs().amax(1)).max())


def agreement(case: Case, ours: torch.Tensor, native: torch.Tensor) -> float:
    """As `error`, of ours against native, on every valid column."""
    worst = 0.0
    for i in range(0, len(ours), 256):  # in parts, as the logits are up to 1 GB
        a, b = ours[i : i + 256], native[i : i + 256, : ours.shape[1]]
        valid = torch.arange(a.shape[1], device="cuda") < case.visible[i : i + 256, None]
        scale = torch.where(valid, a, 0).abs().amax(1)
        worst = max(worst, float((torch.where(valid, a - b, 0).abs().amax(1) / scale).max()))
    return worst


def compare(case: Case) -> dict[str, Any]:
    """One line of the table."""
    case.out.fill_(torch.nan)
    case.ours()()
    row: dict[str, Any] = {"case": case.name, "error": error(case, case.out)}
    assert row["error"] < 1e-3, row
    row["ours_us"] = time_us([case.ours()])
    row["rate"] = f"{case.work / row['ours_us']:.0f} {case.unit}"
    try:
        native = case.native()
        if native is not None:
            row["difference"] = agreement(case, case.out, native())
            row["native_us"] = time_us([native])
            row["ratio"] = row["ours_us"] / row["native_us"]
    except Exception as problem:  # not for this card or case: the table says so
        row["native"] = f"{type(problem).__name__}: {problem}"[:100]
    return row


def prefill_configs() -> Iterable[tune.Prefill]:
    for block_n, columns, stages, warps in itertools.product((64, 128, 256), (32, 64, 128, 256), (2, 3, 4), (4, 8)):
        if 16 <= block_n * columns // (warps * 32) <= 128:  # accumulators of a thread
            yield tune.Prefill(block_n, columns, 128, stages, warps)
            yield tune.Prefill(block_n, columns, 8192, stages, warps, keep="queries")


def paged_configs() -> Iterable[tune.Paged]:
    for stages, warps, per_sm in itertools.product((3, 5, 7, 9), (2, 4), (2, 4, 6, 8)):
        yield tune.Paged(128, stages, warps, per_sm)


def compile_first(job: tuple[Config, int]) -> None:
    """Puts one configuration into Triton's cache on disk. Several processes do this, because one takes seconds."""
    config, heads = job
    try:
        q = torch.zeros(1, 1, heads, 128, device="cuda").to(FP8)
        one, w = torch.ones(1, 1, dtype=torch.int32, device="cuda"), torch.ones(1, heads, device="cuda")
        if isinstance(config, tune.Prefill):
            launch.mqa_logits(q[0], q[0, 0, :1], w[0, :1], w, one[0] - 1, one[0], config=config)
        else:
            cache = torch.zeros(1, 64, reference.FP8_TOKEN_BYTES, dtype=torch.uint8, device="cuda")
            launch.paged_mqa_logits(q, cache, w, one[0], one - 1, 64, config=config)
    except Exception:  # `sweep` will report it
        return


def sweep(case: Case, configs: Iterable[Config]) -> list[dict[str, Any]]:
    """Times every configuration that compiles and is right; the fastest is first."""
    found = []
    for config in configs:
        try:
            case.out.fill_(torch.nan)
            case.ours(config)()
            assert error(case, case.out, count=2) < 1e-3, "wrong"
            found.append({"case": case.name, "us": time_us([case.ours(config)]), "config": str(config)})
        except Exception as problem:
            print(f"  {config}: {type(problem).__name__}: {problem}"[:140], flush=True)
    return sorted(found, key=lambda row: row["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heads", type=int, default=32, choices=tune.HEADS)
    parser.add_argument("--only", choices=["prefill", "paged"])
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if problem := refusal():
        parser.exit(1, f"{problem}\n")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    results: list[dict[str, Any]] = []
    if args.sweep:
        start = time.monotonic()
        every: list[tuple[list[Config], list[Callable[[], Case]]]] = []
        if args.only != "paged":
            every.append((list(prefill_configs()), [partial(PrefillCase, 4096, 65536, args.heads, False)]))
        if args.only != "prefill":
            every.append((list(paged_configs()), [partial(PagedCase, b, 65536, 1, args.heads) for b in (1, 8, 64)]))
        jobs = [(config, args.heads) for configs, _ in every for config in configs]
        with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_first, jobs))
        print(f"{len(jobs)} configurations compiled in {time.monotonic() - start:.0f} s", flush=True)
        for configs, makes in every:
            for make in makes:
                found = sweep(make(), configs)
                results += found
                for row in found[:8]:
                    print(f"{row['case']}  {row['us']:8.1f} us  {row['config']}", flush=True)
    else:
        print(f"{'case':<32} {'ours us':>9} {'':>13} {'native us':>9} {'ratio':>6}  {'error':>8} difference")
        cases: list[Callable[[], Case]] = []
        if args.only != "paged":
            shapes = itertools.product((1024, 4096), (16384, 65536), (True, False))
            cases += [partial(PrefillCase, m, n, args.heads, causal) for m, n, causal in shapes]
        if args.only != "prefill":
            requests = itertools.product((1, 8, 64), (8192, 65536, 131072), (1, 2))
            cases += [partial(PagedCase, b, n, next_n, args.heads) for b, n, next_n in requests]
        for make in cases:
            row = compare(make())
            results.append(row)
            nan = float("nan")
            print(
                f"{row['case']:<32} {row['ours_us']:9.1f} {row['rate']:>13} {row.get('native_us', nan):9.1f} "
                f"{row.get('ratio', nan):6.2f}  {row['error']:.1e} {row.get('difference', nan):.1e} "
                f"{row.get('native', '')}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
