"""cpu_linear on a stand-in for vllm.model_executor.layers.linear."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shim import ledger
from shim.patch import ShimError, State
from shim.patches.cpu_linear import PATCH


class Packing:
    """As in 0.28."""

    def process_weights_after_loading(self, layer):
        layer.weight = None


class Skipping:
    """As in 0.29 and later."""

    def process_weights_after_loading(self, layer):
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            return
        layer.weight = None


def linear(stub, method: type, model_type: str = "glm_moe_dsa", cpu: bool = True):
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)))
    return stub(
        PATCH,
        UnquantizedLinearMethod=type("UnquantizedLinearMethod", (), dict(vars(method))),
        get_current_vllm_config=lambda: config,
        current_platform=SimpleNamespace(is_cpu=lambda: cpu),
    )


def layer(name: str) -> SimpleNamespace:
    return SimpleNamespace(prefix=f"model.layers.0.self_attn.{name}", weight="weight")


def test_kv_b_proj_of_glm5_keeps_its_weight_and_works(stub, switch_on):
    module = linear(stub, Packing)
    engine = switch_on(PATCH)
    assert engine.records[PATCH.name].state is State.APPLIED
    engine.check()
    kv_b = layer("kv_b_proj")
    module.UnquantizedLinearMethod().process_weights_after_loading(kv_b)
    assert kv_b.weight == "weight"
    assert kv_b.cpu_linear is torch.nn.functional.linear
    assert ledger._entries[PATCH.name]["used"]


@pytest.mark.parametrize("name", ["q_b_proj", "not_kv_b_proj"])
def test_other_layers_of_glm5_are_packed(stub, switch_on, name):
    module = linear(stub, Packing)
    switch_on(PATCH)
    other = layer(name)
    module.UnquantizedLinearMethod().process_weights_after_loading(other)
    assert other.weight is None and not hasattr(other, "cpu_linear")


def test_a_layer_without_a_name_is_packed(stub, switch_on):
    module = linear(stub, Packing)
    switch_on(PATCH)
    nameless = SimpleNamespace(weight="weight")
    module.UnquantizedLinearMethod().process_weights_after_loading(nameless)
    assert nameless.weight is None


def test_other_models_are_packed_as_before(stub, switch_on):
    module = linear(stub, Packing, model_type="deepseek_v2")
    switch_on(PATCH)
    kv_b = layer("kv_b_proj")
    module.UnquantizedLinearMethod().process_weights_after_loading(kv_b)
    assert kv_b.weight is None
    assert ledger._entries[PATCH.name]["idle"] == "model_type 'deepseek_v2' is not glm_moe_dsa"
    assert "used" not in ledger._entries[PATCH.name]


def test_a_release_that_does_not_pack_kv_b_proj_is_left_alone(stub, switch_on):
    module = linear(stub, Skipping)
    before = module.UnquantizedLinearMethod.process_weights_after_loading
    record = switch_on(PATCH).records[PATCH.name]
    assert record.state is State.UPSTREAM and "_cpu_skip_gemm_dispatch" in record.detail
    assert module.UnquantizedLinearMethod.process_weights_after_loading is before


def test_on_a_gpu_nothing_is_replaced(stub, switch_on):
    linear(stub, Packing, cpu=False)
    assert switch_on(PATCH).records[PATCH.name].state is State.UNNEEDED


def test_an_unknown_signature_is_named(stub, switch_on):
    linear(stub, type("Method", (), {"process_weights_after_loading": lambda self, layer, dtype: None}))
    with pytest.raises(ShimError, match=r"process_weights_after_loading takes \(self, layer, dtype\)"):
        switch_on(PATCH)


def test_off_by_skip_and_applied_once(stub, off_and_twice):
    off_and_twice(linear(stub, Packing), PATCH)
