"""GLM-5 from a GGUF on the CPU wheel against transformers in fp32 on the same, dequantised, weights.

Judged by teacher-forced KL and argmax: in a random model greedy tokens amplify rounding, except where both sides are
fp32.
"""

from __future__ import annotations

import numpy as np
import pytest
from hf_reference import argmax_agreement, greedy, kl, logits

CHUNK = 64  # tokens a step: a prompt of 300 goes in as five chunks


@pytest.fixture(scope="module")
def sparse(tiny, tokens) -> np.ndarray:
    return logits(tiny, tokens)


@pytest.fixture(scope="module")
def dense(tiny, tokens) -> np.ndarray:
    return logits(tiny, tokens, topk=2048)


def judge(answers, reference) -> tuple[float, float]:
    """KL(reference || engine) and argmax agreement over all positions but the last, whose answer is the first new
    token."""
    return kl(reference[:-1], answers["teacher/0"]), argmax_agreement(reference[:-1], answers["teacher/0"])


TEACHER = {"name": "teacher", "keep": "prompt", "max_tokens": 16}


@pytest.fixture(scope="module")
def whole(ask_engine, tiny, tokens):
    return ask_engine(tiny, [TEACHER | {"prompts": [tokens]}], dtype="float32")


def test_fp32_is_the_reference(whole, sparse, tiny, tokens):
    divergence, agreement = judge(whole, sparse)
    assert divergence < 1e-5
    assert agreement == 1.0
    generated = whole["teacher/0/tokens"].tolist()
    assert len(generated) == 16
    assert generated == greedy(tiny, tokens, generated)


def test_the_indexer_ran(whole, sparse, dense):
    """Sparse attention differs from dense as much here as it does in the reference: not less, and not by accident."""
    divergence, _ = judge(whole, dense)
    expected = kl(dense[:-1], sparse[:-1])
    assert expected > 0.1
    assert divergence == pytest.approx(expected, rel=0.05)


def test_fp32_dense_regime(ask_engine, tiny, tokens, dense):
    answers = ask_engine(tiny, [TEACHER | {"prompts": [tokens]}], dtype="float32", hf_overrides={"index_topk": 2048})
    divergence, agreement = judge(answers, dense)
    assert divergence < 1e-5
    assert agreement == 1.0


def test_bf16(ask_engine, tiny, tokens, sparse):
    divergence, _ = judge(ask_engine(tiny, [TEACHER | {"prompts": [tokens]}], dtype="bfloat16"), sparse)
    assert divergence < 0.02


LENGTHS = (300, 77, 130)


@pytest.fixture(scope="module")
def scheduled(ask_engine, tiny, tokens):
    """One engine with chunked prefill and prefix caching: each request alone, then all together, then again."""
    prompts = [tokens[:n] if n > 100 else tokens[100 : 100 + n] for n in LENGTHS]
    alone = [{"name": f"alone{i}", "prompts": [p], "max_tokens": 8} for i, p in enumerate(prompts)]
    together = [{"name": "together", "prompts": prompts, "max_tokens": 8}]
    again = [{"name": "again", "prompts": prompts, "max_tokens": 8, "fresh": False}]
    teacher = [TEACHER | {"prompts": [tokens]}]
    return ask_engine(
        tiny,
        alone + together + again + teacher,
        dtype="float32",
        enable_chunked_prefill=True,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=True,
    )


def test_chunked_prefill_is_the_reference(scheduled, sparse):
    divergence, agreement = judge(scheduled, sparse)
    assert divergence < 1e-5
    assert agreement == 1.0


@pytest.mark.parametrize("name", ["together", "again"])
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_each_request_gets_its_answer_alone(scheduled, name, number):
    alone, shared = scheduled[f"alone{number}/0"], scheduled[f"{name}/{number}"]
    assert scheduled[f"alone{number}/0/tokens"].tolist() == scheduled[f"{name}/{number}/tokens"].tolist()
    assert kl(alone, shared) < 1e-5
    assert argmax_agreement(alone, shared) == 1.0


def test_the_prefix_cache_was_hit(scheduled):
    whole_blocks = sum((n - 1) // 64 * 64 for n in LENGTHS)
    assert scheduled["alone0/cache_hits"] == 0
    assert scheduled["again/cache_hits"] == whole_blocks


def test_the_ledger_says_what_acted(whole):
    (ledger,) = whole["ledgers"]
    acted = {entry["name"] for entry in ledger["patches"] if entry.get("used")}
    assert acted >= {"gguf_engine_args", "gguf_loader", "worker_seal", "closing_gate"}
    assert acted >= {"cpu_backend", "cpu_indexer", "cpu_indexer_op", "cpu_rotary"}
