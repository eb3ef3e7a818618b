"""Times quantised experts on this GPU against the same layer with weights in bf16, and checks them.

    python -m shim.kernels.gguf_moe.bench [--json FILE] [--types Q4_K:Q5_K,IQ3_XXS] [--tokens 1,16,8192] [--width 256]

One rank's share of GLM-5 at TP 8: hidden 6,144, 256 experts of width 256, 8 used. Of `A:B` gate and up are A, down B.
Times are of launches back to back in a captured graph, each with a routing of its own. `of copy`: bytes of the
experts that a step touches, as the file has them, by time, by the rate of a copy. `16 bits` stands in for vLLM's fused
MoE, which this does not ask for: the same launches on bf16 experts (`tune.DENSE`), and the same sorting and adding up.
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
from shim.kernels.ggml.layout import FORMS, Weight
from shim.kernels.gguf_moe import launch, reference, tune
from shim.kernels.stopwatch import refusal

HIDDEN, EXPERTS, TOP_K = 6144, 256, 8
ROUTINGS = 6


def layer(gate_up: Type, down: Type, width: int) -> launch.Experts:
    shapes = ((gate_up, width, HIDDEN), (gate_up, width, HIDDEN), (down, HIDDEN, width))
    return launch.Experts(*(random_weight(kind, EXPERTS, rows, columns) for kind, rows, columns in shapes))


def error(experts: launch.Experts, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> float:
    """Of one token, against float64."""
    out = launch.moe(x, experts, ids, share)[:1]
    some = ids[0].long()
    gate, up, down = (dequantize(w._replace(data=w.data[some]), torch.float32) for w in experts)
    order = torch.arange(TOP_K, dtype=torch.int32, device=x.device)[None]
    want = reference.moe(x[:1], gate, up, down, order, share[:1])
    return float((out.double() - want).norm() / want.norm())


def compare(experts: launch.Experts, tokens: int, rate: float, in_16_bits: launch.Experts | None) -> dict[str, Any]:
    """One line of the table."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    out = torch.empty_like(x)
    count = ROUTINGS if tokens < 1024 else 1
    ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, 1).indices.int().contiguous() for _ in range(count)]
    share = torch.rand(tokens, TOP_K, device="cuda") / TOP_K
    touched = (
        sum(int((torch.bincount(i.flatten(), minlength=EXPERTS) > 0).sum()) for i in ids)
        / count
        * sum(w.bytes for w in experts)
    )
    plan = tune.plan(tokens * TOP_K, launch.capability(x.device))
    space = launch.Workspace.of(tokens * TOP_K, TOP_K, experts, x.device, plan) if plan.few else None
    found = error(experts, x, ids[0], share)
    assert found < 1e-2, found
    row: dict[str, Any] = {"tokens": tokens, "MB": touched / 1e6, "error": found, "plan": str(plan)}
    row["us"] = us_each([partial(launch.moe, x, experts, i, share, out, space) for i in ids])
    row["of_copy"] = touched / row["us"] / rate
    if in_16_bits is not None:
        row["16_bits_us"] = us_each([partial(launch.moe, x, in_16_bits, i, share, out, None, tune.DENSE) for i in ids])
        row["ratio"] = row["us"] / row["16_bits_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--types", default=",".join(["Q4_K:Q5_K", "IQ3_XXS:IQ4_XS", *(t.name for t in FORMS)]))
    parser.add_argument("--tokens", default="1,16,8192")
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    if problem := refusal():
        parser.exit(1, f"{problem}\n")
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e6:.2f} TB/s", flush=True)
    print(f"{'gate and up':<11} {'down':<8} {'tokens':>6} {'MB':>7} {'us':>8} of copy {'16 bits':>8} ratio   error")
    shapes = ((args.width, HIDDEN), (args.width, HIDDEN), (HIDDEN, args.width))
    dense = launch.Experts(*(Weight(torch.randn(EXPERTS, *s, device="cuda").bfloat16() * 0.02, Type.BF16, *s)
                             for s in shapes))  # fmt: skip
    results = []
    for name in args.types.split(","):
        gate_up, _, down = name.partition(":")
        experts = layer(Type[gate_up], Type[down or gate_up], args.width)
        for tokens in map(int, args.tokens.split(",")):
            row = compare(experts, tokens, rate, dense if tokens >= 1024 else None)
            results.append({"types": name} | row)
            nan = float("nan")
            print(
                f"{gate_up:<11} {down or gate_up:<8} {tokens:>6} {row['MB']:>7.0f} {row['us']:>8.1f} "
                f"{row['of_copy']:>7.0%} {row.get('16_bits_us', nan):>8.1f} {row.get('ratio', nan):>5.2f} "
                f"{row['error']:.1e}",
                flush=True,
            )
        del experts
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
