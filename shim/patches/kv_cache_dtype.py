"""Target: vllm.model_executor.layers.attention.mla_attention.MLAAttention.__init__

Why:    `--kv-cache-dtype fp8` means `fp8_ds_mla` (656 bytes a token) for sparse MLA, but vLLM maps it by the names of
        its own backends. Ours would get a cache of plain fp8, which it cannot read.
How:    before a sparse layer with a quantised cache is built, vLLM's own selector says which backend the layer will
        get. If it is ours, the cache config says `fp8_ds_mla` from then on. The selector caches its answer, so the
        layer gets the same one.
Delete: when backend_member is deleted, or when vLLM asks the backend which format it wants (vllm#47629).
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.attention import MEMBER
from shim.patch import Patch, Verdict

NAME = "kv_cache_dtype"
SYMBOL = "MLAAttention.__init__"
FP8 = ("fp8", "fp8_e4m3")
READ = ("num_heads", "qk_rope_head_dim", "kv_lora_rank", "cache_config", "use_sparse")


def probe(module: ModuleType) -> Verdict:
    found = upstream.parameters(module, SYMBOL) or []
    missing = [name for name in READ if name not in found]
    if missing:
        return Verdict.unknown(f"{module.__name__}.{SYMBOL} has no parameter {', '.join(missing)}")
    if "kv_cache_dtype" not in (upstream.parameters(module, "get_attn_backend") or []):
        return Verdict.unknown(f"{module.__name__}.get_attn_backend has no parameter kv_cache_dtype")
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, SYMBOL)
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        cache_config = given.get("cache_config")
        if not given.get("use_sparse") or cache_config is None or cache_config.cache_dtype not in FP8:
            ledger.idle(NAME, "no sparse MLA layer with an fp8 cache")
        elif _backend(module, given).get_name() == MEMBER:
            cache_config.cache_dtype = "fp8_ds_mla"
            ledger.used(NAME)
        original(self, *args, **kwargs)

    return {SYMBOL: __init__}


def _backend(module: ModuleType, given: dict[str, Any]) -> Any:
    """The class of the backend that the layer will get. Releases ask their selector with different arguments: 0.16 with
    block_size, 0.17 with num_heads."""
    import torch

    if given.get("attn_backend") is not None:
        return given["attn_backend"]
    cache_config = given["cache_config"]
    passed = {
        "head_size": given["kv_lora_rank"] + given["qk_rope_head_dim"],
        "dtype": torch.get_default_dtype(),
        "kv_cache_dtype": cache_config.cache_dtype,
        "block_size": cache_config.block_size,
        "use_mla": True,
        "use_sparse": True,
        "num_heads": given["num_heads"],
    }
    known = upstream.parameters(module, "get_attn_backend") or []
    return module.get_attn_backend(**{name: value for name, value in passed.items() if name in known})


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.layers.attention.mla_attention",
    replaces=(SYMBOL,),
    why="--kv-cache-dtype fp8 must become fp8_ds_mla for our backend, and vLLM does that for its own backends only",
    delete="when backend_member is deleted, or when vLLM asks the backend which format it wants (vllm#47629)",
    tested="an H200 with 0.26.0; sources of 0.16.0, 0.23.0, 0.33.0",
    needs=("backend_member",),
    probe=probe,
    apply=apply,
)
