"""The patches of the indexer's metadata builder: warm-up and schedule, graphs, chunks."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from shim.patch import ShimError, State
from shim.patches import indexer_builder, indexer_chunks, indexer_graphs, indexer_topk

HEADS = 32
CUDA = SimpleNamespace(is_cuda=lambda: True)
GLM5 = SimpleNamespace(model_type="glm_moe_dsa", index_n_heads=HEADS)


def builder_class(**methods):
    class DeepseekV32IndexerMetadataBuilder:
        def __init__(self, *args, **kwargs):
            self.vllm_config, self.device = args
            self.max_prefill_buffer_size = 99

    for name, method in methods.items():
        setattr(DeepseekV32IndexerMetadataBuilder, name, method)
    return DeepseekV32IndexerMetadataBuilder


def config(**parallel):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=GLM5, hf_text_config=SimpleNamespace(index_n_heads=HEADS, index_topk=2048), max_model_len=50
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        speculative_config=SimpleNamespace(num_speculative_tokens=1),
        parallel_config=SimpleNamespace(**parallel),
    )


def builder_module(stub, patch, **other):
    fields = {
        "DeepseekV32IndexerMetadataBuilder": builder_class(),
        "current_platform": CUDA,
        "has_deep_gemm": lambda: True,
    }
    return stub(patch, **(fields | other))


def builder_with_topk(stub, switch_on):
    stub(indexer_topk.PATCH, torch=torch, current_platform=CUDA)
    module = builder_module(stub, indexer_builder.PATCH)
    return module, switch_on(indexer_topk.PATCH, indexer_builder.PATCH)


def test_the_builder_warms_up_once_and_asks_for_no_schedule(stub, switch_on, chosen, kernels, real_ops):
    module, _ = builder_with_topk(stub, switch_on)
    chosen(logits=False, topk=False)
    module.DeepseekV32IndexerMetadataBuilder(config(), "cpu")
    assert kernels == [] and module.has_deep_gemm() is True
    chosen()
    for _ in range(2):
        module.DeepseekV32IndexerMetadataBuilder(config(), "cpu")
    assert [(name, args) for name, args, _ in kernels] == [
        ("indexer.warm_up", (HEADS, 4, 2, 50, "cpu")),
        ("topk.warm_up", (2048, 64, 99, "cpu")),
        ("topk.Workspace", (64, 99, "cpu")),
    ]
    assert module.has_deep_gemm() is False
    vars(torch.ops._C).pop("persistent_topk")  # the next look-up finds vLLM's own again
    with pytest.raises(ShimError, match="indexer_topk was undone: .*persistent_topk is not the shim's"):
        module.DeepseekV32IndexerMetadataBuilder(config(), "cpu")


def test_native_logits_keep_their_schedule(stub, switch_on, chosen, kernels, real_ops):
    module, _ = builder_with_topk(stub, switch_on)
    chosen(logits=False)
    module.DeepseekV32IndexerMetadataBuilder(config(enable_dbo=True), "cpu")
    assert module.has_deep_gemm() is True
    assert [name for name, _, _ in kernels] == ["topk.warm_up"]  # two micro-batches at once share no workspace


def test_a_stolen_has_deep_gemm_is_found_before_warm_up(stub, switch_on, chosen, kernels):
    module = builder_module(stub, indexer_builder.PATCH)
    switch_on(indexer_builder.PATCH)
    chosen(topk=False)
    module.has_deep_gemm = lambda: True
    with pytest.raises(ShimError, match="indexer_builder was undone: .*has_deep_gemm is not the shim's"):
        module.DeepseekV32IndexerMetadataBuilder(config(), "cpu")
    assert kernels == []


def test_a_builder_without_has_deep_gemm(stub, off_and_twice):
    """Up to 0.18."""
    module = builder_module(stub, indexer_builder.PATCH)
    del module.has_deep_gemm
    off_and_twice(module, indexer_builder.PATCH)
    assert not hasattr(module, "has_deep_gemm")


def test_builder_off_and_twice(stub, off_and_twice):
    off_and_twice(builder_module(stub, indexer_builder.PATCH), indexer_builder.PATCH)


def test_builder_unknown(stub, switch_on):
    class Other:
        def __init__(self, spec):
            pass

    builder_module(stub, indexer_builder.PATCH, DeepseekV32IndexerMetadataBuilder=Other)
    with pytest.raises(ShimError, match=r"__init__ takes \(self, spec\), expected \(self, \*args, \*\*kwargs\) or"):
        switch_on(indexer_builder.PATCH)


# indexer_graphs


def is_deep_gemm_supported():
    return False


@classmethod
def graphs_018(cls, vllm_config, kv_cache_spec):
    return "UNIFORM_BATCH" if is_deep_gemm_supported() else "NEVER"


@classmethod
def graphs_019(cls, vllm_config, kv_cache_spec):
    return "UNIFORM_BATCH"


def graphs_module(stub, method):
    support = SimpleNamespace(UNIFORM_BATCH="UNIFORM_BATCH")
    cls = builder_class(get_cudagraph_support=method)
    return builder_module(stub, indexer_graphs.PATCH, DeepseekV32IndexerMetadataBuilder=cls, AttentionCGSupport=support)


def test_graphs_where_the_logits_are_ours(stub, switch_on, chosen):
    module = graphs_module(stub, graphs_018)
    switch_on(indexer_graphs.PATCH)
    ask = module.DeepseekV32IndexerMetadataBuilder.get_cudagraph_support
    assert ask(None, None) == "NEVER"
    chosen()
    assert ask(None, None) == "UNIFORM_BATCH"


def test_graphs_unneeded_off_and_unknown(stub, switch_on, off_and_twice):
    off_and_twice(graphs_module(stub, graphs_018), indexer_graphs.PATCH)
    graphs_module(stub, graphs_019)
    assert switch_on(indexer_graphs.PATCH).records["indexer_graphs"].state is State.UNNEEDED
    graphs_module(stub, classmethod(lambda cls: None))
    with pytest.raises(ShimError, match=r"get_cudagraph_support takes \(cls\), expected \(cls, vllm_config"):
        switch_on(indexer_graphs.PATCH)


# indexer_chunks

Chunk = dataclasses.make_dataclass("Chunk", sorted(indexer_chunks.FIELDS))


def chunk(rows, keys, first=7):
    values = dict.fromkeys(indexer_chunks.FIELDS)
    ks = torch.arange(rows)
    return Chunk(**values | dict(cu_seqlen_ks=ks, cu_seqlen_ke=ks + 1, token_start=first, token_end=first + rows,
                                 total_seq_lens=torch.tensor(keys), block_table="table"))  # fmt: skip


def chunks_module(stub, monkeypatch, bounded=False, **other):
    names = {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": 1} if bounded else {}
    envs = ModuleType("vllm.envs")
    envs.environment_variables = names
    vllm = ModuleType("vllm")
    vllm.envs = envs
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return SimpleNamespace(prefill=common_attn_metadata)

    fields = {
        "DeepseekV32IndexerMetadataBuilder": builder_class(build=build),
        "DeepseekV32IndexerPrefillChunkMetadata": Chunk,
    }
    return builder_module(stub, indexer_chunks.PATCH, **(fields | other))


@pytest.mark.parametrize(("rows", "keys"), [(8192, 1 << 20), (1, 1 << 30), (100, 100), (513, 1 << 18), (512, 1 << 18)])
def test_a_chunk_in_parts_is_the_chunk(rows, keys):
    whole = chunk(rows, keys)
    parts = list(indexer_chunks.cut(whole))
    assert parts[0].token_start == whole.token_start and parts[-1].token_end == whole.token_end
    assert all(a.token_end == b.token_start for a, b in itertools.pairwise(parts))
    for part in parts:
        size = part.token_end - part.token_start
        assert size == len(part.cu_seqlen_ks) == len(part.cu_seqlen_ke)
        assert 4 * size * keys <= 512 << 20 or size == 1
        assert (part.block_table, part.total_seq_lens) == ("table", keys)
    assert torch.equal(torch.cat([p.cu_seqlen_ks for p in parts]), whole.cu_seqlen_ks)
    assert torch.equal(torch.cat([p.cu_seqlen_ke for p in parts]), whole.cu_seqlen_ke)
    assert (len(parts) == 1) is (4 * rows * keys <= 512 << 20 or rows == 1)


def test_chunks_are_cut_where_the_logits_are_ours(stub, switch_on, chosen, monkeypatch):
    module = chunks_module(stub, monkeypatch)
    switch_on(indexer_chunks.PATCH)
    builder = module.DeepseekV32IndexerMetadataBuilder(config(), "cpu")
    built = [len(builder.build(0, SimpleNamespace(chunks=[chunk(8192, 1 << 20)])).prefill.chunks)]
    chosen()
    built.append(len(builder.build(0, SimpleNamespace(chunks=[chunk(8192, 1 << 20)])).prefill.chunks))
    assert built == [1, 64] and builder.build(0, None).prefill is None


def test_chunks_unneeded_off_and_unknown(stub, switch_on, off_and_twice, monkeypatch):
    off_and_twice(chunks_module(stub, monkeypatch), indexer_chunks.PATCH)
    chunks_module(stub, monkeypatch, bounded=True)
    assert switch_on(indexer_chunks.PATCH).records["indexer_chunks"].state is State.UNNEEDED
    other = dataclasses.make_dataclass("Chunk", ["rows"])
    chunks_module(stub, monkeypatch, DeepseekV32IndexerPrefillChunkMetadata=other)
    with pytest.raises(ShimError, match=r"has \['rows'\], expected \['block_table'"):
        switch_on(indexer_chunks.PATCH)
