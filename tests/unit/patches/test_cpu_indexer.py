"""cpu_indexer on a stand-in for vllm.model_executor.models.deepseek_v2."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from shim import ledger
from shim.patch import ShimError, State
from shim.patches import cpu_indexer
from shim.patches.cpu_indexer import PATCH

PATCH_ALONE = PATCH.__class__(**{**vars(PATCH), "needs": ()})


def deepseek_v2(stub, cpu: bool = True, model_type: str = "glm_moe_dsa", **changes):
    class DeepseekV32IndexerCache:
        def __init__(self, head_dim, dtype, prefix, cache_config):
            self.head_dim, self.dtype, self.prefix, self.cache_config = head_dim, dtype, prefix, cache_config

        def get_attn_backend(self):
            return "vllm's"

    def per_token_group_quant_fp8(x, group_size, eps=1e-10, column_major_scales=False, use_ue8m0=None):
        return "quantised", group_size

    model = SimpleNamespace(
        hf_config=SimpleNamespace(model_type=model_type),
        hf_text_config=SimpleNamespace(index_head_dim=128),
        dtype=torch.bfloat16,
    )
    attributes = {
        "DeepseekV32IndexerCache": DeepseekV32IndexerCache,
        "per_token_group_quant_fp8": per_token_group_quant_fp8,
        "current_platform": SimpleNamespace(is_cpu=lambda: cpu),
        "get_current_vllm_config": lambda: SimpleNamespace(model_config=model),
    }
    return stub(PATCH, **{**attributes, **changes})


@pytest.fixture
def our_backend(monkeypatch):
    module = ModuleType("shim.indexer.cpu")
    module.ReferenceIndexerBackend = object()
    package = ModuleType("shim.indexer")
    package.cpu = module
    monkeypatch.setitem(sys.modules, "shim.indexer", package)
    monkeypatch.setitem(sys.modules, "shim.indexer.cpu", module)
    return module.ReferenceIndexerBackend


def test_glm5_keeps_keys_and_queries_in_the_models_dtype(stub, switch_on, our_backend):
    module = deepseek_v2(stub)
    engine = switch_on(PATCH_ALONE)
    assert engine.records[PATCH.name].state is State.APPLIED
    engine.check()
    cache = module.DeepseekV32IndexerCache(head_dim=132, dtype=torch.uint8, prefix="a.k_cache", cache_config="c")
    assert (cache.head_dim, cache.dtype, cache.prefix, cache.cache_config) == (128, torch.bfloat16, "a.k_cache", "c")
    assert cache.get_attn_backend() is our_backend
    x = torch.randn(6, 128)
    values, scale = module.per_token_group_quant_fp8(x, 128, column_major_scales=False, use_ue8m0=True)
    assert values is x
    assert scale.shape == (6, 1) and (scale == 1).all()
    assert ledger._entries[PATCH.name]["used"]


def test_other_models_get_vllms_own(stub, switch_on):
    module = deepseek_v2(stub, model_type="deepseek_v32")
    switch_on(PATCH_ALONE)
    cache = module.DeepseekV32IndexerCache(132, torch.uint8, "a.k_cache", "c")
    assert (cache.head_dim, cache.dtype) == (132, torch.uint8)
    assert cache.get_attn_backend() == "vllm's"
    assert module.per_token_group_quant_fp8(torch.zeros(2, 128), 64) == ("quantised", 64)
    assert ledger._entries[PATCH.name]["idle"] == "model_type 'deepseek_v32' is not glm_moe_dsa"
    assert "used" not in ledger._entries[PATCH.name]


def test_on_a_gpu_nothing_is_replaced(stub, switch_on):
    module = deepseek_v2(stub, cpu=False)
    before = dict(vars(module.DeepseekV32IndexerCache))
    engine = switch_on(PATCH_ALONE)
    assert engine.records[PATCH.name].state is State.UNNEEDED
    assert dict(vars(module.DeepseekV32IndexerCache)) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"DeepseekV32IndexerCache": type("C", (), {"__init__": lambda self, dim: None})},
            r"__init__ takes \(self, dim\)",
        ),
        ({"per_token_group_quant_fp8": lambda tensor, group_size: None}, "per_token_group_quant_fp8 does not begin"),
    ],
)
def test_an_unknown_signature_is_named(stub, switch_on, changes, named):
    deepseek_v2(stub, **changes)
    with pytest.raises(ShimError, match=named):
        switch_on(PATCH_ALONE)


def test_the_op_must_stand_first(stub, switch_on):
    assert PATCH.needs == ("cpu_indexer_op",)
    assert cpu_indexer.probe(deepseek_v2(stub)).action.value == "apply"


def test_off_by_skip_and_applied_once(stub, off_and_twice):
    off_and_twice(deepseek_v2(stub), PATCH_ALONE)
