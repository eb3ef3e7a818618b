"""Whose kernels run: the choice is made once for GLM-5, and never for another model."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import shim.indexer.choice as choosing
from shim import ledger
from shim.indexer import probe
from shim.patches import indexer_logits, indexer_topk

HEADS = 32
GLM5 = SimpleNamespace(model_type="glm_moe_dsa", index_n_heads=HEADS)
LOGITS, TOPK = indexer_logits.PATCH, indexer_topk.PATCH


def prefill(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits): ...


def paged(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits): ...


def op_module(stub):
    class SparseAttnIndexer:
        def __init__(self, k_cache):
            self.k_cache = k_cache

    return stub(
        LOGITS,
        SparseAttnIndexer=SparseAttnIndexer,
        current_platform=SimpleNamespace(is_cuda=lambda: True),
        fp8_fp4_mqa_logits=prefill,
        fp8_fp4_paged_mqa_logits=paged,
        has_deep_gemm=lambda: False,
        torch=torch,
    )


@pytest.fixture
def both(stub, switch_on, real_ops):
    """indexer_logits and indexer_topk, applied to one module."""
    module = op_module(stub)
    return module, switch_on(LOGITS, TOPK)


def native_answers(monkeypatch, works, because="the test says so"):
    probes = []
    monkeypatch.setattr(probe, "native_works", lambda heads: (probes.append(heads), (works, because))[1])
    return probes


@pytest.mark.parametrize(
    ("mode", "capability", "assumed", "works", "expected"),
    [
        (None, (12, 0), None, True, (False, True)),
        (None, (12, 1), None, False, (True, True)),
        ("auto", (9, 0), None, False, (False, False)),
        ("auto", (9, 0), "12.0", False, (True, True)),
        ("native", (12, 0), None, False, (False, False)),
        ("triton", (9, 0), None, True, (True, True)),
    ],
)
def test_the_choice(both, monkeypatch, mode, capability, assumed, works, expected):
    if mode:
        monkeypatch.setenv("GLM5_SHIM_INDEXER", mode)
    if assumed:
        monkeypatch.setenv("GLM5_SHIM_ASSUME_CAPABILITY", assumed)
    probes = native_answers(monkeypatch, works)
    choice = choosing.choose(capability, GLM5)
    assert (choice.logits, choice.topk) == expected
    expects_probe = mode in (None, "auto") and (capability[0] == 12 or assumed is not None)
    assert probes == ([HEADS] if expects_probe else [])


def test_a_patch_that_is_off_gives_no_kernel(stub, switch_on, real_ops, monkeypatch):
    op_module(stub)
    probes = native_answers(monkeypatch, False)
    switch_on(LOGITS, TOPK, skip=frozenset({"indexer_logits"}))
    choice = choosing.choose((12, 0), GLM5)
    assert (choice.logits, choice.topk, probes) == (False, True, [])


@pytest.fixture
def vllm(monkeypatch):
    """What `settle` reads from vLLM: its current config, and the platform."""
    state = SimpleNamespace(config=None)
    for name, attributes in {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: state.config},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=12, minor=0))
        },
    }.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return state


def test_settled_once_for_glm5_and_never_for_another(both, vllm, monkeypatch):
    module, _ = both
    probes = native_answers(monkeypatch, False, "no SM120 kernels")
    vllm.config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="deepseek_v32")))
    module.SparseAttnIndexer("cache")
    assert probes == [] and not choosing.topk_is_ours() and not module.has_deep_gemm()
    idle = {e["name"]: e["idle"] for e in ledger.entries()}
    assert idle == dict.fromkeys(("indexer_logits", "indexer_topk"), "model_type 'deepseek_v32' is not glm_moe_dsa")
    vllm.config = SimpleNamespace(model_config=SimpleNamespace(hf_config=GLM5))
    for _ in range(3):
        module.SparseAttnIndexer("cache")
    assert probes == [HEADS] and choosing.logits_are_ours() and module.has_deep_gemm()
    vllm.config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="deepseek_mtp")))
    module.SparseAttnIndexer("draft")
    assert choosing.logits_are_ours()
    for entry in ledger.entries():
        assert entry["used"] and entry["detail"] == "no SM120 kernels"
