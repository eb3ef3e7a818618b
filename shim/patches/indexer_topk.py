"""Target: vllm.model_executor.layers.sparse_attn_indexer, the top-k ops that it calls (torch.ops._C)

Why:    `cooperative_topk` needs thread-block clusters, which SM120 does not have; 0.24 calls it on SM120 anyway.
        `persistent_topk` needs up to 128 KiB of shared memory, or blocks that all run at once, for long rows, and can
        hang in a captured graph. No short probe proves that it does not.
How:    vLLM looks the ops up on torch.ops._C at each call, inside an opaque op. So an attribute set on torch.ops._C is
        what runs: our top-k where `shim.indexer.choice` says so, else the op itself.
Delete: when every supported release has a top-k for SM120 at a context of 1M tokens (vllm#54110, vllm#47164).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from shim import upstream
from shim.indexer import choice
from shim.patch import Patch, Verdict

NAME = choice.TOPK
OPS = "torch.ops._C."
ALWAYS = ("top_k_per_row_prefill", "top_k_per_row_decode")  # in every release
# op: (our function in shim.indexer.triton, number of arguments)
ADAPTERS = {
    "top_k_per_row_prefill": ("top_k_per_row_prefill", 8),
    "top_k_per_row_decode": ("top_k_per_row_decode", 8),
    "large_context_topk": ("large_context_topk", 4),
    "persistent_topk": ("persistent_topk", 6),
    "cooperative_topk": ("persistent_topk", 6),
}


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cuda():
        return Verdict.unneeded("not on the CUDA platform")
    for name, (_, expected) in ADAPTERS.items():
        if not upstream.has(module, OPS + name):
            if name in ALWAYS:
                return Verdict.unknown(f"{OPS}{name} does not exist")
            continue
        found = _arguments(upstream.raw(module, OPS + name))
        if found != expected:
            return Verdict.unknown(f"{OPS}{name} takes {found} arguments, expected {expected}")
    return Verdict.apply()


def _arguments(op: Any) -> int:
    """How many arguments a torch op of one overload takes."""
    (overload,) = op.overloads()
    return len(getattr(op, overload)._schema.arguments)


def apply(module: ModuleType) -> dict[str, Any]:
    return {
        OPS + name: _topk(upstream.raw(module, OPS + name), adapter)
        for name, (adapter, _) in ADAPTERS.items()
        if upstream.has(module, OPS + name)
    }


def _topk(original: Callable[..., Any], adapter: str) -> Callable[..., Any]:
    def topk(*args: Any, **kwargs: Any) -> Any:
        if choice.topk_is_ours() and not kwargs:
            from shim.indexer import triton

            if getattr(triton, adapter)(*args):
                return None
        return original(*args, **kwargs)

    return topk


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.layers.sparse_attn_indexer",
    replaces=tuple(OPS + name for name in ADAPTERS),
    optional=tuple(OPS + name for name in ADAPTERS if name not in ALWAYS),
    why="vLLM's top-k needs clusters or 128 KiB of shared memory, which SM120 lacks: it fails or hangs on long rows",
    delete="when every supported release has a top-k for SM120 at a context of 1M tokens (vllm#54110, vllm#47164)",
    tested="an H200 with 0.26.0, 0.33.0; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
)
