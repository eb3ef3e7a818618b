"""The GPU platform's patches on the sources of real, unmodified vLLM wheels: one child with the shim, one without."""

from __future__ import annotations

import pytest
from wheels import some

WHEELS = some("0.16.0", "0.33.0", more=("0.23.0", "0.26.0"))
OURS = ["TRITON_MLA_SPARSE"]

LOOK = """
import os
import torch
import vllm.platforms.cuda as cuda
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.config.attention import AttentionConfig

def names(*capability, use_mla=True):
    capability = DeviceCapability(*capability)
    return [b.name for b in cuda._get_backend_priorities(use_mla=use_mla, device_capability=capability)]

def attempt(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"

fields = dict(head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True, has_sink=False)
def choose(use_sparse):
    config = AttentionSelectorConfig(**fields, use_sparse=use_sparse)
    return attempt(cuda.CudaPlatformBase.get_attn_backend_cls, None, config)

cuda.CudaPlatformBase.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(12, 0))
found = {
    "12.0": names(12, 0), "12.1": names(12, 1), "9.0": names(9, 0), "no MLA": names(12, 0, use_mla=False),
    "config": attempt(lambda: AttentionConfig(backend="triton_mla_sparse").backend.name),
    "sparse": choose(True), "dense": choose(False),
}
os.environ["GLM5_SHIM_ASSUME_CAPABILITY"] = "12.0"
found["9.0 assumed 12.0"] = names(9, 0)
for target in dict.fromkeys(r.patch.target for r in process.engine().records.values()):
    if target != "vllm.platforms.cpu":  # on a GPU machine nothing imports it
        importlib.import_module(target)
found["states"] = states()
activate.activate()
process.check()
found["states after a second activation"] = states()
say(found)
"""


@pytest.fixture(scope="module", params=WHEELS)
def looks(request, child):
    # The CPU wheel lies beside these sources; without cpu_packaging its metadata does not count.
    shim = child(LOOK, request.param, GLM5_SHIM_SKIP="cpu_packaging")
    stock = child(LOOK, request.param, GLM5_SHIM_SKIP="cpu_packaging,backend_choice,backend_member")
    return shim, stock


def test_every_patch_finds_what_it_was_written_for(looks):
    states = looks[0]["states"]
    assert states == looks[0]["states after a second activation"]
    applied = {name for name, state in states.items() if state == "applied"}
    assert applied >= {
        "backend_member",
        "backend_choice",
        "gguf_engine_args",
        "gguf_loader",
        "worker_seal",
        "closing_gate",
        "kv_cache_dtype",
    }
    assert set(states.values()) <= {"applied", "unneeded", "upstream", "off", "waiting"}


def test_the_backend_is_first_for_mla_on_12x_and_nowhere_else(looks):
    shim, stock = looks
    for place in ("12.0", "12.1"):
        assert shim[place] == OURS + stock[place]
    assert shim["9.0 assumed 12.0"] == OURS + stock["9.0"]
    for place in ("9.0", "no MLA"):
        assert shim[place] == stock[place]
        assert OURS[0] not in stock[place]


def test_it_can_be_named_on_the_command_line(looks):
    shim, stock = looks
    assert shim["config"] == OURS[0]
    assert "TRITON_MLA_SPARSE" in stock["config"] and "Error" in stock["config"]


def test_vllms_selector_takes_it_for_sparse_mla_only(looks):
    shim, stock = looks
    assert shim["sparse"].startswith("shim.attention.triton_mla.")
    assert "No valid attention backend found" in stock["sparse"]
    assert shim["dense"] == stock["dense"]
    assert not shim["dense"].startswith("shim.")
