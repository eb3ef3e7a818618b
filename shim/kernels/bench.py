"""Measures every kernel on this GPU, and the native ones of the installed vLLM. Writes one JSON file and a plot.

    python -m shim.kernels.bench [--quick] [--only KERNEL ...] [--out glm5-shim-bench.json]
    python -m shim.kernels.bench --plot glm5-shim-bench.json      # draws again, measures nothing

The benches of the op folders measure the times: medians of CUDA-event pairs around replays of captured graphs. L2 is
overwritten before each replay (top-k: inputs in turn). Our kernel and the native ones run on the same inputs, and every
answer of ours is checked. A record has the reason if a native kernel is missing or fails, or if ours fails. The file is
written after every case.

{"schema", "created", "machine": {..}, "ceilings": {..}, "model_card": {..}, "records": [..], "problems": [..]}
`ceilings` are measured: a copy, a plain gather of cache rows, dense matrix products of torch. A record is `Record`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import shim
from shim.kernels import roofline
from shim.kernels.stopwatch import refusal
from shim.process import say

SCHEMA = 1
PLOT_HINT = "no plot: pip install 'glm5-shim[bench]' (matplotlib), then python -m shim.kernels.bench --plot {}"


@dataclass(frozen=True)
class Record:
    """One case. Times are in us, or None."""

    kernel: str
    heads: int | None
    tokens: int  # queries, requests or rows
    keys: int
    dtype: str
    inputs: str
    keep: float | None  # the share of its neighbour's index set that a token has too
    ours_us: float | None
    native_us: float | None  # the fastest of `natives`
    native: str | None
    natives: dict[str, float]
    missing: dict[str, str]  # native kernels that did not run, with the reason
    times_native: float | None  # ours_us / native_us
    error: float | None  # of ours, relative to float64; top-k: the share of rows that are not exact
    bytes: float  # counted: `roofline.Work`
    flops: float
    ceiling_us: float | None  # the time of the bytes or the FLOPs at this card's measured ceiling
    ceiling: str | None  # gather | copy | mma
    of_ceiling: float | None  # ceiling_us / ours_us; above 1 if rows are shared or come from L2
    configuration: str | None  # from tune.py, on this card
    problem: str | None
    floor_us: float  # this and the rest: of an RTX PRO 6000, from `roofline`, not measured
    predicted_us: float
    predicted_bound: str
    predicted_configuration: str
    occupancy: dict[str, Any] | None


@dataclass(frozen=True)
class Measured:
    """What an op's bench found for one case."""

    ours_us: float
    natives: dict[str, float]
    missing: dict[str, str]
    error: float
    configuration: str
    gather_us: float | None = None


def _sparse_mla(work: roofline.Work) -> Measured:
    from shim.kernels.sparse_mla import bench, native

    assert work.heads is not None
    row = bench.compare(work.tokens, work.heads, work.dtype, work.keep)
    natives = {name: row[f"{name}_us"] for name in native.KERNELS if f"{name}_us" in row}
    missing = {name: row[name] for name in native.KERNELS if name in row}
    return Measured(row["ours_us"], natives, missing, row["error"], row["plan"], row["gather_us"])


def _indexer(work: roofline.Work) -> Measured:
    import torch

    from shim.kernels.indexer import bench, tune

    assert work.heads is not None
    capability = torch.cuda.get_device_capability()
    case: bench.Case
    if work.kernel == "indexer_prefill":
        case = bench.PrefillCase(work.tokens, work.keys, work.heads, work.inputs == "causal")
        configuration = str(tune.prefill(work.heads, capability))
    else:
        case = bench.PagedCase(work.tokens, work.keys, 1, work.heads)
        configuration = str(tune.paged(capability))
    row = bench.compare(case)
    natives = {"deep_gemm": row["native_us"]} if "native_us" in row else {}
    missing = {} if natives else {"deep_gemm": row.get("native", "no vLLM, or it has no DeepGEMM")}
    return Measured(row["ours_us"], natives, missing, row["error"], configuration)


def _topk(work: roofline.Work) -> Measured:
    import torch

    from shim.kernels import host
    from shim.kernels.topk import bench, tune

    row = bench.compare(work.tokens, work.keys, work.inputs)
    if row["ours_exact"] < 1:
        raise ValueError(f"only {row['ours_exact']:.0%} of the rows are exact")
    natives = {name: row[f"{name}_us"] for name in bench.NATIVE if f"{name}_us" in row}
    missing = {name: row[name] for name in bench.NATIVE if name in row}
    plan = tune.plan(work.tokens, work.keys, host.sm_count(torch.device("cuda")))
    return Measured(row["ours_us"], natives, missing, 1 - row["ours_exact"], str(plan))


_BY_KERNEL = {"sparse_mla": _sparse_mla, "indexer_prefill": _indexer, "indexer_paged": _indexer, "topk": _topk}


def measure(work: roofline.Work) -> Measured:
    import torch

    torch.cuda.empty_cache()
    return _BY_KERNEL[work.kernel](work)


def record(
    work: roofline.Work, prediction: dict[str, Any], got: Measured | Exception, ceilings: dict[str, Any]
) -> Record:
    """`ceilings`: "copy_gb_s", and "mma_tflop_s" by type; None if it could not be measured."""
    failed = isinstance(got, Exception)
    found = None if isinstance(got, Exception) else got
    native = min(found.natives, key=found.natives.__getitem__, default=None) if found else None
    native_us = found.natives[native] if found and native else None
    limits: dict[str, float] = {}
    if found and found.gather_us:
        limits["gather"] = found.gather_us
    elif ceilings.get("copy_gb_s"):
        limits["copy"] = work.bytes / ceilings["copy_gb_s"] / 1e3
    rate = (ceilings.get("mma_tflop_s") or {}).get(work.mma)
    if rate:
        limits["mma"] = work.flops / rate / 1e6
    ceiling = max(limits, key=limits.__getitem__, default=None)
    ceiling_us = limits[ceiling] if ceiling else None
    return Record(
        kernel=work.kernel, heads=work.heads, tokens=work.tokens, keys=work.keys, dtype=work.dtype,
        inputs=work.inputs, keep=work.keep,
        ours_us=found.ours_us if found else None, native_us=native_us, native=native,
        natives=found.natives if found else {}, missing=found.missing if found else {},
        times_native=found.ours_us / native_us if found and native_us else None,
        error=found.error if found else None, bytes=work.bytes, flops=work.flops,
        ceiling_us=ceiling_us, ceiling=ceiling,
        of_ceiling=ceiling_us / found.ours_us if found and ceiling_us else None,
        configuration=found.configuration if found else None,
        problem=f"{type(got).__name__}: {got}".splitlines()[0][:200] if failed else None,
        floor_us=prediction["floor_us"], predicted_us=prediction["predicted_us"],
        predicted_bound=prediction["bound"], predicted_configuration=prediction["configuration"],
        occupancy=prediction["occupancy"],
    )  # fmt: skip


def run(
    works: list[roofline.Work],
    predictions: list[dict[str, Any]],
    document: dict[str, Any],
    measure: Callable[[roofline.Work], Measured],
    done: Callable[[], None],
) -> None:
    """Measures each work, adds its record to the document, and calls `done`."""
    for work, prediction in zip(works, predictions, strict=True):
        got: Measured | Exception
        try:
            got = measure(work)
        except Exception as problem:  # it goes into the record, and the next case may work
            got = problem
        row = record(work, prediction, got, document["ceilings"])
        document["records"].append(asdict(row))
        if isinstance(got, Measured) and got.gather_us and work.keep is None:
            gathered = work.tokens * roofline.TOPK * roofline.ROW_BYTES[work.dtype] / got.gather_us / 1e3
            best: dict[str, float] = document["ceilings"].setdefault("gather_gb_s", {})
            best[work.dtype] = round(max(best.get(work.dtype, 0.0), gathered), 1)
        print(line(row), flush=True)
        done()


def line(row: Record) -> str:
    where = f"{row.kernel:<16}{row.heads or '-':>3} {row.dtype:<4} {row.tokens:>5} x {row.keys:>7} {row.inputs:<10}"
    if row.ours_us is None:
        return f"{where} {row.problem}"
    native = f"{row.native_us:9.1f} {row.native}, {row.times_native:.2f}" if row.native_us else f"{'-':>9}"
    share = f"{row.of_ceiling:.2f} of {row.ceiling}" if row.of_ceiling else "-"
    return f"{where}{row.ours_us:9.1f} us  {share:<15} native {native}"


def ceilings() -> tuple[dict[str, Any], list[str]]:
    """The best rates of this card: a copy of 1 GiB, and torch's dense products of 8,192^3. And the problems."""
    import torch

    from shim.kernels.stopwatch import time_us

    found: dict[str, Any] = {"copy_gb_s": None, "mma_tflop_s": {"bf16": None, "fp8": None}}
    problems = []
    n = 8192

    def copy() -> None:
        # a kernel copies: the driver's own copy reached 2.7 TB/s on an H200 whose memory reaches 4.2
        a, b = torch.zeros(2, 1 << 28, dtype=torch.int32, device="cuda")
        found["copy_gb_s"] = round(8 * a.numel() / time_us([lambda: torch.bitwise_not(a, out=b)]) / 1e3, 1)

    def bf16() -> None:
        a, b = torch.randn(2, n, n, dtype=torch.bfloat16, device="cuda")
        found["mma_tflop_s"]["bf16"] = round(2 * n**3 / time_us([lambda: a @ b]) / 1e6, 1)

    def fp8() -> None:
        a, b = torch.randn(2, n, n, device="cuda").to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        product = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
        found["mma_tflop_s"]["fp8"] = round(2 * n**3 / time_us([product]) / 1e6, 1)

    for what in (copy, bf16, fp8):
        try:
            what()
        except Exception as problem:
            problems.append(f"ceiling {what.__name__} unknown: {type(problem).__name__}: {problem}".splitlines()[0])
    return found, problems


def machine() -> dict[str, Any]:
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count, "memory_bytes": properties.total_memory, "driver": driver(),
        "cuda": torch.version.cuda, "torch": torch.__version__, "triton": triton.__version__,
        "vllm": version("vllm"), "shim": shim.__version__, "python": platform.python_version(),
    }  # fmt: skip


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def without_natives() -> str | None:
    """Registers vLLM's native kernels with torch, or returns why there are none to compare with."""
    try:
        importlib.import_module("vllm._custom_ops")
    except Exception as problem:
        return f"no native kernels to compare with: {type(problem).__name__}: {problem}".splitlines()[0]
    return None


def plot(document: dict[str, Any], path: Path) -> None:
    """Draws a panel for each kernel, heads and cache: us against tokens, ours solid, the fastest native dashed.

    ImportError without matplotlib."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in document["records"]:
        if row["ours_us"] is None:
            continue
        mla = row["kernel"] == "sparse_mla"
        panel = f"sparse_mla, {row['heads']} heads, {row['dtype']}" if mla else row["kernel"]
        label = row["inputs"] if mla else f"{row['keys']:,} keys, {row['inputs']}"
        panels.setdefault(panel, {}).setdefault(label, []).append(row)
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(6 * columns, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (panel, lines) in zip(axes, panels.items(), strict=False):
        for label, points in lines.items():
            points = sorted(points, key=lambda row: row["tokens"])
            (drawn,) = axis.plot([r["tokens"] for r in points], [r["ours_us"] for r in points], "o-", label=label)
            natives = [(r["tokens"], r["native_us"]) for r in points if r["native_us"] is not None]
            if natives:
                axis.plot(*zip(*natives, strict=True), "s--", color=drawn.get_color(), alpha=0.6)
        axis.set(xscale="log", yscale="log", title=panel, xlabel="tokens", ylabel="us")
        axis.grid(True, which="both", alpha=0.2)
        axis.legend(fontsize="x-small")
    what = document["machine"]
    figure.suptitle(f"{what['card']}, vLLM {what['vllm']}, Triton {what['triton']}: ours solid, fastest native dashed")
    figure.savefig(path, dpi=110)


def draw(document: dict[str, Any], path: Path) -> bool:
    """Writes the plot beside `path`. If that fails, prints one line that says what to do, and returns False."""
    picture = path.with_suffix(".png")
    try:
        plot(document, picture)
    except ImportError:
        say(PLOT_HINT.format(path))
        return False
    except OSError as problem:
        say(f"cannot write {picture}: {problem.strerror}; give {path.name} in another directory")
        return False
    print(f"wrote {picture}")
    return True


def read(path: Path) -> dict[str, Any]:
    """The document in that file. ValueError, in one line, if this module did not write it."""
    expected = "expected what python -m shim.kernels.bench wrote"
    try:
        document = json.loads(path.read_text())
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}; {expected}") from None
    except ValueError:
        raise ValueError(f"{path} is not JSON, or cut short; {expected}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"{path} has schema {found}; {expected}, schema {SCHEMA}")
    wanted = {field.name for field in fields(Record)}
    try:
        whole = {"card", "vllm", "triton"} <= set(document["machine"])
        whole &= all(wanted <= set(row) for row in document["records"])
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} lacks its machine, or a value of a record; {expected}")
    return document


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("glm5-shim-bench.json"))
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--only", nargs="+", choices=sorted(_BY_KERNEL), default=sorted(_BY_KERNEL))
    parser.add_argument("--no-compile", action="store_true", help="predictions without occupancy, a minute less")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw this file again")
    args = parser.parse_args(None if arguments is None else list(arguments))
    for path in (args.plot, args.out):
        if path and path.suffix == ".png":
            parser.error(f"{path} is where the plot goes; give a JSON file")
    if args.plot:
        try:
            document = read(args.plot)
        except ValueError as problem:
            say(str(problem))
            return 1
        return 0 if draw(document, args.plot) else 1
    if why := refusal() or roofline.unwritable(args.out):
        say(why)
        return 1
    works = [work for work in roofline.cases(args.quick) if work.kernel in args.only]
    predicted, problems = roofline.predictions(works, not args.no_compile)
    problems += [why for why in [without_natives()] if why]
    measured, more = ceilings()
    document = {
        "schema": SCHEMA, "created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "machine": machine(),
        "ceilings": measured, "model_card": asdict(roofline.RTX_PRO_6000), "records": [], "problems": problems + more,
    }  # fmt: skip
    for text in (json.dumps(document["machine"]), json.dumps(measured), *document["problems"]):
        print(text, flush=True)
    run(works, predicted, document, measure, lambda: write(document, args.out))
    print(f"wrote {args.out}: {len(document['records'])} cases")
    draw(document, args.out)
    return 0 if all(row["problem"] is None for row in document["records"]) else 1


def write(document: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
