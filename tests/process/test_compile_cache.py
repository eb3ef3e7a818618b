"""A shimmed and a plain run in one cache directory: vLLM names the directory of a graph by its config's hash, and the
seal is in that config."""

from __future__ import annotations

import json

HASHES = """
import json, sys, types
from types import SimpleNamespace
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)
from vllm.config import VllmConfig

# worker_seal's replacement around a create_engine_config that needs no model
shim, config = sys.modules.get("shim.process"), []
if shim is not None and shim.engine() is not None:
    from shim.patches import worker_seal

    stub = types.ModuleType("stub")
    stub.EngineArgs = type("EngineArgs", (), {"create_engine_config": lambda self, usage_context, headless: config[-1]})
    create = worker_seal.apply(stub)[worker_seal.SYMBOL]
else:
    create = lambda self, usage_context=None, headless=False: config[-1]

def of(model_type):
    one = VllmConfig(additional_config={"theirs": 1})
    one.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type), compute_hash=lambda: "same")
    config.append(one)
    return create(None).compute_hash()

print(json.dumps([of("glm_moe_dsa"), of("llama")]))
"""


def test_each_patch_set_has_graphs_of_its_own(python):
    def hashes(**variables: str) -> list[str]:
        done = python("-c", HASHES, **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    plain = hashes(GLM5_SHIM_OFF="1", PYTHONPATH="")
    shimmed, again = hashes(), hashes()
    other = hashes(GLM5_SHIM_SKIP="kv_cache_dtype")
    assert shimmed == again
    assert len({plain[0], shimmed[0], other[0]}) == 3
    assert plain[1] == shimmed[1] == other[1]  # a Llama's graphs are shared
