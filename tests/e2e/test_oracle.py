"""The same gates on somebody else's GGUF, against logits that transformers and llama.cpp computed elsewhere.

GLM5_SHIM_ORACLE names a directory with `*-00001-of-*.gguf`, tokens300.json, hf_deq_mix.npz (top-k 64),
hf_deqmix_dense.npz (top-k 2048) and l_mix.npz (llama.cpp, 8-bit activations), each with `logits`
[300, vocab] and `gen`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hf_reference import argmax_agreement, kl

ORACLE = os.environ.get("GLM5_SHIM_ORACLE", "")
pytestmark = pytest.mark.skipif(not ORACLE, reason="GLM5_SHIM_ORACLE is not set")


@pytest.fixture(scope="module")
def oracle() -> Path:
    return Path(ORACLE)


@pytest.fixture(scope="module")
def prompt(oracle) -> list[int]:
    read = json.loads((oracle / "tokens300.json").read_text())
    return read["tokens"] if isinstance(read, dict) else read


@pytest.fixture(scope="module")
def first_part(oracle) -> Path:
    (path,) = oracle.glob("*-00001-of-*.gguf")
    return path


def run(ask_engine, first_part, prompt, **engine) -> tuple[np.ndarray, list[int]]:
    answers = ask_engine(first_part, [{"name": "t", "prompts": [prompt], "keep": "prompt", "max_tokens": 16}], **engine)
    return answers["t/0"], answers["t/0/tokens"].tolist()


def reference(oracle: Path, name: str) -> tuple[np.ndarray, list[int]]:
    held = np.load(oracle / f"{name}.npz")
    return held["logits"][:-1], held["gen"][:16].tolist()


def test_fp32_top_k_64(ask_engine, oracle, first_part, prompt):
    got, greedy = run(ask_engine, first_part, prompt, dtype="float32", max_num_batched_tokens=64)
    expected, generated = reference(oracle, "hf_deq_mix")
    print(f"\nKL {kl(expected, got):.2e}, argmax {argmax_agreement(expected, got):.3f}")
    assert kl(expected, got) < 1e-5
    assert argmax_agreement(expected, got) == 1.0
    assert greedy == generated
    dense, _ = reference(oracle, "hf_deqmix_dense")
    print(f"from dense: KL {kl(dense, got):.3f}")
    assert 0.15 < kl(dense, got) < 0.3
    llama_cpp, _ = reference(oracle, "l_mix")
    print(f"from llama.cpp: KL {kl(llama_cpp, got):.4f}")
    assert kl(llama_cpp, got) < 0.05


def test_fp32_top_k_2048(ask_engine, oracle, first_part, prompt):
    got, greedy = run(ask_engine, first_part, prompt, dtype="float32", hf_overrides={"index_topk": 2048})
    expected, generated = reference(oracle, "hf_deqmix_dense")
    print(f"\nKL {kl(expected, got):.2e}, argmax {argmax_agreement(expected, got):.3f}")
    assert kl(expected, got) < 1e-5
    assert argmax_agreement(expected, got) == 1.0
    assert greedy == generated


def test_bf16_top_k_64(ask_engine, oracle, first_part, prompt):
    got, _ = run(ask_engine, first_part, prompt, dtype="bfloat16")
    expected, _ = reference(oracle, "hf_deq_mix")
    print(f"\nKL {kl(expected, got):.4f}")
    assert kl(expected, got) < 0.02
