"""Every configuration that the launcher can pick, compiled for sm_120 by the ptxas that Triton carries, without a GPU.

As a script this file compiles the jobs on stdin and prints one JSON object per kernel (compile_gate.py).
"""

import json

import compile_gate
import pytest

OPERANDS = {"fp8": "fp8e4nv", "bytes": "u8", "bf16": "bf16", "fp16": "fp16"}


def jobs() -> list[dict]:
    """All for 12.0. Of other cards GLM-5's 32 heads, and 64 on 9.0. "bytes": e4m3 for an MMA that does not take it."""
    from shim.kernels.indexer import tune

    work = [{"cap": 120, "heads": heads, "x": x} for heads in tune.HEADS for x in ("fp8", "bf16", "fp16")]
    work += [{"cap": cap, "heads": 32, "x": "fp8"} for cap in (121, 90, 89)]
    work += [{"cap": 80, "heads": 32, "x": "bytes"}, {"cap": 90, "heads": 64, "x": "fp8"}]
    paged = [job | {"columns": columns(job, n)} for job in work if job["x"] in ("fp8", "bytes") for n in (1, 2, 4, 8)]
    return work + [job for i, job in enumerate(paged) if job not in paged[:i]]


def columns(job: dict, next_n: int) -> int:
    from shim.kernels.indexer import tune

    return tune.paged_columns(job["heads"], next_n, tune.paged(divmod(job["cap"], 10)))


TOO_LARGE = {"cap": 120, "heads": 32, "x": "fp8", "config": [256, 64, 128, 12, 8]}
SPILLS = {"cap": 120, "heads": 32, "x": "fp8", "config": [256, 64, 128, 2, 2]}


def compile_one(job: dict) -> dict:
    from shim.kernels.indexer import kernel, launch, tune

    capability, heads, x = divmod(job["cap"], 10), job["heads"], OPERANDS[job["x"]]
    if "columns" in job:
        config, function = tune.paged(capability), kernel.paged_mqa
        constants = {"HEADS": heads, "COLUMNS": job["columns"], "SCAN": tune.SCAN, "STAGES": config.stages}
    else:
        config = tune.Prefill(*job["config"]) if "config" in job else tune.prefill(heads, capability)
        function, constants = launch.prefill_kernel(config, heads)
    types = dict.fromkeys(("q", "k", "cache"), f"*{x}") | dict.fromkeys(("k_scale", "w", "out"), "*fp32")
    types |= dict.fromkeys(("ks", "ke", "lens", "table"), "*i32")
    row = compile_gate.build(function, types, constants, job["cap"], config.warps, {"q", "k", "cache"})
    return row | {"built": repr(config), "per_sm": config.per_sm if isinstance(config, tune.Paged) else 1}


def refuse(row: dict) -> list[str]:
    """Why this kernel may not be launched."""
    problems = [p for p in compile_gate.refuse(row) if row["cap"] != 90 or "shared" not in p]
    if not row["mma"] or (row["x"] == "fp8" and row["mma"] != row["fp8_mma"]):
        problems.append("no tensor cores, or not in fp8")
    if row["cap"] >= 120 and not row["mma_sync"]:
        problems.append("no mma.sync")
    if not row["async16"]:
        problems.append("loads are not asynchronous")
    if row["cap"] >= 120 and compile_gate.resident_warps(row) < row["per_sm"] * row["warps"]:
        problems.append(f"{row['per_sm']} programs are not resident in an SM")
    return problems


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("triton")
    return compile_gate.compile_all(__file__, [*jobs(), TOO_LARGE, SPILLS])


def test_all_fit(rows, capsys):
    table = ["  sm heads  q, k columns  shared regs warps/SM of 12.x mma  config"]
    selectable = sorted((row for row in rows if "config" not in row), key=lambda row: ("columns" in row, -row["cap"]))
    for row in selectable:
        table.append(
            f"{row['cap']:>4} {row['heads']:>5} {row['x']:>5} {row.get('columns', '-'):>7} {row['shared']:>7} "
            f"{row['registers']:>4} {compile_gate.resident_warps(row):>16} {row['mma']:>3}  {row['built']}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(table))
    refused = {f"{row['cap']} {row['heads']} {row['x']} {row['built']}": why for row in selectable
               if (why := refuse(row))}  # fmt: skip
    assert not refused, json.dumps(refused, indent=1)
    assert {row["cap"] for row in selectable} == {120, 121, 90, 89, 80}


def test_every_choice_was_compiled(rows):
    from shim.kernels.indexer import tune

    built = {(row["heads"], row["x"], row.get("columns"), row["built"]) for row in rows if row["cap"] == 120}
    for heads in tune.HEADS:
        for x in ("fp8", "bf16", "fp16"):
            assert (heads, x, None, repr(tune.prefill(heads, (12, 0)))) in built
        for next_n in range(1, 9):
            config = tune.paged((12, 0))
            assert (heads, "fp8", tune.paged_columns(heads, next_n, config), repr(config)) in built


def test_what_does_not_fit_is_refused(rows):
    large, spilling = ([r for r in rows if r.get("config") == job["config"]] for job in (TOO_LARGE, SPILLS))
    assert any("shared memory" in why for why in refuse(large[0]))
    assert any("spills" in why for why in refuse(spilling[0]))
    assert any("tensor cores" in why for why in refuse(large[0] | {"fp8_mma": 0}))
    assert any("resident" in why for why in refuse(spilling[0] | {"per_sm": 5}))


if __name__ == "__main__":
    compile_gate.main(compile_one)
