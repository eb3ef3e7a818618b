"""shim.attention on stand-ins for the few names of vLLM that it uses, in the form of each era."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Generic, Literal, TypeVar

import pytest
import torch

PARTS = ("attention.backend", "attention.impl", "attention.metadata", "indexer.cpu")
T = TypeVar("T")


def vllms_backend_module(era: str) -> ModuleType:
    module = ModuleType("vllm.v1.attention.backend")

    class AttentionMetadata: ...

    class AttentionMetadataBuilder(ABC, Generic[T]):
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.vllm_config = vllm_config

        @abstractmethod
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    class MLAAttentionImpl(Generic[T]):
        is_sparse = False

    class AttentionBackend(ABC):
        @staticmethod
        @abstractmethod
        def get_name(): ...

    names = [AttentionMetadata, AttentionMetadataBuilder, MLAAttentionImpl, AttentionBackend]
    if era == "0.16":
        names.append(type("SparseMLAAttentionImpl", (), {}))
    vars(module).update({cls.__name__: cls for cls in names})
    return module


@pytest.fixture(params=["0.16", "0.33"])
def attention(request, monkeypatch):
    """The modules of shim.attention, imported afresh on this era's stand-ins."""
    stubs = {name: ModuleType(name) for name in ("vllm", "vllm.config", "vllm.v1", "vllm.v1.attention")}
    stubs["vllm.config.cache"] = ModuleType("vllm.config.cache")
    stubs["vllm.config.cache"].CacheDType = (
        Literal["auto", "bfloat16", "fp8_ds_mla"]
        if request.param == "0.16"
        else Literal["auto", "float16", "bfloat16", "fp8_ds_mla", "nvfp4"]
    )
    stubs["vllm.v1.attention.backend"] = vllms_backend_module(request.param)
    stubs["vllm.v1.attention"].backend = stubs["vllm.v1.attention.backend"]
    stubs["vllm.forward_context"] = ModuleType("vllm.forward_context")
    context = SimpleNamespace(attn_metadata=None)
    stubs["vllm.forward_context"].get_forward_context = lambda: context
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("shim.attention", *(f"shim.{part}" for part in PARTS)):
        monkeypatch.setitem(sys.modules, name, None)  # monkeypatch will restore the old value
        del sys.modules[name]
    found = {part.partition(".")[2]: importlib.import_module(f"shim.{part}") for part in PARTS}
    return SimpleNamespace(era=request.param, context=context, vllm_backend=stubs["vllm.v1.attention.backend"], **found)


def impl(attention, cls=None, **kwargs):
    cls = cls or attention.impl.ReferenceMLASparseImpl
    defaults = {"attn_type": "decoder", "kv_sharing_target_layer_name": None, "kv_lora_rank": 512, "kv_b_proj": None}
    return cls(8, 576, 0.1, 1, None, None, "auto", None, **(defaults | kwargs))


def batch(lengths: list[int], new: list[int], padding: int = 0) -> SimpleNamespace:
    """A common metadata of requests with `lengths` tokens, the `new` last of which are in the batch."""
    starts = torch.tensor([0, *new]).cumsum(0).int()
    blocks = torch.randperm(8 * len(lengths)).int().view(len(lengths), 8)
    slots = [
        int(blocks[r, p // 64]) * 64 + p % 64
        for r, (length, n) in enumerate(zip(lengths, new, strict=True))
        for p in range(length - n, length)
    ]
    return SimpleNamespace(
        num_reqs=len(lengths),
        num_actual_tokens=sum(new) + padding,
        max_query_len=max(new),
        max_seq_len=max(lengths),
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table_tensor=blocks,
        slot_mapping=torch.tensor(slots + [-1] * padding),
    )


def build(attention, common):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=16)),
    )
    builder = attention.metadata.SparseMLAMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    return builder.build(0, common)


def test_each_era_recognises_the_impl_as_sparse(attention):
    cls = attention.impl.ReferenceMLASparseImpl
    base = "SparseMLAAttentionImpl" if attention.era == "0.16" else "MLAAttentionImpl"
    assert issubclass(cls, getattr(attention.vllm_backend, base))
    assert cls.is_sparse and not cls.supports_dense_mha_prefill and not cls.supports_dcp


def test_the_backend_has_the_methods_of_every_era(attention):
    backend = attention.backend.ReferenceMLASparseBackend
    assert backend.get_name() == "REFERENCE_MLA_SPARSE"
    assert backend.is_mla() and backend.is_sparse() and not backend.supports_dcp() and not backend.supports_pcp()
    assert backend.get_supported_kernel_block_sizes() == backend.get_supported_kernel_block_sizes("spec") == [64]
    assert backend.get_supported_head_sizes() == [576]
    assert backend.get_kv_cache_shape(3, 64, 1, 576) == (3, 64, 576)
    assert backend.get_kv_cache_shape(3, 64, 1, 576, "fp8_ds_mla") == (3, 64, 656)
    assert backend.supports_combination(576, None, "auto", 64, True, False, True, None) is None
    assert backend.supports_combination(576, None, "auto", 64, True, False, True, use_mm_prefix=False) is None
    assert ("float16" in backend.supported_kv_cache_dtypes) is (attention.era != "0.16")
    assert backend.get_impl_cls() is attention.impl.ReferenceMLASparseImpl
    assert backend.get_builder_cls() is attention.cpu.ReferenceIndexerBackend.get_builder_cls()


def test_tokens_belong_to_their_request_and_padding_to_the_last(attention):
    metadata = build(attention, batch([70, 1, 130], [5, 1, 2], padding=3))
    assert metadata.req_ids.tolist() == [0] * 5 + [1] + [2] * 2 + [2] * 3
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 11)
    assert (metadata.num_prefills, metadata.prefill, metadata.prefill_max_seq_len) == (0, None, 0)


def test_the_topk_buffer_is_looked_up_at_every_call(attention):
    first, second = torch.zeros(4, 2), torch.ones(4, 2)
    indexer = SimpleNamespace(topk_indices_buffer=first)
    ours = impl(attention, indexer=indexer, topk_indices_buffer=second)
    assert ours.topk_indices_buffer is first
    indexer.topk_indices_buffer = second
    assert ours.topk_indices_buffer is second
    assert impl(attention, topk_indices_buffer=first, index_group_builder="0.30").topk_indices_buffer is first
    with pytest.raises(ValueError, match="neither an indexer nor a top-k buffer"):
        _ = impl(attention).topk_indices_buffer


@pytest.mark.parametrize("odd", [{"attn_type": "encoder"}])
def test_what_sparse_mla_cannot_do_is_refused(attention, odd):
    with pytest.raises(NotImplementedError, match="encoder attention"):
        impl(attention, **odd)


@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla"])
def test_rows_are_written_where_attention_reads_them(attention, kind):
    common = batch([130], [130], padding=2)
    metadata = build(attention, common)
    width, dtype = (656, torch.uint8) if kind == "fp8_ds_mla" else (576, torch.float32)
    cache = (
        torch.full((8, 64, width), 255, dtype=torch.uint8)
        if kind == "fp8_ds_mla"
        else torch.full((8, 64, 576), torch.nan)
    )
    latent, rope = torch.randn(132, 512), torch.randn(132, 1, 64)
    buffer = torch.full((1024, 16), -1, dtype=torch.int32)
    buffer[:130, 3] = torch.arange(130)  # every token attends to itself alone: the answer is its own latent row
    ours = impl(attention, topk_indices_buffer=buffer)
    ours.do_kv_cache_update(latent, rope, cache, metadata.slot_mapping, kind, torch.ones(1))
    untouched = (cache == 255 if kind == "fp8_ds_mla" else cache.isnan()).all(-1)
    assert untouched.sum() == 8 * 64 - 130  # padding is written nowhere
    q = (torch.randn(132, 8, 512), torch.randn(132, 8, 64))
    out, lse = ours.forward_mqa(q, cache, metadata, None)
    assert out.shape == (132, 8, 512) and lse.shape == (132, 8) and cache.dtype == dtype
    tolerance = 0.07 if kind == "fp8_ds_mla" else 1e-6
    torch.testing.assert_close(out[:130], latent[:130, None].expand(130, 8, 512), rtol=tolerance, atol=tolerance / 10)
    assert (out[130:] == 0).all() and (lse[130:] == -torch.inf).all()


def test_an_empty_cache_is_not_written(attention):
    rows = torch.zeros(1, 512), torch.zeros(1, 64)
    impl(attention).do_kv_cache_update(*rows, torch.zeros(0), torch.zeros(1), "auto", torch.ones(1), skip_scale=True)


def indexer_op(attention, k_dim=128):
    return SimpleNamespace(
        topk_indices_buffer=torch.full((1024, 16), 7, dtype=torch.int32),
        topk_tokens=16,
        k_cache=SimpleNamespace(prefix="k_cache", kv_cache=torch.full((24, 64, k_dim), torch.nan)),
    )


def test_the_profiling_run_touches_nothing(attention):
    op = indexer_op(attention)
    assert attention.cpu.choose(op, None, None, None) is op.topk_indices_buffer
    assert (op.topk_indices_buffer == 7).all()


@pytest.mark.parametrize("at_a_time", [256, 7])
def test_each_token_chooses_among_its_own_past(attention, monkeypatch, at_a_time):
    monkeypatch.setattr(attention.cpu, "TOKENS_AT_A_TIME", at_a_time)
    op = indexer_op(attention)
    lengths = [130, 3, 64]
    keys = [torch.randn(n, 128) for n in lengths]
    # the cache holds all tokens but the last 40, 1 and 64, which are this batch
    common = batch(lengths, [40, 1, 64])
    cache, table = op.k_cache.kv_cache, common.block_table_tensor
    for r, (length, n) in enumerate(zip(lengths, [40, 1, 64], strict=True)):
        for p in range(length - n):
            cache[table[r, p // 64], p % 64] = keys[r][p]
    attention.context.attn_metadata = {"k_cache": build(attention, common)}
    q, weights = torch.randn(105, 4, 128), torch.randn(105, 4)
    k = torch.cat([keys[0][90:], keys[1][2:], keys[2]])
    attention.cpu.choose(op, q, k, weights)
    requests = [(0, p) for p in range(90, 130)] + [(1, 2)] + [(2, p) for p in range(64)]
    for t, (request, position) in enumerate(requests):
        past = keys[request][: position + 1].double()
        scores = (weights[t].double()[:, None] * (q[t].double() @ past.T).clamp(min=0)).sum(0)
        want = set(scores.topk(min(16, position + 1)).indices.tolist())
        chosen = op.topk_indices_buffer[t].tolist()
        assert {c for c in chosen if c >= 0} == want
        assert chosen.count(-1) == max(0, 16 - len(past))
    assert (op.topk_indices_buffer[105:] == 7).all()
