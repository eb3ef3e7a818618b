"""cpu_rotary on a stand-in for vllm.model_executor.models.deepseek_v2."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shim import ledger
from shim.patch import ShimError, State
from shim.patches.cpu_rotary import PATCH


class Rope(torch.nn.Module):
    """Like vLLM's CustomOp, which chooses its method when it is built."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.ones(2, 2), persistent=False)
        self._forward_method = self.forward_cpu

    def forward(self, *args):
        return self._forward_method(*args)

    def forward_cpu(self, x):
        return "op", x

    def forward_native(self, x):
        return "torch", x


def deepseek_v2(stub, model_type: str, cpu: bool = True, get_rope=None):
    shared = Rope()  # vLLM gives the same one for the same arguments

    def vllms_get_rope(head_size, max_position, is_neox_style=True, rope_parameters=None):
        shared.arguments = (head_size, max_position, is_neox_style)
        return shared

    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)))
    module = stub(
        PATCH,
        get_rope=get_rope or vllms_get_rope,
        get_current_vllm_config=lambda: config,
        current_platform=SimpleNamespace(is_cpu=lambda: cpu),
    )
    return module, shared


def test_glm5_runs_torch_and_the_shared_embedding_runs_the_op(stub, switch_on):
    module, shared = deepseek_v2(stub, "glm_moe_dsa")
    engine = switch_on(PATCH)
    assert engine.records[PATCH.name].state is State.APPLIED
    engine.check()
    rope = module.get_rope(64, max_position=9, is_neox_style=False)
    assert shared.arguments == (64, 9, False)
    assert rope(1) == ("torch", 1)
    assert shared(1) == ("op", 1)
    assert rope.cos_sin_cache is shared.cos_sin_cache
    assert ledger._entries[PATCH.name]["used"]


def test_other_models_get_the_very_same_embedding(stub, switch_on):
    module, shared = deepseek_v2(stub, "deepseek_v2")
    switch_on(PATCH)
    assert module.get_rope(64, max_position=9) is shared
    assert ledger._entries[PATCH.name]["idle"] == "model_type 'deepseek_v2' is not glm_moe_dsa"
    assert "used" not in ledger._entries[PATCH.name]


def test_on_a_gpu_nothing_is_replaced(stub, switch_on):
    module, _ = deepseek_v2(stub, "glm_moe_dsa", cpu=False)
    before = module.get_rope
    assert switch_on(PATCH).records[PATCH.name].state is State.UNNEEDED
    assert module.get_rope is before


def test_an_unknown_signature_is_named(stub, switch_on):
    deepseek_v2(stub, "glm_moe_dsa", get_rope=lambda config: None)
    with pytest.raises(ShimError, match=r"get_rope does not begin with \(head_size\)"):
        switch_on(PATCH)


def test_off_by_skip_and_applied_once(stub, off_and_twice):
    off_and_twice(deepseek_v2(stub, "glm_moe_dsa")[0], PATCH)
