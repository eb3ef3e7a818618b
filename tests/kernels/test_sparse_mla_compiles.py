"""Every configuration that the launcher can pick, compiled for sm_120 by the ptxas that Triton carries, without a GPU.

As a script this file compiles the jobs on stdin and prints one JSON object per kernel (compile_gate.py).
"""

import hashlib
import itertools
import json
import os
import subprocess
from pathlib import Path

import compile_gate
import pytest
from compile_gate import resident_warps

Q, OWN, FP32, FP8 = ("bf16", "fp16"), "own", "fp32", "u8"


def jobs() -> list[dict]:
    """All for 12.0, and its PTX is assembled for 12.1 too. For other cards one of each kind of cache.

    The largest kernels take ten seconds to compile. So 9.0, 8.9 and 8.0 at both ends of the tables are compiled only
    with GLM5_SHIM_EVERY_RELEASE=1."""
    from shim.kernels.sparse_mla import tune

    every = os.environ.get("GLM5_SHIM_EVERY_RELEASE") == "1"
    variants = list(itertools.product(Q, (OWN, FP32)))
    full = [
        {"cap": 120, "fp8": fp8, "heads": heads, "q": q, "out": out}
        for fp8, table in tune.BY_HEADS.items()
        for heads, (q, out) in itertools.product(table, variants)
    ]
    ends = {False: [max(tune.BY_HEADS[False])], True: [min(tune.BY_HEADS[True])]}
    if every:
        ends = {fp8: [min(table), max(table)] for fp8, table in tune.BY_HEADS.items()}
    other = [
        {"cap": cap, "fp8": fp8, "heads": heads, "q": "bf16", "out": OWN}
        for cap in (90, 89, 80)
        for fp8, some in ends.items()
        for heads in some
    ]
    # gathers that tokens share, and the tokens that are left over; and what takes the shared memory of 9.0
    alike = [
        {"cap": 120, "fp8": fp8, "heads": heads, "q": q, "out": OWN, "from": "SHARED"}
        for fp8, table in tune.SHARED.items()
        for heads, q in itertools.product(table, Q)
    ]
    alike += [{"cap": 120, "fp8": False, "heads": 8, "q": "bf16", "out": OWN, "left": 4}]
    alike += [  # few tokens
        {"cap": 120, "fp8": False, "heads": heads, "q": q, "out": out, "from": "BY_HEADS_FEW"}
        for heads, (q, out) in itertools.product(tune.BY_HEADS_FEW, variants)
    ]
    alike += [
        {"cap": 90, "fp8": fp8, "heads": heads, "q": "bf16", "out": OWN, "from": name}
        for name, heads in (("SHARED_LARGE", 8), ("LARGE", 64))
        for fp8 in (False, True)
    ]
    alike += [{"cap": 90, "fp8": False, "heads": 8, "q": "bf16", "out": OWN, "from": "LARGE_FEW"}]
    merges = [{"cap": 120, "q": q, "alone": "merge", "splits": 2**n} for q in Q for n in range(1, 7)]
    merges += [{"cap": cap, "q": q, "alone": "merge", "splits": tune.MAX_SPLITS} for cap in (90, 89, 80) for q in Q]
    unions = [
        {"cap": cap, "q": "bf16", "alone": name, "group": group}
        for cap, group in ((120, 4), (90, 4), (90, 8))
        for name in ("look", "mark", "emit")
    ]
    return full + alike + other + merges + unions


WHOLE_121 = {"cap": 121, "fp8": False, "heads": 8, "q": "bf16", "out": OWN}
TOO_LARGE = {"cap": 120, "fp8": False, "q": "bf16", "out": OWN, "config": [64, 64, 128, 7, 8, 1]}
SPILLS = {"cap": 120, "fp8": False, "q": "bf16", "out": OWN, "config": [32, 8, 64, 7, 1, 1]}


def compile_one(job: dict) -> dict:
    import torch

    from shim.kernels.sparse_mla import kernel, launch, tune, union

    q = job["q"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[q]
    if job.get("alone") == "merge":
        function, constants, warps = kernel.merge, launch.merge_constants(job["splits"]), tune.MERGE_WARPS
        pointers = {"part_out": "fp32", "part_lse": "fp32", "out": q, "lse": "fp32"}
    elif "alone" in job:
        function = getattr(union, job["alone"])
        blocks = {"look": {}, "mark": {"BLOCK": union.COLUMNS}, "emit": {"BLOCK": union.WORDS}}
        constants, warps = {"GROUP": job["group"]} | blocks[job["alone"]], 8 if job["alone"] == "emit" else 4
        pointers = dict.fromkeys(("topk", "req_ids", "seq_lens", "bits", "entries", "counts"), "i32")
    else:
        cache = torch.uint8 if job["fp8"] else dtype
        config = tune.config_for(job.get("heads", 8), cache, large=job.get("from") == "LARGE")
        if job.get("from", "").endswith("_FEW"):
            config = getattr(tune, job["from"])[job["heads"]]
        if "config" in job:
            config = tune.Config(*job["config"])
        elif "SHARED" in job.get("from", ""):
            config = tune.sharing(tune.SHARE_FROM, job["heads"], cache, large=job["from"] == "SHARED_LARGE")
        constants = launch.constants(config, cache, 64, job["cap"] >= 89, job.get("left", 0))
        function, warps = kernel.attend, config.warps
        out = q if job["out"] == OWN else job["out"]
        pointers = {"q_latent": q, "q_rope": q, "cache": FP8 if job["fp8"] else q, "out": out, "lse": "fp32"}
        pointers |= dict.fromkeys(("topk", "req_ids", "table", "seq_lens", "counts"), "i32")
    types = {name: f"*{kind}" for name, kind in pointers.items()} | {"scale": "fp32"}
    aligned = {"q_latent", "q_rope", "cache", "out", "part_out", "part_lse"}
    row = compile_gate.build(function, types, constants, job["cap"], warps, aligned)
    if job["cap"] >= 120:
        ptx = files["ptx"].read_text()
        code = ptx.partition("\t.file\t")[0]  # debug names follow: paths of the checkout that filled Triton's cache
        row["ptx"] = hashlib.sha256(code.replace(f".target sm_{job['cap']}a", ".target").encode()).hexdigest()
    if job["cap"] == 120:
        row["on_121"] = assembled(ptx, 121)
    if job["cap"] == 90:
        row["one_by_one"] = "wgmma.mma_async instructions are serialized" in ptxas_says(files["ptx"])
    return row | {"config": job["alone"] if "alone" in job else repr(config)}


def assembled(ptx: str, capability: int) -> dict:
    """Assembles PTX for 12.0 by Triton's ptxas for another card of the family, and returns its resources."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", capability, 32))
    ptx = ptx.replace(".target sm_120a", f".target sm_{capability}a")
    cubin = backend.make_cubin(ptx, {}, backend.parse_options({"enable_fp_fusion": True}), capability)
    return compile_gate.resources(cubin, Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def ptxas_says(ptx: Path) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", str(ptx), "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def refuse(row: dict) -> list[str]:
    """Why this kernel may not be launched on 12.x."""
    problems = compile_gate.refuse(row)
    if "alone" not in row and not row["mma_sync"]:
        problems.append("no mma.sync")
    if "alone" not in row and not row["async16"]:
        problems.append("the gather is not asynchronous")
    return problems


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("triton")
    found = compile_gate.compile_all(__file__, [*jobs(), WHOLE_121, TOO_LARGE, SPILLS])
    return found + [row | row["on_121"] | {"cap": 121} for row in found if "on_121" in row]


def selectable(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "alone" in row or "heads" in row]


def test_all_fit_12x(rows, capsys):
    table = [
        f"{'sm':>4} {'heads':>5} {'q':>4} {'kv':>4} {'out':>4} {'shared':>7} {'regs':>4} {'warps/SM':>8} mma  config"
    ]
    for row in selectable(rows):
        kv = "-" if "alone" in row else "fp8" if row["fp8"] else row["q"]
        table.append(
            f"{row['cap']:>4} {row.get('heads', '-'):>5} {row['q']:>4} {kv:>4} {row.get('out', 'own'):>4} "
            f"{row['shared']:>7} {row['registers']:>4} {resident_warps(row):>8} {row['mma']:>3}  {row['config']}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(table))
    refused = {f"{row['cap']} {row['config']} {row['q']}": why for row in selectable(rows) if row["cap"] >= 120
               and (why := refuse(row))}  # fmt: skip
    assert not refused, json.dumps(refused, indent=1)
    large = [row for row in rows if row["cap"] == 90 and "from" in row]  # registers may spill: smaller tiles are slower
    assert large and all(row["shared"] <= 227 << 10 for row in large), large
    assert {row["cap"] for row in rows} == {120, 121, 90, 89, 80}
    assert all(row["mma"] for row in selectable(rows) if "alone" not in row)


def test_apart_repeats_no_product(rows):
    """A warp has only the mma.sync of 16 x 8 x 16 that S and P . K need. Else S has the warps of the latent."""
    from shim.kernels.sparse_mla import tune

    configs = {row["config"]: row["mma"] for row in rows if row["cap"] == 120 and "heads" in row}
    found = 0
    for text, mma in configs.items():
        config = eval(text, {"Config": tune.Config})
        if config.apart:
            s = max(1, config.block_n // 16) * config.block_k // 8 * 576 // 16
            pk = 512 // 16 * config.block_n // 8 * config.block_k // 16
            assert mma == (s + pk) / config.warps, text
            found += 1
    assert found >= 4


def test_no_wgmma_waits_for_the_one_before(rows):
    from shim.kernels.sparse_mla import tune

    seen = {row["config"]: row["one_by_one"] for row in rows if row["cap"] == 90 and "alone" not in row}
    assert repr(tune.HUGE) in seen and repr(tune.SHARED_LARGE[False][8]) in seen
    assert not any(seen.values()), seen


def test_a_row_is_in_shared_memory_once(rows):
    """Both products read the tile that was copied. Triton 3.8 once made a second one of half an fp8 tile, in fp16."""
    from shim.kernels.sparse_mla import tune

    seen = [row for row in rows if row["cap"] == 120 and "heads" in row]
    assert {row["fp8"] for row in seen} == {False, True}
    for row in seen:
        config = eval(row["config"], {"Config": tune.Config})
        tiles = config.block_k * (656 if row["fp8"] else 1152) * (2 if config.stages == 7 else 1)
        assert row["shared"] < 1.15 * (tiles + config.block_n * 1152), row  # the rest: positions, scales, P


def test_every_plan_was_compiled(rows):
    """`configuration` cannot return anything that is not in the table."""
    torch = pytest.importorskip("torch")
    from shim.kernels.sparse_mla import tune

    compiled = {row["config"] for row in rows if row["cap"] == 120 and "heads" in row}
    for heads, dtype, tokens in itertools.product((1, 4, 8, 12, 16, 32, 64, 96, 128), (torch.bfloat16, torch.uint8),
                                                  (1, 8, 64, 512, 4096)):  # fmt: skip
        assert repr(tune.configuration(tokens, heads, dtype, 188).config) in compiled


def test_121_has_the_ptx_of_120(rows):
    """So what is assembled for 12.1 is what Triton would launch on it."""
    (whole,) = (row for row in rows if row["cap"] == 121 and "on_121" not in row)
    assert whole in [{key: row.get(key) for key in whole} for row in rows if "on_121" in row]


def test_what_does_not_fit_is_refused(rows):
    large, spilling = (row for row in rows if "alone" not in row and "heads" not in row and row["cap"] == 120)
    if large["shared"] < spilling["shared"]:
        large, spilling = spilling, large
    assert any("shared memory" in why for why in refuse(large))
    assert any("spills" in why for why in refuse(spilling))


if __name__ == "__main__":
    import triton

    files = {}  # of the kernel compiled last, by kind
    triton.knobs.compilation.listener = lambda *, metadata_group, **_: files.update(
        {path.rpartition(".")[2]: Path(path) for path in metadata_group.values()}
    )
    compile_gate.main(compile_one)
