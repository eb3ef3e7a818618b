"""Builds kernels for any card, without that card, by Triton's own ptxas. Counts what they take of an SM."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SHARED = 101_376  # bytes that a block may have on 12.x
SM_SHARED, SM_REGISTERS, SM_WARPS = 102_400, 65_536, 48  # of an SM of 12.x. Each block takes 1,024 bytes more


@dataclass(frozen=True)
class Occupancy:
    registers: int
    shared: int
    warps: int
    spills: bool
    per_sm: int  # programs that an SM of 12.x holds


def build(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    warps: int,
    aligned: set[str],
    **options: Any,
) -> dict[str, Any]:
    """Compiles `function` for a card of this capability, and counts what it takes.

    types:   Triton's names ("*fp32") by argument; i32 is the default
    aligned: arguments that are pointers to multiples of 16 bytes
    options: Triton's own
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    kinds = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned & set(names)}
    source = ASTSource(fn=function, signature=kinds, constexprs=constants, attrs=attributes)
    how = {"num_warps": warps, "enable_fp_fusion": True} | options
    built: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)
    ptx = built.asm["ptx"]
    return {
        "warps": warps,
        "shared": built.metadata.shared,
        "mma": len(re.findall(r"\bmma\.sync|wgmma\.mma_async", ptx)),
        "mma_sync": ptx.count("mma.sync"),
        "fp8_mma": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)\S*\.e4m3\.e4m3", ptx)),
        "async16": len(re.findall(r"cp\.async\.c[ga]\.shared\.global.*0x10", ptx)),
    } | resources(built.asm["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def resources(cubin: bytes, cuobjdump: Path) -> dict[str, int]:
    """Registers of a thread, and its bytes of stack and local memory (spills)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert found, text
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


def resident_warps(row: dict[str, Any]) -> int:
    """How many warps an SM of 12.x holds at once. row: from `build`."""
    registers = -(-row["registers"] * 32 // 256) * 256 * row["warps"]
    blocks = min(SM_SHARED // (row["shared"] + 1024), SM_REGISTERS // registers, SM_WARPS // row["warps"])
    return int(blocks * row["warps"])


def _attend(config: Any, fp8: bool, split: bool, capability: int) -> dict[str, Any]:
    import torch

    from shim.kernels.sparse_mla import kernel, launch

    types = dict.fromkeys(("topk", "req_ids", "table", "seq_lens", "counts"), "*i32") | {
        "scale": "fp32",
        "lse": "*fp32",
    }
    types |= {"q_latent": "*bf16", "q_rope": "*bf16", "cache": "*u8" if fp8 else "*bf16"}
    types["out"] = "*fp32" if split else "*bf16"
    constants = launch.constants(config, torch.uint8 if fp8 else torch.bfloat16, 64, True)
    aligned = {"q_latent", "q_rope", "cache", "out"}
    return build(kernel.attend, types, constants, capability, config.warps, aligned)


def _mqa(config: Any, heads: int, capability: int) -> dict[str, Any]:
    from shim.kernels.indexer import launch

    function, constants = launch.prefill_kernel(config, heads)
    return build(function, _INDEXER, constants, capability, config.warps, {"q", "k"})


def _paged_mqa(config: Any, heads: int, capability: int) -> dict[str, Any]:
    from shim.kernels.indexer import kernel, tune

    columns = tune.paged_columns(heads, 1, config)
    constants = {"HEADS": heads, "COLUMNS": columns, "SCAN": tune.SCAN, "STAGES": config.stages}
    return build(kernel.paged_mqa, _INDEXER, constants, capability, config.warps, {"q", "cache"})


def _select(config: Any, shared: bool, capability: int) -> dict[str, Any]:
    from shim.kernels.topk import kernel, launch

    pointers = ("logits", "lengths", "starts", "out", "values", "indices", "ties", "arrived")
    types = dict.fromkeys(pointers, "*i32") | {"counts": "*i64"}
    function = kernel.shared_rows if shared else kernel.whole_rows
    options = launch.options(config)
    constants = launch.constants(config, False)
    return build(function, types, constants, capability, config.warps, set(), maxnreg=options["maxnreg"])


_INDEXER = dict.fromkeys(("q", "k", "cache"), "*fp8e4nv") | dict.fromkeys(("k_scale", "w", "out"), "*fp32")
_INDEXER |= dict.fromkeys(("ks", "ke", "lens", "table"), "*i32")
BUILDS: dict[str, Callable[..., dict[str, Any]]] = {
    "attend": _attend, "mqa": _mqa, "paged_mqa": _paged_mqa, "select": _select
}  # fmt: skip


@lru_cache
def occupancy(name: str, config: Any, variant: tuple[Any, ...], capability: int = 120) -> Occupancy:
    """The occupancy of one of `BUILDS`. It takes seconds without Triton's cache. Errors are Triton's and ptxas's."""
    row = BUILDS[name](config, *variant, capability)
    spills = bool(row["stack"] or row["local"])
    return Occupancy(row["registers"], row["shared"], row["warps"], spills, resident_warps(row) // row["warps"])
