"""The ledger: every patch of the shim.

Each file has one PATCH, which has one off-switch: its name in GLM5_SHIM_SKIP. Patches of one target are applied in this
order. Between targets the order of vLLM's imports decides.
"""

from __future__ import annotations

from shim.patch import Patch
from shim.patches import (
    backend_choice,
    backend_member,
    closing_gate,
    cpu_backend,
    cpu_indexer,
    cpu_indexer_op,
    cpu_linear,
    cpu_packaging,
    cpu_rotary,
    deep_gemm_gate,
    gguf_engine_args,
    gguf_loader,
    gguf_quantization,
    indexer_builder,
    indexer_chunks,
    indexer_graphs,
    indexer_logits,
    indexer_topk,
    kv_cache_dtype,
    worker_seal,
)

PATCHES: tuple[Patch, ...] = (
    # a GGUF becomes something that vLLM can start with
    gguf_engine_args.PATCH,
    gguf_loader.PATCH,
    gguf_quantization.PATCH,
    # sparse MLA on NVIDIA
    backend_member.PATCH,
    backend_choice.PATCH,
    kv_cache_dtype.PATCH,
    # the DSA indexer on NVIDIA
    indexer_logits.PATCH,
    indexer_topk.PATCH,
    indexer_builder.PATCH,
    indexer_graphs.PATCH,
    indexer_chunks.PATCH,
    deep_gemm_gate.PATCH,
    # GLM-5 on the CPU wheel, with reference kernels
    cpu_packaging.PATCH,
    cpu_backend.PATCH,
    cpu_indexer.PATCH,
    cpu_indexer_op.PATCH,
    cpu_rotary.PATCH,
    cpu_linear.PATCH,
    # no process serves GLM-5 with less than all of it
    worker_seal.PATCH,
    closing_gate.PATCH,
)
