"""indexer_logits on stand-ins of each release era: which calls our kernels serve, and which go to vLLM's own."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from shim.indexer import choice
from shim.kernels.indexer import reference
from shim.patch import ShimError, State
from shim.patches import indexer_builder, indexer_chunks, indexer_graphs, indexer_logits, indexer_topk

HEADS, DIM = 32, 128
LOGITS, TOPK = indexer_logits.PATCH, indexer_topk.PATCH
CUDA = SimpleNamespace(is_cuda=lambda: True)
CPU = SimpleNamespace(is_cuda=lambda: False)


def prefill_016(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits):
    return "theirs"


def paged_016(q_fp8, kv_cache_fp8, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits):
    return "theirs"


def prefill_torch(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke):
    return "theirs"


def paged_torch(q, kv_cache, weights, context_lens, block_tables, max_model_len):
    return "theirs"


def paged_020(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits):
    return "theirs"


def paged_028(
    q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits, indices=None
):
    return "theirs"


def prefill_033(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k):
    return "theirs"


def paged_033(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices=None):
    return "theirs"


ERAS = {
    "0.16": {"fp8_mqa_logits": prefill_016, "fp8_paged_mqa_logits": paged_016},
    "0.17": {
        "fp8_mqa_logits": prefill_016,
        "fp8_paged_mqa_logits": paged_016,
        "fp8_mqa_logits_torch": prefill_torch,
        "fp8_paged_mqa_logits_torch": paged_torch,
    },
    "0.20": {
        "fp8_fp4_mqa_logits": prefill_016,
        "fp8_fp4_paged_mqa_logits": paged_020,
        "has_deep_gemm": lambda: False,
    },
    "0.28": {
        "fp8_fp4_mqa_logits": prefill_016,
        "fp8_fp4_paged_mqa_logits": paged_028,
        "has_deep_gemm": lambda: False,
    },
    "0.33": {
        "fp8_fp4_mqa_logits": prefill_033,
        "fp8_fp4_paged_mqa_logits": paged_033,
        "has_deep_gemm": lambda: False,
    },
}


def op_class():
    class SparseAttnIndexer:
        def __init__(self, k_cache):
            self.k_cache = k_cache

    return SparseAttnIndexer


def op_module(stub, era="0.16", **other):
    return stub(LOGITS, SparseAttnIndexer=op_class(), **({"current_platform": CUDA} | ERAS[era] | other))


def arguments(prefill):
    """The first five arguments of a call, and the reference's answer."""
    torch.manual_seed(0)
    if prefill:
        q, k = (torch.randn(*s).to(torch.float8_e4m3fn) for s in ((5, HEADS, DIM), (64, DIM)))
        weights, scale = torch.randn(5, HEADS), torch.rand(64)
        ks, ke = torch.zeros(5, dtype=torch.int32), torch.arange(60, 65, dtype=torch.int32)
        return [q, (k, scale), weights, ks, ke], reference.mqa_logits(q, k, scale, weights, ks, ke)
    q = torch.randn(2, 2, HEADS, DIM).to(torch.float8_e4m3fn)
    cache = reference.pack_blocks(torch.randn(6, 64, DIM).to(torch.float8_e4m3fn), torch.rand(6, 64)).unsqueeze(2)
    weights, lens = torch.randn(4, HEADS), torch.tensor([100, 3], dtype=torch.int32)
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    return [q, cache, weights, lens, table], reference.paged_mqa_logits(q, cache, weights, lens, table, 128)


def call(module, era, name, given, **change):
    """Calls `name` as this release does, with the later arguments by keyword."""
    values = dict(schedule_metadata=None, max_model_len=128, clean_logits=False, max_seqlen_k=64, indices=None) | change
    q = (given[0], None) if "fp4" in name and not isinstance(given[0], tuple) else given[0]
    later = list(inspect.signature(ERAS[era][name]).parameters)[5:]
    return getattr(module, name)(q, *given[1:], **{n: values[n] for n in later})


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("prefill", [True, False])
def test_our_kernels_serve_and_vllms_own_get_the_same_arguments(stub, switch_on, chosen, kernels, era, prefill):
    module = op_module(stub, era)
    switch_on(LOGITS)
    for name, (adapter, _) in indexer_logits.FUNCTIONS.items():
        if not hasattr(module, name) or (adapter == "mqa_logits") is not prefill:
            continue
        given, truth = arguments(prefill)
        chosen(logits=False)
        assert call(module, era, name, given) == "theirs"
        chosen()
        assert torch.equal(call(module, era, name, given), truth)
        if era == "0.33" and prefill:
            assert kernels[-1][2] == {"compressed_columns": 64}


MXFP4 = (torch.zeros(5, HEADS, DIM // 2, dtype=torch.int8), torch.zeros(5, HEADS, dtype=torch.int32))


@pytest.mark.parametrize(
    ("prefill", "change"),
    [
        (True, {"q": MXFP4}),
        (True, {"kv": (torch.zeros(64, DIM, dtype=torch.int8), torch.zeros(64, dtype=torch.int32))}),
        (True, {"clean_logits": True}),
        (False, {"q": MXFP4}),
        (False, {"cache": torch.zeros(6, 64, 1, 68, dtype=torch.uint8)}),
        (False, {"cache": torch.zeros(6, 256, 1, 132, dtype=torch.uint8)}),
        (False, {"indices": torch.zeros(2, dtype=torch.int32)}),
        (False, {"clean_logits": True}),
    ],
)
def test_calls_that_our_kernels_cannot_serve_go_to_vllms_own(stub, switch_on, chosen, kernels, prefill, change):
    module, change = op_module(stub, "0.28"), dict(change)
    switch_on(LOGITS)
    chosen()
    name = "fp8_fp4_mqa_logits" if prefill else "fp8_fp4_paged_mqa_logits"
    given, _ = arguments(prefill)
    for place, argument in enumerate(("q", "kv" if prefill else "cache")):
        given[place] = change.pop(argument, given[place])
    assert call(module, "0.28", name, given, **change) == "theirs"
    assert kernels == []


def test_has_deep_gemm_is_true_where_the_logits_are_ours(stub, switch_on, chosen):
    module = op_module(stub, "0.20")
    switch_on(LOGITS)
    assert module.has_deep_gemm() is False
    chosen(logits=False)
    assert module.has_deep_gemm() is False
    chosen()
    assert module.has_deep_gemm() is True


@pytest.mark.parametrize(("era", "name"), [(era, name) for era, names in ERAS.items() for name in names])
def test_building_an_indexer_settles_and_finds_a_stolen_name(stub, switch_on, monkeypatch, era, name):
    module = op_module(stub, era)
    switch_on(LOGITS)
    settled = []
    monkeypatch.setattr(choice, "settle", lambda: settled.append("settled"))
    assert module.SparseAttnIndexer("cache").k_cache == "cache" and settled == ["settled"]
    setattr(module, name, ERAS[era][name])
    with pytest.raises(ShimError, match=f"indexer_logits was undone: {module.__name__}.{name} is not the shim's"):
        module.SparseAttnIndexer("cache")


@pytest.mark.parametrize("era", ERAS)
def test_logits_off_and_twice(stub, off_and_twice, era):
    off_and_twice(op_module(stub, era), LOGITS)


def test_logits_off_leaves_every_name(stub, switch_on):
    module = op_module(stub, "0.17")
    switch_on(LOGITS, skip=frozenset({LOGITS.name}))
    assert {n: getattr(module, n) for n in ERAS["0.17"]} == ERAS["0.17"]


def test_logits_unknown_signature(stub, switch_on):
    op_module(stub, fp8_mqa_logits=lambda q, kv, weights: None)
    with pytest.raises(ShimError, match=r"fp8_mqa_logits takes \(q, kv, weights\), expected \(q, kv, weights, cu_"):
        switch_on(LOGITS)


def test_logits_gone(stub, switch_on):
    stub(LOGITS, SparseAttnIndexer=op_class(), current_platform=CUDA)
    with pytest.raises(ShimError, match="has no fp8_mqa_logits and fp8_paged_mqa_logits or fp8_fp4_mqa_logits and"):
        switch_on(LOGITS)


@pytest.mark.parametrize("patch", [LOGITS, TOPK, indexer_builder.PATCH, indexer_graphs.PATCH, indexer_chunks.PATCH])
def test_unneeded_off_cuda(stub, switch_on, patch):
    stub(patch, current_platform=CPU)
    assert switch_on(patch).records[patch.name].state is State.UNNEEDED


def test_a_bad_variable_stops(stub, switch_on, monkeypatch):
    monkeypatch.setenv("GLM5_SHIM_INDEXER", "cuda")
    op_module(stub)
    with pytest.raises(ShimError, match="GLM5_SHIM_INDEXER is 'cuda'; expected native, triton or auto"):
        switch_on(LOGITS)
