"""closing_gate and worker_seal: no process serves GLM-5 without the whole shim."""

from __future__ import annotations

import importlib
import json
import pickle
from types import SimpleNamespace

import pytest

from shim import ledger, process
from shim.patch import Patch, ShimError, State, Verdict
from shim.patches import closing_gate, worker_seal

GLM5 = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="glm_moe_dsa")))
LLAMA = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")))


def worker_base():
    class WorkerWrapperBase:
        def __init__(self, vllm_config):
            self.vllm_config = vllm_config

        def initialize_from_config(self, kv_cache_configs):
            return ("initialized", kv_cache_configs)

    return WorkerWrapperBase


def arg_utils(vllm_config):
    class EngineArgs:
        def create_engine_config(self, usage_context=None, headless=False):
            return SimpleNamespace(**vars(vllm_config), additional_config={"theirs": 1})

    return EngineArgs


def other(**changes) -> Patch:
    fields = {"name": "other", "target": "stub_other", "why": "", "delete": "", "tested": ""}
    return Patch(**(fields | {"probe": lambda m: Verdict.apply(), "apply": lambda m: {}} | changes))


@pytest.fixture
def worker(stub):
    return stub(closing_gate.PATCH, WorkerWrapperBase=worker_base())


def entry(name: str) -> dict:
    return next(e for e in ledger.entries() if e["name"] == name)


def test_a_whole_worker_passes(worker, switch_on):
    switch_on(closing_gate.PATCH)
    assert worker.WorkerWrapperBase(GLM5).initialize_from_config([1]) == ("initialized", [1])
    assert entry("closing_gate")["used"]


def test_a_worker_with_a_failed_patch_refuses_glm5_and_serves_llama(worker, switch_on, write_module):
    name = write_module("stub_other", "")
    engine = switch_on(closing_gate.PATCH, other(probe=lambda m: Verdict.unknown("renamed")))
    with pytest.raises(ShimError):
        importlib.import_module(name)  # and vLLM swallows this
    assert engine.records["other"].state is State.FAILED
    with pytest.raises(ShimError, match="other is failed: renamed"):
        worker.WorkerWrapperBase(GLM5).initialize_from_config([1])
    assert worker.WorkerWrapperBase(LLAMA).initialize_from_config([1]) == ("initialized", [1])
    assert "llama" in entry("closing_gate")["idle"]


def test_a_worker_whose_patch_was_undone_refuses(worker, switch_on, write_module):
    name = write_module("stub_other", "def f(): return 1\n")
    switch_on(closing_gate.PATCH, other(replaces=("f",), apply=lambda m: {"f": lambda: 2}))
    importlib.import_module(name).f = lambda: 1
    with pytest.raises(ShimError, match="other was undone"):
        worker.WorkerWrapperBase(GLM5).initialize_from_config([1])


def test_gate_off_by_skip(worker, switch_on):
    original = worker.WorkerWrapperBase.initialize_from_config
    switch_on(closing_gate.PATCH, skip=frozenset({"closing_gate"}))
    assert worker.WorkerWrapperBase.initialize_from_config is original


def test_gate_unknown_signature(stub, switch_on):
    stub(
        closing_gate.PATCH,
        WorkerWrapperBase=type("WorkerWrapperBase", (), {"initialize_from_config": lambda self, a, b: 0}),
    )
    with pytest.raises(
        ShimError, match=r"initialize_from_config takes \(self, a, b\), expected \(self, kv_cache_configs\)"
    ):
        switch_on(closing_gate.PATCH)


def test_the_config_of_glm5_alone_has_the_seal(stub, switch_on):
    for vllm_config, sealed in ((GLM5, True), (LLAMA, False)):
        module = stub(worker_seal.PATCH, EngineArgs=arg_utils(vllm_config))
        engine = switch_on(worker_seal.PATCH)
        config = module.EngineArgs().create_engine_config()
        expected = {"theirs": 1, "glm5_shim": engine.seal} if sealed else {"theirs": 1}
        assert config.additional_config == expected
        json.dumps(config.additional_config)  # vLLM hashes this text
        assert bool(entry("worker_seal").get("used")) or not sealed


def test_the_seal_is_accepted_where_the_shim_is_the_same(stub, switch_on):
    module = stub(worker_seal.PATCH, EngineArgs=arg_utils(GLM5))
    switch_on(worker_seal.PATCH)
    config = module.EngineArgs().create_engine_config()
    sent = pickle.dumps(config.additional_config)
    assert pickle.loads(sent) == config.additional_config


def test_the_seal_refuses_a_process_without_the_shim(stub, switch_on, monkeypatch):
    module = stub(worker_seal.PATCH, EngineArgs=arg_utils(GLM5))
    switch_on(worker_seal.PATCH)
    sent = pickle.dumps(module.EngineArgs().create_engine_config().additional_config)
    monkeypatch.setattr(process, "_engine", None)
    with pytest.raises(ShimError, match="started without the shim"):
        pickle.loads(sent)


def test_the_seal_refuses_another_patch_set(stub, switch_on):
    module = stub(worker_seal.PATCH, EngineArgs=arg_utils(GLM5))
    switch_on(worker_seal.PATCH)
    sent = pickle.dumps(module.EngineArgs().create_engine_config().additional_config)
    switch_on(worker_seal.PATCH, skip=frozenset({"worker_seal"}))
    with pytest.raises(ShimError, match="same GLM5_SHIM_SKIP everywhere"):
        pickle.loads(sent)


def test_seal_off_by_skip(stub, switch_on):
    module = stub(worker_seal.PATCH, EngineArgs=arg_utils(GLM5))
    switch_on(worker_seal.PATCH, skip=frozenset({"worker_seal"}))
    assert module.EngineArgs().create_engine_config().additional_config == {"theirs": 1}


def test_seal_unknown_signature(stub, switch_on):
    stub(worker_seal.PATCH, EngineArgs=type("EngineArgs", (), {"create_engine_config": lambda self: 0}))
    with pytest.raises(ShimError, match="create_engine_config takes"):
        switch_on(worker_seal.PATCH)
