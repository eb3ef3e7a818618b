"""TRITON_MLA_SPARSE: sparse MLA in Triton, for NVIDIA GPUs of capability 8.0 and later. SM120 is its target."""
# mypy: allow-subclassing-any

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport

from shim.attention import MEMBER
from shim.attention.backend import BLOCK_SIZE, SparseMLABackend, known
from shim.attention.impl import Query, SparseMLAImpl
from shim.attention.metadata import SparseMLAMetadata, SparseMLAMetadataBuilder
from shim.kernels.sparse_mla.launch import Workspace, sparse_mla, warm_up


class TritonMLASparseMetadataBuilder(SparseMLAMetadataBuilder):
    """Decode batches run as full graphs, because each tensor that the kernel reads keeps its address between steps."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        cache_dtype = vllm_config.cache_config.cache_dtype
        warm_up(
            heads=model.get_num_attention_heads(vllm_config.parallel_config),
            q_dtype=model.dtype,
            cache_dtype=torch.uint8 if cache_dtype == "fp8_ds_mla" else model.dtype,
            page=BLOCK_SIZE,
            max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            device=device,
            columns=self.topk_tokens,
        )


class TritonMLASparseImpl(SparseMLAImpl):
    """The kernel reads block table, top-k positions and fp8 rows as they are, so nothing is converted before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        fp8 = self.kv_cache_dtype == "fp8_ds_mla"
        self._workspace = _workspace(
            config.scheduler_config.max_num_batched_tokens,
            self.num_heads,
            torch.uint8 if fp8 else config.model_config.dtype,
            torch.device("cuda", torch.cuda.current_device()),
            config.model_config.hf_text_config.index_topk,
            config.model_config.max_model_len,
        )

    def attend(
        self, q: Query, cache: torch.Tensor, topk: torch.Tensor, metadata: SparseMLAMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_mla(
            q,
            cache.view(torch.uint8) if self.kv_cache_dtype == "fp8_ds_mla" else cache,
            topk,
            metadata.req_ids,
            metadata.block_table,
            metadata.seq_lens,
            self.scale,
            workspace=self._workspace,
            neighbours=topk.shape[0] // max(1, metadata.num_reqs),
        )


@lru_cache
def _workspace(
    max_tokens: int, heads: int, cache_dtype: torch.dtype, device: torch.device, columns: int, positions: int
) -> Workspace:
    """One workspace serves all layers of a model, because they run one after the other on one stream."""
    return Workspace(max_tokens, heads, cache_dtype, device, columns, positions=positions)


class TritonMLASparseBackend(SparseMLABackend):
    """What vLLM loads for `TRITON_MLA_SPARSE`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    # the patch kv_cache_dtype turns "fp8" and "fp8_e4m3" into "fp8_ds_mla" before a layer is built
    supported_kv_cache_dtypes: ClassVar[list[Any]] = known(
        "auto", "float16", "bfloat16", "fp8_ds_mla", "fp8", "fp8_e4m3"
    )

    @staticmethod
    def get_name() -> str:
        return MEMBER

    @staticmethod
    def get_impl_cls() -> type[TritonMLASparseImpl]:
        return TritonMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLASparseMetadataBuilder]:
        return TritonMLASparseMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)
