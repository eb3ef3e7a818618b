"""Shared by the tests that compile kernels without a GPU. Triton's own ptxas builds for any card.

A test's file compiles its kernels when it runs as a script. Other tests of this process use the interpreter, and a
process cannot switch it off again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from shim.kernels.build import SHARED, build, resident_warps, resources

__all__ = ["build", "compile_all", "main", "refuse", "resident_warps", "resources"]


def refuse(row: dict) -> list[str]:
    """Why this kernel may not be launched on 12.x."""
    problems = []
    if row["shared"] > SHARED:
        problems.append(f"{row['shared']} bytes of shared memory")
    if row["stack"] or row["local"]:
        problems.append(f"spills: STACK {row['stack']}, LOCAL {row['local']}")
    return problems


def compile_all(script: str, work: list[dict]) -> list[dict]:
    """One row for each job. Two processes without the interpreter compile them."""
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
