"""Target: vllm.platforms.cpu.CpuPlatform, get_attn_backend_cls and check_and_update_config

Why:    vLLM refuses GLM-5 on a CPU ("Sparse Attention is not supported on CPU."). And for every MLA model on a CPU
        without AMX it switches chunked prefill and prefix caching off, raises max_num_batched_tokens, and sets blocks
        of 16 tokens, where our backend has 64.
How:    `get_attn_backend_cls` answers our class path for sparse MLA of GLM-5. `check_and_update_config` runs as it is;
        then the user's settings are put back and torch.compile is switched off. Each process with the config does so.
Delete: when CpuPlatform accepts sparse MLA for glm_moe_dsa.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from shim import ledger, process, upstream
from shim.patch import Patch, Verdict

NAME = "cpu_backend"
CHOICE = "CpuPlatform.get_attn_backend_cls"
UPDATE = "CpuPlatform.check_and_update_config"
BACKEND = "shim.attention.backend.ReferenceMLASparseBackend"
BLOCK_SIZE = 64  # tokens; our backends take no other
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8_ds_mla")
# vLLM logs these about settings that we put back
MISLEADING = ("forcing chunked prefill and prefix caching to be disabled", "CPU MLA backend requires block_size=16")


def probe(module: ModuleType) -> Verdict:
    problem = upstream.signature_problem(
        module, CHOICE, ["cls", "selected_backend", "attn_selector_config", "num_heads"]
    ) or upstream.signature_problem(module, UPDATE, ["cls", "vllm_config"])
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    choose = upstream.raw(module, CHOICE).__func__
    update = upstream.raw(module, UPDATE).__func__

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        from vllm.config import get_current_vllm_config_or_none

        if attn_selector_config.use_sparse and attn_selector_config.use_mla:
            config = get_current_vllm_config_or_none()
            if config is not None and _serves_glm5(config):
                _refuse_unknown_cache(attn_selector_config.kv_cache_dtype)
                ledger.used(NAME)
                process.log.info("Using %s for GLM-5 on the CPU.", BACKEND)
                return BACKEND
        return choose(cls, selected_backend, attn_selector_config, num_heads)

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        if not _serves_glm5(vllm_config):
            ledger.idle(NAME, upstream.not_glm5(getattr(vllm_config.model_config, "hf_config", None)))
            update(cls, vllm_config)
            return
        from vllm.config import CompilationMode

        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked = scheduler.enable_chunked_prefill
        max_tokens = scheduler.max_num_batched_tokens
        prefix = cache.enable_prefix_caching
        with _without(module.logger, MISLEADING):
            update(cls, vllm_config)
        scheduler.enable_chunked_prefill = chunked
        scheduler.max_num_batched_tokens = max_tokens
        cache.enable_prefix_caching = prefix
        cache.block_size = BLOCK_SIZE
        # the reference kernels loop in Python; dynamo cannot trace that, and would try up to 0.28
        vllm_config.compilation_config.mode = CompilationMode.NONE
        ledger.used(NAME)

    return {CHOICE: classmethod(get_attn_backend_cls), UPDATE: classmethod(check_and_update_config)}


def _refuse_unknown_cache(kv_cache_dtype: Any) -> None:
    """ValueError for a cache dtype that our backend cannot read. vLLM does not check again after its chooser."""
    if kv_cache_dtype is not None and kv_cache_dtype not in CACHE_DTYPES:
        accepted = ", ".join(CACHE_DTYPES)
        raise ValueError(
            f"glm5-shim: --kv-cache-dtype {kv_cache_dtype} is not for GLM-5 on a CPU; take one of {accepted}"
        )


def _serves_glm5(vllm_config: Any) -> bool:
    model = vllm_config.model_config
    return model is not None and upstream.is_glm5(model.hf_config)


@contextmanager
def _without(logger: logging.Logger, phrases: tuple[str, ...]) -> Iterator[None]:
    """Keeps messages that contain one of `phrases` out of the log."""

    def keep(record: logging.LogRecord) -> bool:
        return not any(phrase in record.getMessage() for phrase in phrases)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


PATCH = Patch(
    name=NAME,
    target="vllm.platforms.cpu",
    replaces=(CHOICE, UPDATE),
    why="vLLM refuses sparse attention on a CPU, and switches chunked prefill and prefix caching off for MLA",
    delete="when CpuPlatform accepts sparse MLA for glm_moe_dsa",
    tested="0.28.0, 0.32.0",
    probe=probe,
    apply=apply,
)
