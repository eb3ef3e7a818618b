"""The backend classes of sparse MLA, each for every vLLM from 0.16.0 to 0.33.0.

A release does not call a method that it does not know, so these classes can have the methods of all releases.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any, ClassVar, get_args

import torch
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import AttentionBackend

from shim.attention.impl import ReferenceMLASparseImpl
from shim.attention.metadata import SparseMLAMetadataBuilder
from shim.kernels.sparse_mla.reference import FP8_ROW_BYTES, ROW

BLOCK_SIZE = 64  # tokens; the layout of the indexer's fp8 cache depends on it


def known(*dtypes: str) -> list[Any]:
    """Those of `dtypes` that this vLLM knows ("float16" from 0.18 on)."""
    return [name for name in dtypes if name in get_args(CacheDType)]


class SparseMLABackend(AttentionBackend):
    """What all our backends share. A subclass adds its name, implementation, dtypes and devices."""

    accept_output_buffer: bool = True  # read by 0.16-0.19
    supported_kv_cache_dtypes: ClassVar[list[Any]] = known("auto", "float16", "bfloat16", "fp8_ds_mla")

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # the argument: 0.31 and later
        return [BLOCK_SIZE]

    @staticmethod
    def get_kv_cache_shape(  # called by 0.16-0.28; later the KV cache spec decides
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, FP8_ROW_BYTES if cache_dtype_str == "fp8_ds_mla" else head_size)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [ROW]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_pcp(cls) -> bool:  # 0.26 and later
        return False

    @classmethod
    def supports_dcp(cls) -> bool:  # 0.29 and later
        return False

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:  # one parameter more in 0.24
        return None


class ReferenceMLASparseBackend(SparseMLABackend):
    """Plain torch on any device, slow and exact. GLM-5 runs on it with the CPU wheel."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "REFERENCE_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[ReferenceMLASparseImpl]:
        return ReferenceMLASparseImpl
