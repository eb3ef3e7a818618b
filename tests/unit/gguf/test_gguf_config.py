from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from shim.gguf.config import _REQUIRED, generation_config, hf_config
from shim.gguf.files import GGUFProblem, Model, Part, Tensor

# The real GLM-5's numbers, under llama.cpp's keys.
GLM_5 = {
    "general.architecture": "glm-dsa",
    "glm-dsa.block_count": 79,
    "glm-dsa.context_length": 202752,
    "glm-dsa.embedding_length": 6144,
    "glm-dsa.feed_forward_length": 12288,
    "glm-dsa.attention.head_count": 64,
    "glm-dsa.attention.head_count_kv": 1,
    "glm-dsa.rope.freq_base": 1e6,
    "glm-dsa.attention.layer_norm_rms_epsilon": 1e-5,
    "glm-dsa.expert_count": 256,
    "glm-dsa.expert_used_count": 8,
    "glm-dsa.expert_group_count": 1,
    "glm-dsa.expert_group_used_count": 1,
    "glm-dsa.expert_gating_func": 2,
    "glm-dsa.leading_dense_block_count": 3,
    "glm-dsa.vocab_size": 154880,
    "glm-dsa.attention.q_lora_rank": 2048,
    "glm-dsa.attention.kv_lora_rank": 512,
    "glm-dsa.attention.key_length": 576,
    "glm-dsa.attention.value_length": 512,
    "glm-dsa.attention.key_length_mla": 256,
    "glm-dsa.attention.value_length_mla": 256,
    "glm-dsa.expert_feed_forward_length": 2048,
    "glm-dsa.expert_shared_count": 1,
    "glm-dsa.expert_weights_scale": 2.5,
    "glm-dsa.expert_weights_norm": True,
    "glm-dsa.rope.dimension_count": 64,
    "glm-dsa.nextn_predict_layers": 1,
    "glm-dsa.attention.indexer.head_count": 32,
    "glm-dsa.attention.indexer.key_length": 128,
    "glm-dsa.attention.indexer.top_k": 2048,
    "tokenizer.ggml.eos_token_id": 154820,
    "tokenizer.ggml.padding_token_id": 154820,
    "tokenizer.ggml.bos_token_id": 154822,
    "tokenizer.ggml.eot_token_id": 154827,
    "tokenizer.ggml.eom_token_id": 154829,
}
GLM_5_2 = {
    **GLM_5,
    "glm-dsa.context_length": 1048576,
    "glm-dsa.rope.freq_base": 8e6,
    "tokenizer.ggml.padding_token_id": 154821,
}


def model(metadata: dict, *, output: bool = True) -> Model:
    path = Path("GLM-5-00001-of-00010.gguf")
    tensors = {"output.weight": Tensor("output.weight", (154880, 6144), Type.Q8_0, path, 0, 0, np.empty(0))}
    return Model([Part(path, 0, 0, 0)], metadata, tensors if output else {})


def without(metadata: dict, *keys: str) -> dict:
    return {key: value for key, value in metadata.items() if key not in keys}


def test_glm_5():
    """Every value of GLM-5's published config.json (facts/gguf-glm-dsa.md, section 3)."""
    expected = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
        "bos_token_id": 154822,
    }
    config = hf_config(model(GLM_5))
    assert {key: config.get(key) for key in expected} == expected
    assert not [key for key in config if key.startswith("index_topk_") or key.startswith("index_s")]


def test_glm_5_2_without_the_types_key_shares_by_llama_cpps_rule():
    config = hf_config(model(GLM_5_2))
    pattern = config["index_topk_pattern"]
    assert len(pattern) == 78 and pattern.count("F") == 21 and pattern.count("S") == 57
    assert pattern.startswith("FFFSSSFSSSF") and pattern.endswith("FSSS")
    assert (config["index_topk_freq"], config["index_skip_topk_offset"]) == (4, 3)
    assert config["index_share_for_mtp_iteration"] is True
    assert config["rope_theta"] == 8e6 and config["max_position_embeddings"] == 1048576


def test_frequency_and_offset_say_the_same_as_the_pattern():
    """vLLM's and transformers' formula, which reads them where there is no pattern."""
    config = hf_config(model(GLM_5_2))
    freq, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    by_formula = "".join("F" if max(layer - offset + 1, 0) % freq == 0 else "S" for layer in range(78))
    assert by_formula == config["index_topk_pattern"]


def test_the_types_key_wins_over_the_context_length():
    types = [True, False] * 39
    config = hf_config(model({**GLM_5_2, "glm-dsa.attention.indexer.types": types}))
    assert config["index_topk_pattern"] == "FS" * 39
    assert "index_topk_freq" not in config and "index_skip_topk_offset" not in config
    all_full = hf_config(model({**GLM_5_2, "glm-dsa.attention.indexer.types": [True] * 78}))
    assert "index_topk_pattern" not in all_full and "index_topk_freq" not in all_full


def test_the_types_key_may_count_the_nextn_block():
    config = hf_config(model({**GLM_5, "glm-dsa.attention.indexer.types": [True, *[False] * 77, True]}))
    assert config["index_topk_pattern"] == "F" + "S" * 77


@pytest.mark.parametrize(("types", "what"), [([True] * 5, "5 entries, expected 78"), ([False] * 78, "layer 0")])
def test_types_that_cannot_be(types, what):
    with pytest.raises(GGUFProblem, match=what):
        hf_config(model({**GLM_5, "glm-dsa.attention.indexer.types": types}))


def test_gating():
    assert hf_config(model(without(GLM_5, "glm-dsa.expert_gating_func")))["scoring_func"] == "sigmoid"
    assert hf_config(model({**GLM_5, "glm-dsa.expert_gating_func": 1}))["scoring_func"] == "softmax"
    with pytest.raises(GGUFProblem, match="expert_gating_func is 3"):
        hf_config(model({**GLM_5, "glm-dsa.expert_gating_func": 3}))


def test_scaled_positions_are_refused():
    with pytest.raises(GGUFProblem, match=r"rope\.scaling\.type is yarn"):
        hf_config(model({**GLM_5, "glm-dsa.rope.scaling.type": "yarn"}))


def test_tied_only_without_an_output_tensor():
    assert hf_config(model(GLM_5))["tie_word_embeddings"] is False
    assert hf_config(model(GLM_5, output=False))["tie_word_embeddings"] is True


@pytest.mark.parametrize("name", [*_REQUIRED.values(), "block_count", "attention.key_length_mla", "rope.freq_base"])
def test_a_missing_key_is_named(name):
    with pytest.raises(GGUFProblem, match=f"metadata key glm-dsa.{name} is missing from GLM-5-00001-of-00010.gguf"):
        hf_config(model(without(GLM_5, f"glm-dsa.{name}")))


@pytest.mark.parametrize("value", ["x", -1, [1, 2], 1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["attention.head_count", "expert_gating_func", "nextn_predict_layers", "vocab_size"])
def test_a_value_of_another_kind_is_named(name, value):
    with pytest.raises(GGUFProblem, match=rf"metadata key glm-dsa.{name} is .*, expected an integer; download it"):
        hf_config(model({**GLM_5, f"glm-dsa.{name}": value}))


def test_round_numbers_and_flags_may_be_integers():
    config = hf_config(model({**GLM_5, "glm-dsa.rope.freq_base": 1000000, "glm-dsa.expert_weights_norm": 1}))
    assert repr(config["rope_theta"]) == "1000000.0" and config["norm_topk_prob"] is True


@pytest.mark.parametrize("value", [154880, -1, 1.5, "x", [1]])
@pytest.mark.parametrize("name", ["eos", "eom", "padding", "bos"])
def test_a_token_id_that_is_no_token(name, value):
    with pytest.raises(GGUFProblem, match=rf"tokenizer.ggml.{name}_token_id is .*, expected one of 154880 tokens"):
        hf_config(model({**GLM_5, f"tokenizer.ggml.{name}_token_id": value}))


def test_vocab_size_comes_from_the_embedding_where_the_key_is_absent(make):
    from shim.gguf.files import open_model

    config = hf_config(open_model(make(metadata={"glm-dsa.vocab_size": None})))
    assert config["vocab_size"] == 512


def test_generation_config_stops_at_each_id_once():
    assert generation_config(model(GLM_5))["eos_token_id"] == [154820, 154827, 154829]
    same = {**GLM_5, "tokenizer.ggml.eot_token_id": 154820}
    assert generation_config(model(same))["eos_token_id"] == [154820, 154829]
    only = without(
        GLM_5, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id", "tokenizer.ggml.padding_token_id"
    )
    assert generation_config(model(only))["eos_token_id"] == [154820]
    assert generation_config(model(only))["pad_token_id"] == 154820
    assert generation_config(model(GLM_5_2))["pad_token_id"] == 154821


def test_no_stop_at_all_is_a_problem():
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    with pytest.raises(GGUFProblem, match=r"tokenizer\.ggml\.eos_token_id is missing"):
        hf_config(model(without(GLM_5, *keys)))


@pytest.mark.needs("transformers")
def test_transformers_reads_it_as_meant(tiny_model):
    """Plain JSON, and GlmMoeDsaConfig (strict in transformers 5) takes every key."""
    from transformers import GlmMoeDsaConfig

    settings = json.loads(json.dumps(hf_config(model(GLM_5_2))))
    config = GlmMoeDsaConfig(**settings)
    assert config.indexer_types[:7] == ["full"] * 3 + ["shared"] * 3 + ["full"]
    assert config.mlp_layer_types[:4] == ["dense"] * 3 + ["sparse"]
    assert config.head_dim == 64 and config.rope_parameters["rope_theta"] == 8e6
    assert GlmMoeDsaConfig(**hf_config(model(GLM_5))).indexer_types == ["full"] * 78
