"""Tensor-parallel 2 on the CPU wheel: two real workers, each patched, and together the reference's answers."""

from __future__ import annotations

from hf_reference import argmax_agreement, kl, logits

WORKER = {"cpu_backend", "cpu_indexer", "cpu_indexer_op", "cpu_rotary", "gguf_loader", "closing_gate"}


def test_two_workers_answer_as_the_reference(ask_engine, tiny, tokens):
    jobs = [{"name": "teacher", "keep": "prompt", "max_tokens": 4, "prompts": [tokens]}]
    answers = ask_engine(tiny, jobs, dtype="float32", tensor_parallel_size=2)
    reference = logits(tiny, tokens)[:-1]
    assert kl(reference, answers["teacher/0"]) < 1e-5
    assert argmax_agreement(reference, answers["teacher/0"]) == 1.0

    workers = [one for one in answers["ledgers"] if "Worker" in one["role"]]
    assert len(workers) == 2
    for worker in workers:
        acted = {p["name"] for p in worker["patches"] if p.get("used") and p["state"] == "applied"}
        assert acted >= WORKER, worker["role"]
