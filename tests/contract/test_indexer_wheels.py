"""The indexer's patches on real wheels, one of each era: the wheel's own op runs end to end on our references."""

from __future__ import annotations

import json

import pytest
from wheels import some

WHEELS = some("0.16.0", "0.18.1", "0.23.0", "0.33.0", more=("0.17.1", "0.19.1", "0.26.0"))
STAND = {"indexer_logits", "indexer_topk", "indexer_builder"}
FALLBACK = ("0.17.1", "0.18.1")  # these have a torch fallback for decode

LOOK = """
sys.path.insert(0, SURFACE)
import indexer_surface as surface
surface.install()
import torch
import vllm.model_executor.layers.sparse_attn_indexer as op
import vllm.v1.attention.backends.mla.indexer as builder
import vllm.utils.deep_gemm as deep_gemm
from shim.indexer import choice

found = {"states": states()}
found["llama"] = [surface.build_indexer("llama"), choice.logits_are_ours(), choice.topk_is_ours()]
found["ctor"] = surface.build_indexer()
found["ours"] = [choice.logits_are_ours(), choice.topk_is_ours()]
found["has_deep_gemm"] = [m.has_deep_gemm() for m in (op, builder, deep_gemm) if hasattr(m, "has_deep_gemm")]
found["wrong"] = {}
for next_n in (1, 2):
    batch = surface.Batch(next_n)
    batch.run()
    found["wrong"][next_n] = batch.wrong_rows()
    assert (batch.buffer[batch.tokens :] == 77).all()
found["native"], found["kernels"] = surface.native, surface.ours[:]

if hasattr(deep_gemm, "fp8_paged_mqa_logits_torch"):  # vLLM's own, and the name that its op calls
    batch = surface.Batch(2)
    q, lens = batch.q[:4].view(2, 2, surface.HEADS, surface.DIM), torch.tensor([700, 130], dtype=torch.int32)
    given = (q, batch.cache.unsqueeze(2), batch.weights[:4], lens, batch.table[:2], 768)
    truth = surface.scores.paged_mqa_logits(*given)
    def error(function):
        valid = truth > -torch.inf
        answer = function(*given)[valid].nan_to_num(1e30)
        return ((answer - truth[valid]).abs().max() / truth[valid].abs().max()).item()
    found["fallback"] = [error(m.fp8_paged_mqa_logits_torch) for m in (deep_gemm, op)]

if states()["indexer_chunks"] == "applied":
    from shim.patches import indexer_chunks
    indexer_chunks.LOGITS_BYTES = 4 * 740 * 64  # 64 rows of the batch's chunk
    whole = surface.Batch(1).metadata(builder, False)
    parts = list(indexer_chunks.cut(whole.prefill.chunks[0]))
    stock = surface.Batch.metadata
    def cut(self, *args):
        metadata = stock(self, *args)
        metadata.prefill.chunks = [p for c in metadata.prefill.chunks for p in indexer_chunks.cut(c)]
        return metadata
    surface.Batch.metadata = cut
    batch = surface.Batch(1)
    batch.run()
    found["chunks"] = [[p.token_start, p.token_end, len(p.cu_seqlen_ks)] for p in parts], batch.wrong_rows()

found["graphs"] = builder.DeepseekV32IndexerMetadataBuilder.get_cudagraph_support(
    surface.SimpleNamespace(speculative_config=None, num_speculative_tokens=0), None).name
process.check()
say(found)
"""


@pytest.fixture(scope="module", params=WHEELS)
def wheel(request, child):
    from pathlib import Path

    surface = f"SURFACE = {json.dumps(str(Path(__file__).parent))}\n"
    return request.param, child(surface + LOOK, request.param, GLM5_SHIM_SKIP="cpu_packaging")


def test_every_patch_stands_or_says_why_not(wheel):
    version, found = wheel
    states = found["states"]
    assert {states[name] for name in STAND} == {"applied"}
    assert states["indexer_chunks"] == ("applied" if version in ("0.16.0", *FALLBACK) else "unneeded")
    assert states["indexer_graphs"] == ("applied" if version == "0.18.1" else "unneeded")
    assert states["deep_gemm_gate"] == ("applied" if version in ("0.26.0", "0.33.0") else "unneeded")


def test_the_constructor_passes_and_settles_for_glm5_only(wheel):
    version, found = wheel
    problem, *ours = found["llama"]
    assert ours == [False, False]
    assert ("requires DeepGEMM" in problem) is (version not in ("0.16.0", *FALLBACK))  # it is not installed here
    assert found["ctor"] == "" and found["ours"] == [True, True]


def test_the_op_has_deep_gemm_and_the_builder_has_not(wheel):
    _, found = wheel
    if found["has_deep_gemm"][:-1]:  # the last is vLLM's own, for everyone else
        assert found["has_deep_gemm"][:-1] == [True, False]


def test_the_wheels_own_op_chooses_the_same_as_the_reference(wheel):
    _, found = wheel
    assert found["wrong"] == {"1": [], "2": []}
    assert found["native"] == []
    assert found["kernels"] == ["mqa_logits", "topk", "paged_mqa_logits", "topk"] * 2


def test_the_decode_fallback_of_017_and_018_is_wrong_and_ours_is_right(wheel):
    version, found = wheel
    assert ("fallback" in found) is (version in FALLBACK)
    if version in FALLBACK:
        theirs, ours = found["fallback"]
        assert theirs > 0.5
        assert ours < 1e-6


def test_chunks_are_cut_by_rows_and_the_choice_is_the_same(wheel):
    _, found = wheel
    if "chunks" in found:
        parts, wrong = found["chunks"]
        assert parts == [[2, 66, 64], [66, 130, 64], [130, 194, 64], [194, 242, 48]]
        assert wrong == []


def test_decode_runs_as_full_graphs(wheel):
    version, found = wheel
    assert found["graphs"] == ("UNIFORM_SINGLE_TOKEN_DECODE" if version == "0.16.0" else "UNIFORM_BATCH")
