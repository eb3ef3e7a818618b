"""Every configuration that the launcher can pick, compiled for sm_120 by the ptxas that Triton carries, without a GPU.

As a script this file compiles what it is told and prints one JSON object per kernel (compile_gate.py).
"""

import itertools
import json

import compile_gate
import pytest
from compile_gate import resident_warps

Q, OWN, FP32, FP8 = ("bf16", "fp16"), "own", "fp32", "u8"


def jobs() -> list[dict]:
    """All for 12.0, every configuration for 12.1, the narrowest and the widest for the rest."""
    from shim.kernels.sparse_mla import tune

    pairs = [(fp8, name) for fp8, table in tune.BY_HEADS.items() for name in table]
    full = [
        {"cap": 120, "fp8": fp8, "heads": heads, "q": q, "out": out}
        for (fp8, heads), (q, out) in itertools.product(pairs, itertools.product(Q, (OWN, FP32)))
    ]
    ends = [(fp8, name) for fp8, table in tune.BY_HEADS.items() for name in (min(table), max(table))]
    other = [
        {"cap": cap, "fp8": fp8, "heads": heads, "q": "bf16", "out": OWN}
        for cap, some in {121: pairs, 90: ends, 89: ends, 80: ends}.items()
        for fp8, heads in some
    ]
    merges = [{"cap": cap, "q": q, "merge": True} for cap in (120, 121, 90, 89, 80) for q in Q]
    return full + other + merges


TOO_LARGE = {"cap": 120, "fp8": False, "q": "bf16", "out": OWN, "config": [64, 64, 128, 7, 8, 1]}
SPILLS = {"cap": 120, "fp8": False, "q": "bf16", "out": OWN, "config": [32, 8, 64, 7, 1, 1]}


def compile_one(job: dict) -> dict:
    import torch

    from shim.kernels.sparse_mla import kernel, launch, tune

    q = job["q"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[q]
    if job.get("merge"):
        function, constants, warps = kernel.merge, launch.MERGE_CONSTANTS, tune.MERGE_WARPS
        pointers = {"part_out": "fp32", "part_lse": "fp32", "out": q, "lse": "fp32"}
    else:
        cache = torch.uint8 if job["fp8"] else dtype
        config = tune.Config(*job["config"]) if "config" in job else tune.config_for(job["heads"], cache)
        function, constants, warps = kernel.attend, launch.constants(config, cache, 64, job["cap"] >= 89), config.warps
        out = q if job["out"] == OWN else job["out"]
        pointers = {"q_latent": q, "q_rope": q, "cache": FP8 if job["fp8"] else q, "out": out, "lse": "fp32"}
        pointers |= dict.fromkeys(("topk", "req_ids", "table", "seq_lens"), "i32")
    types = {name: f"*{kind}" for name, kind in pointers.items()} | {"scale": "fp32"}
    aligned = {"q_latent", "q_rope", "cache", "out", "part_out", "part_lse"}
    row = compile_gate.build(function, types, constants, job["cap"], warps, aligned)
    return row | {"config": "merge" if job.get("merge") else repr(config)}


def refuse(row: dict) -> list[str]:
    """Why this kernel may not be launched on 12.x."""
    problems = compile_gate.refuse(row)
    if not row.get("merge") and not row["mma_sync"]:
        problems.append("no mma.sync")
    if not row.get("merge") and not row["async16"]:
        problems.append("the gather is not asynchronous")
    return problems


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("triton")
    return compile_gate.compile_all(__file__, [*jobs(), TOO_LARGE, SPILLS])


def selectable(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row.get("merge") or "heads" in row]


def test_all_fit_12x(rows, capsys):
    table = [
        f"{'sm':>4} {'heads':>5} {'q':>4} {'kv':>4} {'out':>4} {'shared':>7} {'regs':>4} {'warps/SM':>8} mma  config"
    ]
    for row in selectable(rows):
        kv = "-" if row.get("merge") else "fp8" if row["fp8"] else row["q"]
        table.append(
            f"{row['cap']:>4} {row.get('heads', '-'):>5} {row['q']:>4} {kv:>4} {row.get('out', 'own'):>4} "
            f"{row['shared']:>7} {row['registers']:>4} {resident_warps(row):>8} {row['mma']:>3}  {row['config']}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(table))
    refused = {f"{row['cap']} {row['config']} {row['q']}": why for row in selectable(rows) if row["cap"] >= 120
               and (why := refuse(row))}  # fmt: skip
    assert not refused, json.dumps(refused, indent=1)
    assert {row["cap"] for row in rows} == {120, 121, 90, 89, 80}
    assert all(row["mma"] for row in selectable(rows) if not row.get("merge"))


def test_every_plan_was_compiled(rows):
    """`configuration` cannot return anything that is not in the table."""
    torch = pytest.importorskip("torch")
    from shim.kernels.sparse_mla import tune

    compiled = {row["config"] for row in rows if row["cap"] == 120 and "heads" in row}
    for heads, dtype, tokens in itertools.product((1, 4, 8, 12, 16, 32, 64, 96, 128), (torch.bfloat16, torch.uint8),
                                                  (1, 8, 64, 512, 4096)):  # fmt: skip
        assert repr(tune.configuration(tokens, heads, dtype, 188).config) in compiled


def test_what_does_not_fit_is_refused(rows):
    large, spilling = (row for row in rows if not row.get("merge") and "heads" not in row)
    if large["shared"] < spilling["shared"]:
        large, spilling = spilling, large
    assert any("shared memory" in why for why in refuse(large))
    assert any("spills" in why for why in refuse(spilling))


if __name__ == "__main__":
    compile_gate.main(compile_one)
