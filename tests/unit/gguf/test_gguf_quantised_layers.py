"""Which tensors stay quantised, what is refused, and at which sizes; and headers that must be refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from shim.gguf.files import GGUFProblem, open_model
from shim.gguf.names import require_complete
from shim.gguf.preflight import problem_with
from shim.gguf.quantised_layers import cut_problem, plan, sizes_that_work
from shim.gguf.tensors import draft_weights, packed, weights
from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def test_a_uniform_file(tiny_model):
    made = plan(tiny_model)
    assert {
        "output.weight",
        "blk.0.ffn_down.weight",
        "blk.1.ffn_up_exps.weight",
        "blk.3.attn_output.weight",
    } <= made.kept
    parts = ("k_b", "v_b", "indexer.attn_k.", "indexer.proj", "token_embd", "eh_proj", "norm", "gate_inp")
    assert not any(part in name for name in made.kept for part in parts)
    assert made.plain_experts == frozenset()
    assert "model.layers.2.self_attn.kv_b_proj" in made.unquantised and "lm_head" not in made.unquantised


def test_half_quantised_pairs_come_dequantised_and_plain_experts_plain(make, small_tensors):
    kinds = {"blk.0.attn_q_a.weight": Type.BF16, "blk.0.ffn_up.weight": Type.F16, "output.weight": Type.F16}
    kinds |= {f"blk.1.{part}.weight": Type.BF16 for part in EXPERTS}
    made = plan(open_model(make(tensors={name: (small_tensors[name][0], kind) for name, kind in kinds.items()})))
    assert not made.kept & {"blk.0.attn_kv_a_mqa.weight", "blk.0.ffn_gate.weight", "blk.1.ffn_down_exps.weight"}
    assert "blk.1.attn_kv_a_mqa.weight" in made.kept
    wanted = {"self_attn.fused_qkv_a_proj", "mlp.gate_up_proj"}
    assert {f"model.layers.0.{name}" for name in wanted} | {"lm_head", "model.layers.2.head"} <= made.unquantised
    assert made.plain_experts == {"model.layers.1.mlp.experts"}


@pytest.mark.parametrize(("part", "kind"), [("ffn_up_exps", Type.Q6_K), ("ffn_down_exps", Type.BF16)])
def test_experts_that_do_not_go_together_are_named(make, small_tensors, part, kind):
    name = f"blk.1.{part}.weight"
    with pytest.raises(GGUFProblem, match=rf"{name} is {kind.name}.*take another quantisation"):
        plan(open_model(make(tensors={name: (small_tensors[name][0], kind)})))


def test_weights_that_stay_are_views_of_the_file_in_the_models_order(tiny_model):
    kept = plan(tiny_model).kept
    names = [name for name, _ in weights(tiny_model, kept=kept)]
    layer = "model.layers.1.self_attn."
    quartet = [
        f"{layer}{part}.{kind}" for part in ("q_a_proj", "kv_a_proj_with_mqa") for kind in ("qweight_type", "qweight")
    ]
    at = names.index(quartet[0])
    assert names[at : at + 4] == quartet
    held = dict(weights(tiny_model, kept=kept))
    assert int(held[f"{layer}q_a_proj.qweight_type"]) == Type.Q8_0
    tensor = tiny_model.tensors["blk.1.ffn_up_exps.weight"]
    expert = packed(tensor, 3)
    assert expert.dtype == torch.uint8
    start = tensor.raw()[3].__array_interface__["data"][0]
    assert expert.data_ptr() == start  # not a byte of it was copied
    assert torch.equal(expert, held["model.layers.1.mlp.experts.3.up_proj.qweight"])


def test_the_draft_gets_what_its_block_leaves_out_from_the_model(tiny_model):
    held = dict(draft_weights(tiny_model, dtype=torch.bfloat16, kept=plan(tiny_model).kept))
    assert all(name.startswith("model.layers.4.") for name in held)
    assert held["model.layers.4.embed_tokens.weight"].dtype == torch.bfloat16
    assert held["model.layers.4.shared_head.head.qweight"].dtype == torch.uint8


def test_tensor_parallel_sizes_of_glm_5(tmp_path, monkeypatch):
    """The expert width of the real one, few of everything else."""
    shape = Shape(layers=2, nextn=0, moe_ffn=2048, heads=64, experts=1, experts_used=1, kv_lora=256, vocab=512)
    model = open_model(write_gguf(tmp_path, "wide", tiny_metadata(shape), tiny_tensors(shape)))
    assert sizes_that_work(model) == [1, 2, 4, 8]
    assert cut_problem(model, 8) is None
    assert cut_problem(model, 16, expert_parallel=True) is None  # experts whole, and 512 / 16 is one block of Q8_0
    line = cut_problem(model, 16)
    assert line is not None and "Q" in line and line.endswith("sizes that work: 1, 2, 4, 8")
    assert "does not divide the 64 attention heads" in (cut_problem(model, 3) or "")
    argv = ["vllm", "serve", str(model.parts[0].path)]
    assert problem_with(str(model.parts[0].path), argv) is None
    monkeypatch.setattr("shim.gguf.quantised_layers.MOST_EXPERT_BYTES", 1)
    assert (cut_problem(model, 8) or "").endswith("sizes that work: none, this file needs another quantisation")


def test_the_command_line_is_asked_for_its_size(tiny, monkeypatch):
    from shim import upstream

    monkeypatch.setattr(upstream, "others_serve_gguf", lambda: True)
    assert problem_with(str(tiny), ["vllm", "serve", str(tiny)]) is None
    for words in (["-tp", "2"], ["--tensor-parallel-size=2"], ["--data-parallel-size", "2"]):
        assert "that work: 1" in (problem_with(str(tiny), words) or "")
    assert problem_with(str(tiny), ["-tp", "2", "--quantization", "fp8"]) is None
    monkeypatch.setattr(upstream, "others_serve_gguf", lambda: False)
    assert problem_with(str(tiny), ["-tp", "2"]) is None


def test_no_indexer_at_all(make, small_tensors):
    gone = {name: None for name in small_tensors if ".indexer." in name}
    with pytest.raises(GGUFProblem, match="has no indexer tensors"):
        require_complete(open_model(make(tensors=gone)))


def damaged(path, change) -> str:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    with pytest.raises(GGUFProblem) as caught:
        open_model(path)
    return str(caught.value)


@pytest.mark.parametrize("count", [-1, 2**40, 2**63 - 1])
@pytest.mark.parametrize("at", [8, 16])
def test_negative_and_huge_counts(make, at, count):
    line = damaged(make(), lambda data: data.__setitem__(slice(at, at + 8), struct.pack("<q", count)))
    assert "small.gguf" in line and "download it again" in line


def test_offsets_that_go_in_circles(make):
    name = b"blk.1.ffn_up_exps.weight"

    def same_offset(data):
        at = data.index(name) + len(name) + 4 + 3 * 8 + 4
        data[at : at + 8] = struct.pack("<Q", 0)

    assert "overlap in small.gguf" in damaged(make(), same_offset)


def test_a_type_of_fewer_bits_leaves_a_gap(make):
    name = b"blk.1.attn_norm.weight"

    def half(data):
        at = data.index(name) + len(name) + 4 + 8
        assert data[at : at + 4] == struct.pack("<I", 0)  # F32
        data[at : at + 4] = struct.pack("<I", 1)

    line = damaged(make(), half)
    assert "tensors blk.1.attn_norm.weight and " in line and " bytes apart in small.gguf: its header is corrupt" in line


@pytest.mark.parametrize("size", [0, 2**62])
def test_a_dimension_that_cannot_be(make, size):
    name = b"blk.0.attn_norm.weight"

    def resize(data):
        at = data.index(name) + len(name) + 4
        data[at : at + 8] = struct.pack("<Q", size)

    assert "download it again" in damaged(make(), resize)


@pytest.mark.parametrize("layers", [0, 2**31])
def test_a_block_count_that_cannot_be(make, layers):
    from shim.gguf.config import hf_config

    with pytest.raises(GGUFProblem, match="block_count"):
        hf_config(open_model(make(metadata={"glm-dsa.block_count": layers})))


def test_ones_are_dequantised_to_the_type_asked_for(make):
    ones = np.ones((512, 256), np.float32)
    model = open_model(make(tensors={"output.weight": (ones, Type.Q8_0)}))
    head = dict(weights(model, dtype=torch.bfloat16))["lm_head.weight"]
    assert head.dtype == torch.bfloat16 and torch.allclose(head.float(), torch.ones(512, 256), atol=0.01)
