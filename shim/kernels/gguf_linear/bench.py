"""Times quantised linear layers on this GPU against cuBLAS on the same shape in bf16, and checks them.

    python -m shim.kernels.gguf_linear.bench [--json FILE] [--types Q4_K,Q8_0] [--tokens 1,16,8192]

Times are of launches back to back in a captured graph, over as many weights as do not fit in L2. `of copy`: bytes of
the weights by time, by the rate of a copy.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type

from shim.kernels.ggml.bench import copy_rate, random_weight, us_each
from shim.kernels.ggml.launch import dequantize
from shim.kernels.ggml.layout import TYPES
from shim.kernels.gguf_linear import launch, reference, tune
from shim.kernels.host import sm_count
from shim.kernels.stopwatch import refusal

SHAPES = ((16_384, 2048), (6144, 16_384), (2048, 6144))  # q_b and o_proj of one card, q_a of any
COLD = 300e6  # bytes


def compare(kind: Type, rows: int, columns: int, tokens: int, rate: float) -> dict[str, Any]:
    """One line of the table."""
    weight = random_weight(kind, rows, columns)
    copies = max(2, min(40, int(COLD / weight.bytes))) if tokens < tune.MANY else 2
    weights = [weight, *(weight._replace(data=weight.data.clone()) for _ in range(copies - 1))]
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    out = torch.full((tokens, rows), torch.nan, dtype=x.dtype, device="cuda")
    plan = tune.plan(tokens, rows, columns, sm_count(x.device))
    space = launch.Workspace.of(plan, tokens, rows, x.device) if plan else None
    launch.linear(x, weight, out, space)
    dense = dequantize(weight, x.dtype)
    want = reference.linear(x[:64], dequantize(weight, torch.float32))
    error = float((out[:64].double() - want).norm() / want.norm())
    assert error < 4e-3, error
    ours = us_each([partial(launch.linear, x, w, out, space) for w in weights])
    cold = [dense, *(dense.clone() for _ in range(min(copies, 8) - 1))]
    cublas = us_each([partial(torch.matmul, x, w.T, out=out) for w in cold])
    return {
        "type": kind.name, "rows": rows, "columns": columns, "tokens": tokens, "MB": weight.bytes / 1e6, "us": ours,
        "of_copy": weight.bytes / ours / rate, "cublas_us": cublas, "ratio": ours / cublas, "error": error,
        "plan": str(plan) if plan else "dequantised",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--types", default=",".join(t.name for t in TYPES))
    parser.add_argument("--tokens", default="1,16,8192")
    args = parser.parse_args()
    if problem := refusal():
        parser.exit(1, f"{problem}\n")
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e6:.2f} TB/s", flush=True)
    print(f"{'type':<8}{'W':>14} {'tokens':>6} {'MB':>7} {'us':>8} of copy {'cuBLAS':>8} ratio   error")
    results = []
    for name in args.types.split(","):
        for tokens in map(int, args.tokens.split(",")):
            for rows, columns in SHAPES:
                row = compare(Type[name], rows, columns, tokens, rate)
                results.append(row)
                print(
                    f"{name:<8}{f'{rows} x {columns}':>14} {tokens:>6} {row['MB']:>7.1f} {row['us']:>8.1f} "
                    f"{row['of_copy']:>7.0%} {row['cublas_us']:>8.1f} {row['ratio']:>5.2f} {row['error']:.1e}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
