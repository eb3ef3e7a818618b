"""What the tests share that compile kernels without a GPU: the ptxas that Triton carries builds for any card.

Kernels are compiled by the test's own file, run as a script: the interpreter, which other tests use, cannot be switched
off again in a process.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED = 101_376  # bytes a block may have on 12.x
SM_SHARED, SM_REGISTERS, SM_WARPS = 102_400, 65_536, 48  # of an SM of 12.x; each block takes 1,024 bytes more


def build(function, types: dict[str, str], constants: dict, capability: int, warps: int, aligned: set[str]) -> dict:
    """Compiles `function`. types: Triton's names ("*fp32"), i32 where none is given. aligned: pointers to 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    kinds = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned & set(names)}
    source = ASTSource(fn=function, signature=kinds, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "warps": warps,
        "shared": built.metadata.shared,
        "mma": len(re.findall(r"\bmma\.sync|wgmma\.mma_async", ptx)),
        "mma_sync": ptx.count("mma.sync"),
        "fp8_mma": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)\S*\.e4m3\.e4m3", ptx)),
        "async16": len(re.findall(r"cp\.async\.c[ga]\.shared\.global.*0x10", ptx)),
    } | resources(built.asm["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def resources(cubin: bytes, cuobjdump: Path) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert found, text
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


def resident_warps(row: dict) -> int:
    """Warps that an SM of 12.x holds at once."""
    registers = -(-row["registers"] * 32 // 256) * 256 * row["warps"]
    blocks = min(SM_SHARED // (row["shared"] + 1024), SM_REGISTERS // registers, SM_WARPS // row["warps"])
    return blocks * row["warps"]


def refuse(row: dict) -> list[str]:
    """Why this kernel may not be launched on 12.x."""
    problems = []
    if row["shared"] > SHARED:
        problems.append(f"{row['shared']} bytes of shared memory")
    if row["stack"] or row["local"]:
        problems.append(f"spills: STACK {row['stack']}, LOCAL {row['local']}")
    return problems


def compile_all(script: str, work: list[dict]) -> list[dict]:
    """One row for each job, by two processes that know nothing of the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    running = []
    for part in (work[::2], work[1::2]):
        command = [sys.executable, script]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        assert process.stdin
        process.stdin.write(json.dumps(part))
        process.stdin.close()
        running.append(process)
    rows = [json.loads(line) for process in running for line in process.stdout]
    assert [process.wait() for process in running] == [0, 0]
    assert len(rows) == len(work)
    return rows


def main(compile_one) -> None:
    """The script's side of `compile_all`."""
    for job in json.loads(sys.stdin.read()):
        print(json.dumps(job | compile_one(job)), flush=True)
