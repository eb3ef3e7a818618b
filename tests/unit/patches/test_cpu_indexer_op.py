"""cpu_indexer_op on a stand-in for vllm.model_executor.layers.sparse_attn_indexer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from shim import ledger
from shim.patch import ShimError, State
from shim.patches.cpu_indexer_op import PATCH


class CustomOp:
    def forward_native(self, *args, **kwargs):
        raise NotImplementedError

    def forward_cpu(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)


def old_op():
    class SparseAttnIndexer(CustomOp):
        def forward_native(self, hidden_states, q_quant, k, weights):
            return "native"

    return SparseAttnIndexer


def new_op():
    class SparseAttnIndexer(CustomOp):
        def forward_native(self, hidden_states, q_quant, k, weights):
            return self.forward_cpu(hidden_states, q_quant, k, weights)

        def forward_cpu(self, hidden_states, q_quant, k, weights):
            return "cpu"

    return SparseAttnIndexer


@pytest.fixture
def ours(monkeypatch):
    module = ModuleType("shim.indexer.cpu")
    module.ReferenceIndexerBackend = object()
    module.choose = lambda op, q, k, weights: ("chosen", op, q, k, weights)
    package = ModuleType("shim.indexer")
    package.cpu = module
    monkeypatch.setitem(sys.modules, "shim.indexer", package)
    monkeypatch.setitem(sys.modules, "shim.indexer.cpu", module)
    return module


def patched(stub, switch_on, make):
    module = stub(PATCH, SparseAttnIndexer=make(), current_platform=SimpleNamespace(is_cpu=lambda: True))
    engine = switch_on(PATCH)
    assert engine.records[PATCH.name].state is State.APPLIED
    engine.check()
    return module.SparseAttnIndexer()


@pytest.mark.parametrize("make", [old_op, new_op])
@pytest.mark.parametrize("entry", ["forward_native", "forward_cpu"])
def test_our_indexer_serves_glm5(stub, switch_on, ours, make, entry):
    op = patched(stub, switch_on, make)
    op.k_cache = SimpleNamespace(get_attn_backend=lambda: ours.ReferenceIndexerBackend)
    assert getattr(op, entry)("hidden", "q", "k", "w") == ("chosen", op, "q", "k", "w")
    assert ledger._entries[PATCH.name]["used"]


@pytest.mark.parametrize(("make", "answer"), [(old_op, "native"), (new_op, "cpu")])
@pytest.mark.parametrize("entry", ["forward_native", "forward_cpu"])
def test_vllms_own_op_serves_any_other_cache(stub, switch_on, ours, make, answer, entry):
    op = patched(stub, switch_on, make)
    op.k_cache = SimpleNamespace(get_attn_backend=lambda: "vllm's")
    assert getattr(op, entry)("hidden", "q", "k", "w") == answer
    assert ledger._entries[PATCH.name]["idle"] == "the indexer's key cache is not GLM-5's"
    assert "used" not in ledger._entries[PATCH.name]


def test_the_base_class_is_left_alone(stub, switch_on, ours):
    before = CustomOp.forward_cpu
    patched(stub, switch_on, old_op)
    assert CustomOp.forward_cpu is before


def test_on_a_gpu_nothing_is_replaced(stub, switch_on):
    cls = new_op()
    before = dict(vars(cls))
    stub(PATCH, SparseAttnIndexer=cls, current_platform=SimpleNamespace(is_cpu=lambda: False))
    assert switch_on(PATCH).records[PATCH.name].state is State.UNNEEDED
    assert dict(vars(cls)) == before


def test_an_unknown_signature_is_named(stub, switch_on):
    class SparseAttnIndexer(CustomOp):
        def forward_native(self, hidden_states, q, scale, k, weights): ...

    stub(PATCH, SparseAttnIndexer=SparseAttnIndexer, current_platform=SimpleNamespace(is_cpu=lambda: True))
    with pytest.raises(ShimError, match=r"forward_native takes \(self, hidden_states, q, scale, k, weights\)"):
        switch_on(PATCH)


@pytest.mark.parametrize("make", [old_op, new_op])
def test_off_by_skip_and_applied_once(stub, off_and_twice, make):
    module = stub(PATCH, SparseAttnIndexer=make(), current_platform=SimpleNamespace(is_cpu=lambda: True))
    off_and_twice(module, PATCH)
