"""Models that are not GLM-5: bit-equal logits with the shim on and off, and a ledger that says why each patch did
nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from shim.patches import PATCHES

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# DeepSeek-V2 runs the very model class that the GLM-5 patches change, with dense MLA
MODELS = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


@pytest.fixture(params=MODELS)
def model(request, tmp_path) -> tuple[str, Path]:
    """A random model as a Hugging Face directory."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules.setdefault(name, None)
    import torch
    import transformers

    name, fields = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **fields)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "model")
    return request.param, tmp_path / "model"


def test_bit_equal(ask_engine, model, tokens):
    model_type, path = model
    prompt = [t % 512 for t in tokens]
    jobs = [
        {"name": "teacher", "prompts": [prompt], "keep": "prompt", "max_tokens": 8},
        {"name": "batch", "prompts": [prompt[:50], prompt[50:180]], "max_tokens": 8},
    ]
    # not float32: vLLM's dense MLA for CPUs with AMX does not take it
    on, off = (ask_engine(path, jobs, shim=shim, dtype="bfloat16", enforce_eager=True) for shim in (True, False))
    assert off.pop("ledgers") == []
    (ledger,) = on.pop("ledgers")
    assert set(on) == set(off) and len(on) > 6
    for key in off:
        assert np.array_equal(on[key], off[key]), key

    patches = {entry["name"]: entry for entry in ledger["patches"]}
    assert set(patches) == {p.name for p in PATCHES}
    for name, entry in patches.items():
        if name == "cpu_packaging":  # mends the environment, whatever the model
            continue
        assert not entry.get("used"), name
        assert entry.get("idle") or entry["detail"] or entry["state"] == "waiting", (name, entry)
    for name in ("closing_gate", "worker_seal", "cpu_backend"):
        assert f"model_type '{model_type}' is not glm_moe_dsa" in patches[name]["idle"]
