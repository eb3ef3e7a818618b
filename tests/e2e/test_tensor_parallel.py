"""Tensor-parallel 2 on the CPU wheel: two real workers, each patched, and together the reference's answers. Weights are
dequantised, or stay quantised: cut at block bounds, or experts whole."""

from __future__ import annotations

import pytest
from gguf import GGMLQuantizationType as Type
from hf_reference import argmax_agreement, kl, logits

from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf

WORKER = {"cpu_backend", "cpu_indexer", "cpu_indexer_op", "cpu_rotary", "gguf_loader", "closing_gate"}

# Experts of 512 columns, which are two blocks
WIDE = Shape(layers=2, nextn=0, ffn=1024, moe_ffn=512)


@pytest.mark.parametrize("whole", [False, True], ids=["shares of experts", "whole experts"])
def test_two_workers_with_quantised_weights(ask_engine, kernels, tokens, tmp_path, whole):
    tensors = tiny_tensors(WIDE, 2, "ud")
    for name, kind in {"1.ffn_up_exps.weight": Type.IQ3_S, "0.ffn_up.weight": Type.F16}.items():
        tensors[f"blk.{name}"] = (tensors[f"blk.{name}"][0], kind)
    path = write_gguf(tmp_path, "wide", tiny_metadata(WIDE), tensors)
    jobs = [{"name": "teacher", "keep": "prompt", "prompts": [tokens[:128]]}]
    found = ask_engine(path, jobs, path=kernels, dtype="float32", tensor_parallel_size=2, enable_expert_parallel=whole)
    reference = logits(path, tokens[:128])[:-1]
    assert kl(reference, found["teacher/0"]) < 1e-5
    assert argmax_agreement(reference, found["teacher/0"]) == 1.0
    assert found["quantization"] == "glm5_gguf"


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
