"""Target: vllm.model_executor.layers.sparse_attn_indexer, the top-k ops that it calls (torch.ops._C)

Why:    `cooperative_topk` needs thread-block clusters, which SM120 lacks (0.24 calls it there all the same);
        `persistent_topk` needs up to 128 KiB of shared memory or co-resident blocks for long rows, and can hang in a
        captured graph. No short probe proves that it does not.
How:    the ops are looked up by attribute on torch.ops._C at each call, inside an opaque op, so an attribute set there
        is what runs: ours where `shim.indexer.choice` says so, else the op itself.
Delete: when every supported release has a top-k for SM120 at a context of 1M.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from shim.indexer import choice
from shim.patch import Patch, Verdict

NAME = choice.TOPK
OPS = "torch.ops._C."
ALWAYS = ("top_k_per_row_prefill", "top_k_per_row_decode")  # in every release
# op: (the adapter's name, number of arguments)
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
    namespace = module.torch.ops._C
    for name, (_, expected) in ADAPTERS.items():
        if not hasattr(namespace, name):
            if name in ALWAYS:
                return Verdict.unknown(f"{OPS}{name} does not exist")
            continue
        found = _arguments(getattr(namespace, name))
        if found != expected:
            return Verdict.unknown(f"{OPS}{name} takes {found} arguments, expected {expected}")
    return Verdict.apply()


def _arguments(op: Any) -> int:
    """How many arguments a torch op takes; it has one overload."""
    (overload,) = op.overloads()
    return len(getattr(op, overload)._schema.arguments)


def apply(module: ModuleType) -> dict[str, Any]:
    namespace = module.torch.ops._C
    present = [name for name in ADAPTERS if hasattr(namespace, name)]
    for name in present:  # releases differ, and off CUDA there are none, so the engine cannot own them by name
        setattr(namespace, name, _topk(getattr(namespace, name), ADAPTERS[name][0]))
    return {}


def _topk(original: Callable[..., Any], adapter: str) -> Callable[..., Any]:
    def topk(*args: Any, **kwargs: Any) -> Any:
        if choice.topk_is_ours() and not kwargs:
            from shim.indexer import triton

            if getattr(triton, adapter)(*args):
                return None
        return original(*args, **kwargs)

    return topk


def verify(module: ModuleType) -> None:
    """Also asked when the builder of the indexer's metadata is made, the last step before graph capture."""
    namespace = module.torch.ops._C
    for name in ADAPTERS:
        if hasattr(namespace, name) and getattr(namespace, name).__module__ != __name__:
            raise RuntimeError(f"{OPS}{name} is not the shim's")


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.layers.sparse_attn_indexer",
    why="vLLM's top-k needs clusters or 128 KiB of shared memory, which SM120 lacks: it fails or hangs on long rows",
    delete="vllm#54110, vllm#47164: delete when every supported release has a top-k for SM120 at 1M tokens",
    tested="an H200 with 0.26.0, 0.33.0; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
    verify=verify,
)
