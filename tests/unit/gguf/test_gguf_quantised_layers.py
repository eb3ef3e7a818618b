"""Which tensors stay quantised, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from shim.gguf.files import GGUFProblem, open_model
from shim.gguf.names import require_complete
from shim.gguf.quantised_layers import quantised_layers, types_digest
from shim.gguf.tensors import draft_weights, packed, weights

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def test_a_uniform_file(tiny_model):
    made = quantised_layers(tiny_model)
    assert made.layers["lm_head"] == made.layers["model.layers.4.head"] == (Type.Q8_0,)
    assert made.layers["model.layers.0.mlp.down_proj"] == (Type.Q8_0,)
    assert made.layers["model.layers.1.self_attn.fused_qkv_a_proj"] == (Type.Q8_0, Type.Q8_0)
    assert made.layers["model.layers.1.self_attn.indexer.wq_b"] == (Type.Q8_0,)
    assert made.experts["model.layers.1.mlp.experts"] == (Type.Q4_K, Type.Q4_K, Type.Q6_K)
    assert made.experts["model.layers.2.mlp.experts"] == (Type.Q4_K, Type.Q4_K, Type.Q5_K)
    assert made.parameters["output.weight"] == made.parameters["blk.3.attn_output.weight"] == "qweight"
    parts = ("k_b", "v_b", "indexer.attn_k.", "indexer.proj", "token_embd", "eh_proj", "norm", "gate_inp")
    assert not any(part in name for name in made.parameters for part in parts)
    assert not any("kv_b" in name or "embed" in name for name in made.layers)


def test_any_mixture_of_types(make, small_tensors):
    kinds = {"blk.0.attn_q_a.weight": Type.BF16, "blk.0.ffn_up.weight": Type.Q6_K, "output.weight": Type.F16}
    kinds |= {"blk.0.attn_kv_a_mqa.weight": Type.Q8_0, "blk.0.ffn_gate.weight": Type.Q4_K}
    kinds |= {"blk.1.ffn_gate_exps.weight": Type.Q5_K, "blk.1.ffn_up_exps.weight": Type.F32}
    kinds |= {"blk.1.attn_q_b.weight": Type.BF16}
    made = quantised_layers(
        open_model(make(tensors={name: (small_tensors[name][0], kind) for name, kind in kinds.items()}))
    )
    assert made.layers["model.layers.0.self_attn.fused_qkv_a_proj"] == (None, Type.Q8_0)
    assert made.layers["model.layers.0.mlp.gate_up_proj"] == (Type.Q4_K, Type.Q6_K)
    assert made.experts["model.layers.1.mlp.experts"][:2] == (Type.Q5_K, None)
    assert not {"lm_head", "model.layers.2.head", "model.layers.1.self_attn.q_b_proj"} & made.layers.keys()
    expected = {"attn_q_a": "qweight", "attn_kv_a_mqa": "qweight_1", "ffn_gate": "qweight", "ffn_up": "qweight_1"}
    assert {part: made.parameters[f"blk.0.{part}.weight"] for part in expected} == expected
    names = [made.parameters[f"blk.1.{part}.weight"] for part in EXPERTS]
    assert names == ["gate_qweight", "up_qweight", "qweight"]
    assert "output.weight" not in made.parameters


def test_all_experts_of_a_layer_plain(make, small_tensors):
    names = [f"blk.1.{part}.weight" for part in EXPERTS]
    made = quantised_layers(open_model(make(tensors={name: (small_tensors[name][0], Type.BF16) for name in names})))
    assert "model.layers.1.mlp.experts" not in made.experts and not set(names) & made.parameters.keys()


def test_weights_that_stay_are_views_of_the_file(tiny_model):
    held = dict(weights(tiny_model, parameters=quantised_layers(tiny_model).parameters))
    assert "model.layers.1.self_attn.q_a_proj.weight" not in held
    assert held["model.layers.1.self_attn.q_a_proj.qweight"].dtype == torch.uint8
    tensor = tiny_model.tensors["blk.1.ffn_up_exps.weight"]
    expert = packed(tensor, 3)
    assert expert.dtype == torch.uint8
    start = tensor.raw()[3].__array_interface__["data"][0]
    assert expert.data_ptr() == start  # not a byte of it was copied
    assert torch.equal(expert, held["model.layers.1.mlp.experts.3.up_proj.up_qweight"])


def test_a_plain_weight_of_a_quantised_layer_comes_as_numbers(make, small_tensors):
    name = "blk.0.attn_q_a.weight"
    kinds = {name: Type.BF16, "blk.0.attn_kv_a_mqa.weight": Type.Q8_0}
    model = open_model(make(tensors={name: (small_tensors[name][0], kind) for name, kind in kinds.items()}))
    held = dict(weights(model, parameters=quantised_layers(model).parameters))
    assert held["model.layers.0.self_attn.q_a_proj.qweight"].dtype == torch.bfloat16
    assert held["model.layers.0.self_attn.kv_a_proj_with_mqa.qweight_1"].dtype == torch.uint8


def test_the_draft_gets_what_its_block_leaves_out_from_the_model(tiny_model):
    parameters = quantised_layers(tiny_model).parameters
    held = dict(draft_weights(tiny_model, dtype=torch.bfloat16, parameters=parameters))
    assert all(name.startswith("model.layers.4.") for name in held)
    assert held["model.layers.4.embed_tokens.weight"].dtype == torch.bfloat16
    assert held["model.layers.4.shared_head.head.qweight"].dtype == torch.uint8


def test_a_tied_head_is_the_embedding(make):
    held = dict(weights(open_model(make(tensors={"output.weight": None}))))
    assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])


def test_the_digest_is_of_the_types(make, small_tensors):
    def digest(kind):
        return types_digest(open_model(make(tensors={"output.weight": (small_tensors["output.weight"][0], kind)})))

    assert digest(Type.Q8_0) == digest(Type.Q8_0) != digest(Type.Q6_K)


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
