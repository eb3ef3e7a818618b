"""Every configuration that the launcher can pick, compiled for sm_120 by the ptxas that Triton carries, without a GPU.

As a script this file compiles the jobs on stdin and prints one JSON object per kernel (compile_gate.py).
"""

import dataclasses
import itertools
import json
from pathlib import Path

import compile_gate
import pytest
from compile_gate import resident_warps


def jobs() -> list[dict]:
    """All for 12.0, one of each kernel for the rest."""
    from shim.kernels.topk import tune

    kernels = ("shared_rows", "whole_rows")
    return [
        {"cap": 120, "kernel": kernel, "sample": sample, "starts": starts}
        for kernel, sample, starts in itertools.product(kernels, tune.SAMPLES, (False, True))
    ] + [
        {"cap": cap, "kernel": kernel, "sample": tune.SAMPLES[-1], "starts": True}
        for cap, kernel in itertools.product((121, 90, 80), kernels)
    ]


TOO_LARGE = {"cap": 120, "kernel": "whole_rows", "sample": 4096, "starts": False, "change": {"tile": 4096, "stages": 9}}
SPILLS = {"cap": 120, "kernel": "whole_rows", "sample": 4096, "starts": False, "change": {"registers": 40}}


def compile_one(job: dict) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from shim.kernels.topk import kernel, launch, tune

    table = tune.SHARED if job["kernel"] == "shared_rows" else tune.WHOLE
    config = dataclasses.replace(table[job["sample"]], **job.get("change", {}))
    function, constants = getattr(kernel, job["kernel"]), launch.constants(config, job["starts"])
    pointers = dict.fromkeys(("logits", "lengths", "starts", "out", "values", "indices", "ties", "arrived"), "*i32")
    types = {"counts": "*i64"} | pointers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(function, {name: types.get(name, "i32") for name in function.arg_names}, constants)
    built = triton.compile(source, target=GPUTarget("cuda", job["cap"], 32), options=launch.options(config))
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    shape = {"config": repr(config), "warps": config.warps, "shared": built.metadata.shared}
    return shape | compile_gate.resources(built.asm["cubin"], cuobjdump)


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("triton")
    return compile_gate.compile_all(__file__, [*jobs(), TOO_LARGE, SPILLS])


def test_all_fit_12x(rows, capsys):
    chosen = [row for row in rows if "change" not in row]
    table = [f"{'sm':>4} {'kernel':<11} {'shared':>7} {'regs':>4} {'warps/SM':>8} starts config"]
    for row in chosen:
        table.append(
            f"{row['cap']:>4} {row['kernel']:<11} {row['shared']:>7} {row['registers']:>4} {resident_warps(row):>8} "
            f"{row['starts']:>6} {row['config']}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(table))
    refused = {f"{row['cap']} {row['kernel']} {row['config']}": why for row in chosen
               if row["cap"] >= 120 and (why := compile_gate.refuse(row))}  # fmt: skip
    assert not refused, json.dumps(refused, indent=1)
    assert {row["cap"] for row in rows} == {120, 121, 90, 80}


def test_every_plan_was_compiled(rows):
    """`plan` returns only what is in the table, and an SM holds `per_sm` programs of it."""
    from shim.kernels.topk import tune

    compiled = {(row["kernel"], row["config"]): row for row in rows if row["cap"] == 120 and "change" not in row}
    for count, columns in itertools.product((1, 8, 64, 150, 512, 8192), (1000, 8193, 65_536, 131_073, 1 << 20)):
        plan = tune.plan(count, columns, 188)
        row = compiled["shared_rows" if plan.parts > 1 else "whole_rows", repr(plan.config)]
        assert resident_warps(row) >= plan.config.per_sm * plan.config.warps


def test_what_does_not_fit_is_refused(rows):
    large, spilling = (next(row for row in rows if row.get("change") == job["change"]) for job in (TOO_LARGE, SPILLS))
    assert any("shared memory" in why for why in compile_gate.refuse(large))
    assert any("spills" in why for why in compile_gate.refuse(spilling))


if __name__ == "__main__":
    compile_gate.main(compile_one)
