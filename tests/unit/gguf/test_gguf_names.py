from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import assume, given
from hypothesis import strategies as st

from shim.gguf.config import hf_config
from shim.gguf.files import GGUFProblem, open_model
from shim.gguf.names import BLOCK, TOP, dimensions, hf_name, mapped, missing, require_complete, split_name, unmapped

F32 = Type.F32


@pytest.mark.parametrize(
    ("gguf_name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_q_a.weight", "model.layers.0.self_attn.q_a_proj.weight"),
        ("blk.77.attn_kv_a_mqa.weight", "model.layers.77.self_attn.kv_a_proj_with_mqa.weight"),
        ("blk.5.attn_k_b.weight", "model.layers.5.self_attn.kv_b_proj.weight"),
        ("blk.5.indexer.proj.weight", "model.layers.5.self_attn.indexer.weights_proj.weight"),
        ("blk.5.indexer.k_norm.bias", "model.layers.5.self_attn.indexer.k_norm.bias"),
        ("blk.5.exp_probs_b.bias", "model.layers.5.mlp.gate.e_score_correction_bias"),
        ("blk.5.ffn_gate_exps.weight", "model.layers.5.mlp.experts.0.gate_proj.weight"),
        ("blk.5.ffn_norm.weight", "model.layers.5.post_attention_layernorm.weight"),
        ("blk.78.nextn.shared_head_norm.weight", "model.layers.78.shared_head.norm.weight"),
        ("blk.78.attn_q_a.weight", "model.layers.78.self_attn.q_a_proj.weight"),
        # not ours
        ("blk.79.attn_q_a.weight", None),
        ("blk.5.nextn.eh_proj.weight", None),
        ("blk.5.attn_q.weight", None),
        ("blk.5.attn_q_a.bias", None),
        ("blk.5.ffn_gate_up_exps.weight", None),
        ("attn_q_a.weight", None),
        ("blk.5.token_embd.weight", None),
        ("rope_freqs.weight", None),
        ("v.blk.5.attn_q_a.weight", None),
    ],
)
def test_names(gguf_name, expected):
    assert hf_name(gguf_name, 78, 1) == expected


@given(name=st.sampled_from(BLOCK), layer=st.integers(0, 78), junk=st.text("abz._0", min_size=1, max_size=8))
def test_names_are_matched_whole(name, layer, junk):
    full = f"blk.{layer}.{name.gguf}"
    assume(f"{name.gguf}{junk}" not in {row.gguf for row in BLOCK} and junk + name.gguf not in {r.gguf for r in BLOCK})
    assert hf_name(full + junk, 78, 1) is None
    assert hf_name(junk + full, 78, 1) is None
    assert hf_name(f"blk.{layer}.{junk}{name.gguf}", 78, 1) is None


# What gguf-py lists for glm-dsa, and no GLM-5 file has
NOT_IN_GLM_5 = {
    "rope_freqs": "factors of scaled positions, and GLM-5's are not scaled",
    "blk.{bid}.attn_rot_embd": "rotary frequencies, which the model computes",
    "blk.{bid}.attn_q": "the query of a model without q_lora_rank",
}


def test_every_tensor_of_gguf_pys_own_list_has_a_row_and_its_name():
    (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == "glm-dsa")
    listed = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    top, block = ({row.gguf.rpartition(".")[0] for row in rows} for rows in (TOP, BLOCK))
    ours = top | {f"blk.{{bid}}.{name}" for name in block}
    assert listed - ours == NOT_IN_GLM_5.keys()
    assert ours <= listed


def test_hf_names_are_unique_but_for_kv_b():
    hf = [
        row.hf
        for row in (*TOP, *BLOCK)
        if "kv_b" not in row.gguf and row.gguf not in ("attn_k_b.weight", "attn_v_b.weight")
    ]
    assert len(hf) == len(set(hf))


def test_every_shape_is_spelled_in_known_letters(tiny_model):
    known = dimensions(hf_config(tiny_model))
    assert {letter for row in (*TOP, *BLOCK) for letter in row.shape} <= set(known)


def test_the_tiny_model_is_complete(tiny_model):
    assert unmapped(tiny_model) == [] and missing(tiny_model) == []
    assert set(mapped(tiny_model)) == set(tiny_model.tensors)
    require_complete(tiny_model)


def test_loading_order(tiny_model):
    """Fused layers join shards as they arrive; in the file kv_a stands before q_a and down before gate."""
    order = list(mapped(tiny_model))
    in_file = list(tiny_model.tensors)
    assert in_file.index("blk.1.attn_kv_a_mqa.weight") < in_file.index("blk.1.attn_q_a.weight")
    for first, second in (
        ("blk.1.attn_q_a.weight", "blk.1.attn_kv_a_mqa.weight"),
        ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"),
        ("blk.2.ffn_gate_exps.weight", "blk.2.ffn_up_exps.weight"),
        ("blk.2.ffn_gate_shexp.weight", "blk.2.ffn_up_shexp.weight"),
    ):
        assert order.index(first) < order.index(second)
    layers = [split_name(name)[0] for name in order]
    assert [layer for layer in layers if layer is not None] == sorted(layer for layer in layers if layer is not None)


def test_every_single_absence_is_noticed(make, small_tensors):
    """Drop each tensor in turn: only the unneeded may go unnoticed, and none is optional in this file."""
    model = open_model(make())
    config = hf_config(model)
    for name in small_tensors:
        rest = {key: tensor for key, tensor in model.tensors.items() if key != name}
        lines = missing(type(model)(model.parts, model.metadata, rest), config)
        assert len(lines) == 1, name
        assert name.rpartition(".")[0].rpartition(".")[2] in lines[0] and hf_name(name, 2, 1) in lines[0]


def test_missing_tensors_are_named_and_counted(make):
    names = [f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")] + ["blk.0.attn_norm.weight"]
    model = open_model(make(tensors=dict.fromkeys(names)))
    with pytest.raises(GGUFProblem) as caught:
        require_complete(model)
    line = str(caught.value)
    assert line.startswith("4 tensors are missing") and line.endswith("and 1 more") and "\n" not in line
    assert "model.layers.0.input_layernorm.weight (blk.0.attn_norm.weight)" in line


def test_an_unknown_tensor_is_named(make):
    model = open_model(make(tensors={"blk.1.attn_sinks.weight": (np.zeros(8, np.float32), F32)}))
    assert unmapped(model) == ["blk.1.attn_sinks.weight"]
    with pytest.raises(GGUFProblem, match=r"1 tensors have no place in GLM-5.*blk\.1\.attn_sinks\.weight"):
        require_complete(model)


def test_a_wrong_shape_is_named(make):
    model = open_model(make(tensors={"blk.1.ffn_gate_inp.weight": (np.zeros((5, 256), np.float32), F32)}))
    with pytest.raises(GGUFProblem, match=r"blk\.1\.ffn_gate_inp\.weight has shape \(5, 256\), expected \(2, 256\)"):
        require_complete(model)


def test_half_a_kv_b_is_not_enough(make):
    model = open_model(make(tensors={"blk.0.attn_v_b.weight": None}))
    assert missing(model) == ["model.layers.0.self_attn.kv_b_proj.weight (blk.0.attn_v_b)"]


def test_fused_kv_b_is_enough(make):
    fused = (np.zeros((2 * 448, 256), np.float32), F32)
    gone = {"blk.0.attn_k_b.weight": None, "blk.0.attn_v_b.weight": None}
    model = open_model(make(tensors={**gone, "blk.0.attn_kv_b.weight": fused}))
    assert missing(model) == [] and unmapped(model) == []


def test_the_nextn_block_has_its_own_rules(make):
    without_proj = open_model(make(tensors={"blk.2.nextn.eh_proj.weight": None}))
    assert missing(without_proj) == ["model.layers.2.eh_proj.weight (blk.2.nextn.eh_proj.weight)"]
    table = (np.zeros((512, 256), np.float32), F32)
    more = {"blk.2.nextn.embed_tokens.weight": table, "blk.2.nextn.shared_head_head.weight": table}
    model = open_model(make(tensors=more))
    assert missing(model) == [] and unmapped(model) == []
    assert mapped(model)["blk.2.nextn.shared_head_head.weight"] == "model.layers.2.shared_head.head.weight"


def test_shared_layers_need_no_indexer_but_the_nextn_block_does(make, small_tensors):
    types = {"glm-dsa.attention.indexer.types": [True, False]}
    for layer, lost in ((0, 5), (1, 0), (2, 5)):
        gone = dict.fromkeys(name for name in small_tensors if name.startswith(f"blk.{layer}.indexer."))
        assert len(gone) == 5
        assert len(missing(open_model(make(metadata=types, tensors=gone)))) == lost


def test_a_tied_model_needs_no_output(make):
    model = open_model(make(tensors={"output.weight": None}))
    assert hf_config(model)["tie_word_embeddings"] is True and missing(model) == []
