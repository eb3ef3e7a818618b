"""cpu_backend on a stand-in for vllm.platforms.cpu."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from shim import ledger
from shim.patch import ShimError, State
from shim.patches import cpu_backend
from shim.patches.cpu_backend import BACKEND, PATCH

SPARSE = SimpleNamespace(use_sparse=True, use_mla=True, kv_cache_dtype="auto")
DENSE = SimpleNamespace(use_sparse=False, use_mla=True)


def platform(logger: logging.Logger) -> type:
    class CpuPlatform:
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            if attn_selector_config.use_sparse:
                raise NotImplementedError("Sparse Attention is not supported on CPU.")
            return f"{cls.__name__}.{num_heads}"

        @classmethod
        def check_and_update_config(cls, vllm_config):
            vllm_config.cache_config.block_size = 16
            logger.info("something else")
            logger.info(
                "MLA is enabled on a non-GPU platform; forcing chunked prefill and prefix caching to be disabled."
            )
            vllm_config.scheduler_config.enable_chunked_prefill = False
            vllm_config.cache_config.enable_prefix_caching = False
            vllm_config.scheduler_config.max_num_batched_tokens = 2048

    return CpuPlatform


def config(model_type: str | None) -> SimpleNamespace:
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)) if model_type else None
    return SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=64),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=16),
        compilation_config=SimpleNamespace(mode="compile"),
    )


def settings(vllm_config: SimpleNamespace) -> tuple:
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    return (
        scheduler.enable_chunked_prefill,
        cache.enable_prefix_caching,
        scheduler.max_num_batched_tokens,
        cache.block_size,
    )


@pytest.fixture
def patched(stub, switch_on, monkeypatch):
    """The patched class; `patched.current` is what vLLM calls the current config."""
    logger = logging.getLogger("stub.platforms.cpu")
    module = stub(PATCH, CpuPlatform=platform(logger), logger=logger)
    engine = switch_on(PATCH)
    assert engine.records[PATCH.name].state is State.APPLIED
    engine.check()
    vllm_config = ModuleType("vllm.config")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", vllm_config)
    holder = SimpleNamespace(cls=module.CpuPlatform, current=None, logger=logger)
    vllm_config.get_current_vllm_config_or_none = lambda: holder.current
    vllm_config.CompilationMode = SimpleNamespace(NONE="none")
    return holder


def test_glm5_gets_our_backend(patched):
    patched.current = config("glm_moe_dsa")
    assert patched.cls.get_attn_backend_cls(None, SPARSE, num_heads=8) == BACKEND
    assert ledger._entries[PATCH.name]["used"]


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_a_cache_dtype_that_the_reference_cannot_read_is_refused(patched, dtype):
    patched.current = config("glm_moe_dsa")
    selector = SimpleNamespace(**vars(SPARSE) | {"kv_cache_dtype": dtype})
    with pytest.raises(ValueError, match=f"--kv-cache-dtype {dtype} is not for GLM-5 on a CPU; take one of auto"):
        patched.cls.get_attn_backend_cls(None, selector)


def test_the_backend_path_is_where_the_class_is():
    module, name = BACKEND.rsplit(".", 1)
    assert (module, name) == ("shim.attention.backend", "ReferenceMLASparseBackend")


@pytest.mark.parametrize("current", [config("deepseek_v32"), config(None), None])
def test_other_sparse_models_are_refused_as_before(patched, current):
    patched.current = current
    with pytest.raises(NotImplementedError, match="not supported on CPU"):
        patched.cls.get_attn_backend_cls(None, SPARSE)


def test_vllm_chooses_dense_attention_for_the_same_class(patched):
    patched.current = config("glm_moe_dsa")
    subclass = type("ZenCpuPlatform", (patched.cls,), {})
    assert subclass.get_attn_backend_cls(None, DENSE, 4) == "ZenCpuPlatform.4"


def test_glm5_keeps_its_settings_after_any_number_of_calls(patched):
    vllm_config = config("glm_moe_dsa")
    for _ in range(2):
        patched.cls.check_and_update_config(vllm_config)
        assert settings(vllm_config) == (True, True, 64, 64)
        assert vllm_config.compilation_config.mode == "none"
    assert ledger._entries[PATCH.name]["used"]


def test_what_was_switched_off_stays_off(patched):
    vllm_config = config("glm_moe_dsa")
    vllm_config.scheduler_config.enable_chunked_prefill = vllm_config.cache_config.enable_prefix_caching = False
    patched.cls.check_and_update_config(vllm_config)
    assert settings(vllm_config) == (False, False, 64, 64)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "llama", None])
def test_other_models_get_vllms_settings(patched, model_type):
    vllm_config = config(model_type)
    patched.cls.check_and_update_config(vllm_config)
    assert settings(vllm_config) == (False, False, 2048, 16)
    assert vllm_config.compilation_config.mode == "compile"
    assert ledger._entries[PATCH.name]["idle"] == f"model_type {model_type!r} is not glm_moe_dsa"
    assert "used" not in ledger._entries[PATCH.name]


@pytest.mark.parametrize(("model_type", "lines"), [("glm_moe_dsa", 0), ("deepseek_v2", 1)])
def test_the_log_does_not_report_settings_that_are_put_back(patched, caplog, model_type, lines):
    with caplog.at_level(logging.INFO):
        patched.cls.check_and_update_config(config(model_type))
    assert sum("forcing chunked prefill" in line for line in caplog.messages) == lines
    assert "something else" in caplog.messages
    assert patched.logger.filters == []


def test_an_unknown_signature_is_not_touched(stub, switch_on):
    class CpuPlatform:
        @classmethod
        def get_attn_backend_cls(cls, selector): ...

        @classmethod
        def check_and_update_config(cls, vllm_config): ...

    before = vars(CpuPlatform)["get_attn_backend_cls"]
    stub(PATCH, CpuPlatform=CpuPlatform, logger=logging.getLogger("stub"))
    with pytest.raises(ShimError, match=r"get_attn_backend_cls takes \(cls, selector\)"):
        switch_on(PATCH)
    assert vars(CpuPlatform)["get_attn_backend_cls"] is before


def test_a_missing_method_is_named(stub):
    verdict = cpu_backend.probe(stub(PATCH, CpuPlatform=type("CpuPlatform", (), {})))
    assert verdict.action.value == "unknown" and "get_attn_backend_cls does not exist" in verdict.because


def test_off_by_skip_and_applied_once(stub, off_and_twice):
    logger = logging.getLogger("stub.platforms.cpu")
    off_and_twice(stub(PATCH, CpuPlatform=platform(logger), logger=logger), PATCH)
