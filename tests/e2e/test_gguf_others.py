"""GGUF files of other models, through vllm-gguf-plugin: bit-equal answers with the shim on and off."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from shim.gguf.tiny import write_gguf

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2, 128, 256, 4, 2, 512
KINDS = {"norm": Type.F32, "bias": Type.F32, "ffn": Type.F16, "output.weight": Type.F16}  # all else: Q8_0
MODELS = {"llama": "Llama", "qwen2": "Qwen2"}


def write(directory: Path, arch: str) -> Path:
    """A random model of two layers, with the config.json beside it that the plugin reads."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # built for another torch
    import transformers

    config = getattr(transformers, f"{MODELS[arch]}Config")(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        architectures=[f"{MODELS[arch]}ForCausalLM"],
    )
    config.save_pretrained(directory)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            **dict.fromkeys(("attn_norm.weight", "ffn_norm.weight"), (HIDDEN,)),
            **dict.fromkeys(("attn_q.weight", "attn_output.weight"), (HIDDEN, HIDDEN)),
            **dict.fromkeys(("attn_k.weight", "attn_v.weight"), (kv, HIDDEN)),
            **dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), (FFN, HIDDEN)),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "qwen2":
            block |= {"attn_q.bias": (HIDDEN,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"output_norm.weight": (HIDDEN,), "output.weight": (VOCAB, HIDDEN)}
    rng = np.random.default_rng(11)
    tensors = {}
    for name, shape in shapes.items():
        kind = next((kind for part, kind in KINDS.items() if part in name and "attn_output" not in name), Type.Q8_0)
        values = rng.standard_normal(shape, dtype=np.float32) / np.float32(4)
        tensors[name] = (values + 1 if "norm" in name else values, kind)
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": [f"t{n}" for n in range(VOCAB)],
    }
    return write_gguf(directory, arch, metadata, tensors)


@pytest.mark.parametrize("arch", MODELS)
def test_the_same_bits_and_a_ledger_that_says_why_nothing_was_done(ask_engine, plugin, tokens, arch, tmp_path):
    prompts = [[token % VOCAB for token in tokens[:60]], [token % VOCAB for token in tokens[60:70]]]
    jobs = [
        {"name": "teacher", "prompts": prompts[:1], "keep": "prompt"},
        {"name": "new", "prompts": prompts, "max_tokens": 8},
    ]
    model = write(tmp_path, arch)
    on, off = (
        ask_engine(model, jobs, shim=shim, path=plugin, dtype="float32", enforce_eager=True) for shim in (True, False)
    )
    assert off.pop("ledgers") == []
    (ledger,) = on.pop("ledgers")
    assert off["quantization"] == "gguf"
    teacher = off["teacher/0"]
    assert teacher.shape == (59, VOCAB) and np.isfinite(teacher).all() and teacher.std() > 0.5
    assert set(on) == set(off) and len(on) > 6
    for key in off:
        assert np.array_equal(on[key], off[key]), key

    acted = {entry["name"] for entry in ledger["patches"] if entry.get("used")}
    assert acted <= {"cpu_packaging"}  # mends the environment, whatever the model
    said = {entry.get("idle") for entry in ledger["patches"]}
    assert f"{arch}.gguf is of architecture {arch}, expected glm-dsa; this shim serves GLM-5 only" in said
