"""Products of every type compiled for sm_120 by the ptxas that Triton carries, without a GPU: one kernel of each
type, every kernel of one. All kernels of all types take half an hour:
`python tests/kernels/test_gguf_compiles.py --all`.

As a script without arguments this file compiles what it is told and prints one JSON object per kernel
(compile_gate.py).
"""

import json
import sys

import compile_gate
import pytest

KERNELS = ("few", "some", "more", "gate_up_few", "down_few", "gate_up_many", "down_many")


def jobs(every: bool = False) -> list[dict]:
    from shim.kernels.ggml.layout import FORMS

    names = [t.name for t in FORMS if t.name != "TQ1_0"]  # laid as TQ2_0
    if every:
        return [{"cap": cap, "type": n, "kernel": k} for cap in (120, 121) for n in names for k in KERNELS]
    work = [{"cap": 120, "type": name, "kernel": "few"} for name in names]
    work += [{"cap": 120, "type": "Q5_K", "kernel": kernel} for kernel in KERNELS[1:]]
    work += [{"cap": 120, "type": "Q4_K", "kernel": kernel} for kernel in ("gate_up_many", "down_many")]
    work += [{"cap": 120, "type": "", "kernel": kernel} for kernel in ("gate_up_dense", "down_dense")]
    return work + [{"cap": cap, "type": "Q4_K", "kernel": "few"} for cap in (121, 90)]


TOO_LARGE = {"cap": 120, "type": "Q4_K", "kernel": "down_many", "change": {"stages": 5}}
SPILLS = {"cap": 120, "type": "Q4_K", "kernel": "few", "change": {"registers": 40}}


def compile_one(job: dict) -> dict:
    import dataclasses

    import torch
    from gguf import GGMLQuantizationType as Type

    from shim.kernels.ggml import tables
    from shim.kernels.ggml.launch import Operand
    from shim.kernels.ggml.layout import FORMS
    from shim.kernels.gguf_linear import kernel as linear
    from shim.kernels.gguf_linear import launch as linear_launch
    from shim.kernels.gguf_linear import tune as linear_tune
    from shim.kernels.gguf_moe import kernel as moe
    from shim.kernels.gguf_moe import launch, tune

    name, kind, width = job["type"], job["kernel"], 2 if job["cap"] == 90 else 4
    bytes = FORMS[Type[name]].row_bytes if name else 0
    found = tables.table(Type[name], torch.device("cpu")) if name else None
    entry = {None: "u8", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.float32: "fp32"}
    table = "*" + entry[None if found is None else found.dtype]
    w = Operand(torch.empty(0), torch.empty(0), 1, 0, name, bytes)
    configs = {
        "few": linear_tune.FEW, "some": linear_tune.SOME, "more": linear_tune.MORE,
        "gate_up_few": tune.FEW.gate_up, "down_few": tune.FEW.down,
        "gate_up_many": tune.SOME.gate_up, "down_many": tune.SOME.down,
        "gate_up_dense": tune.DENSE.gate_up, "down_dense": tune.DENSE.down,
    }  # fmt: skip
    config = dataclasses.replace(configs[kind], **job.get("change", {}))
    if kind in ("few", "some", "more"):
        function, constants = linear.product, linear_launch.constants(config, name, bytes, 4, width)
    elif kind.endswith("dense"):
        function, constants = getattr(moe, kind), launch.dense_constants(config)
    elif kind.startswith("gate_up"):
        function, constants = getattr(moe, kind), launch.gate_up_constants(config, w, w, width)
    else:
        function, constants = getattr(moe, kind), launch.down_constants(config, w, width)
    constants |= {"gate_up_few": {"SLOTS": 128, "SPLITS": 4}, "down_few": {"SPLITS": 4}}.get(kind, {})
    options = {k: constants.pop(k, None) for k in ("num_warps", "maxnreg")}
    weights = "*u8" if name else "*bf16"
    types = dict.fromkeys(("packed", "gate", "up", "down"), weights)
    types |= dict.fromkeys(("table", "gate_table", "up_table"), table)
    types |= dict.fromkeys(("x", "out", "hidden", "parts"), "*bf16") | {"weights": "*fp32", "partial": "*fp32"}
    types |= dict.fromkeys(("arrived", "ids", "order", "plan"), "*i32")
    aligned = set(types) | {"x_t", "out_t", "columns", "gate_e", "up_e", "down_e"}
    limits = {"maxnreg": options["maxnreg"]} if options["maxnreg"] else {}
    return compile_gate.build(function, types, constants, job["cap"], config.warps, aligned, **limits) | {
        "built": repr(config)
    }


def refuse(row: dict) -> list[str]:
    """Why this kernel may not be launched."""
    problems = [p for p in compile_gate.refuse(row) if row["cap"] >= 120 or "shared" not in p]
    if not row["mma"] or (row["cap"] >= 120 and not row["mma_sync"]):
        problems.append("no tensor cores")
    return problems


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("triton")
    return compile_gate.compile_all(__file__, [*jobs(), TOO_LARGE, SPILLS])


def table(rows: list[dict]) -> str:
    lines = ["  sm type    kernel         shared regs warps/SM of 12.x  config"]
    for row in rows:
        lines.append(
            f"{row['cap']:>4} {row['type'] or '16 bits':<7} {row['kernel']:<13} {row['shared']:>7} "
            f"{row['registers']:>4} "
            f"{compile_gate.resident_warps(row):>16}  {row['built']}"
        )
    return "\n".join(lines)


def test_all_fit(rows, capsys):
    chosen = [row for row in rows if "change" not in row]
    with capsys.disabled():
        print("\n" + table(chosen))
    refused = {f"{row['cap']} {row['type']} {row['kernel']}": why for row in chosen if (why := refuse(row))}
    assert not refused, json.dumps(refused, indent=1)


def test_what_does_not_fit_is_refused(rows):
    large, spilling = ([r for r in rows if r.get("change") == job["change"]] for job in (TOO_LARGE, SPILLS))
    assert any("shared memory" in why for why in refuse(large[0]))
    assert any("spills" in why for why in refuse(spilling[0]))
    assert any("tensor cores" in why for why in refuse(large[0] | {"mma": 0}))


if __name__ == "__main__":
    if "--all" in sys.argv:
        found = compile_gate.compile_all(__file__, jobs(every=True))
        refused = {f"{row['cap']} {row['type']} {row['kernel']}": why for row in found if (why := refuse(row))}
        print(table(found))
        sys.exit(json.dumps(refused, indent=1) if refused else 0)
    compile_gate.main(compile_one)
