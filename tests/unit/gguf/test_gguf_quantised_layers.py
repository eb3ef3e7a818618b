"""Which tensors stay quantised, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from shim.gguf.files import GGUFProblem, open_model
from shim.gguf.names import require_complete
from shim.gguf.quantised_layers import quantised_layers
from shim.gguf.tensors import draft_weights, packed, weights

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def test_a_uniform_file(tiny_model):
    made = quantised_layers(tiny_model)
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
    made = quantised_layers(
        open_model(make(tensors={name: (small_tensors[name][0], kind) for name, kind in kinds.items()}))
    )
    assert not made.kept & {"blk.0.attn_kv_a_mqa.weight", "blk.0.ffn_gate.weight", "blk.1.ffn_down_exps.weight"}
    assert "blk.1.attn_kv_a_mqa.weight" in made.kept
    wanted = {"self_attn.fused_qkv_a_proj", "mlp.gate_up_proj"}
    assert {f"model.layers.0.{name}" for name in wanted} | {"lm_head", "model.layers.2.head"} <= made.unquantised
    assert made.plain_experts == {"model.layers.1.mlp.experts"}


@pytest.mark.parametrize(("part", "kind"), [("ffn_up_exps", Type.Q6_K), ("ffn_down_exps", Type.BF16)])
def test_experts_that_do_not_go_together_are_named(make, small_tensors, part, kind):
    name = f"blk.1.{part}.weight"
    with pytest.raises(GGUFProblem, match=rf"{name} is {kind.name}.*take another quantisation"):
        quantised_layers(open_model(make(tensors={name: (small_tensors[name][0], kind)})))


def test_weights_that_stay_are_views_of_the_file_in_the_models_order(tiny_model):
    kept = quantised_layers(tiny_model).kept
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
    held = dict(draft_weights(tiny_model, dtype=torch.bfloat16, kept=quantised_layers(tiny_model).kept))
    assert all(name.startswith("model.layers.4.") for name in held)
    assert held["model.layers.4.embed_tokens.weight"].dtype == torch.bfloat16
    assert held["model.layers.4.shared_head.head.qweight"].dtype == torch.uint8


def test_no_indexer_at_all(make, small_tensors):
    gone = {name: None for name in small_tensors if ".indexer." in name}
    with pytest.raises(GGUFProblem, match="has no indexer tensors"):
        require_complete(open_model(make(tensors=gone)))


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
