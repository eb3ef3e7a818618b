"""From a GGUF's metadata, the config.json and generation_config.json that vLLM will see."""

from __future__ import annotations

import math
from typing import Any

from shim.gguf.files import GGUFProblem, Model

ARCH = "glm-dsa"

# HF key -> GGUF key that the file must have. The names are those of llama.cpp's converter for glm-dsa.
_REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": "attention.value_length_mla",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "index_topk": "attention.indexer.top_k",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
}
_OPTIONAL = {
    "n_shared_experts": ("expert_shared_count", 1),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "num_nextn_predict_layers": ("nextn_predict_layers", 0),
}
# The same for GLM-5, 5.1 and 5.2, and in no GGUF. vLLM's own defaults for the first three are wrong for GLM, and no
# error would show it: a NEOX indexer, no router bias, a softmax router.
_CONSTANT = {
    "indexer_rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "ep_size": 1,
    "pretraining_tp": 1,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
_SCORING = {1: "softmax", 2: "sigmoid"}  # llama.cpp: a glm-dsa file without the key means sigmoid
# The keys whose values are not integers
_KINDS = {
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "rope.freq_base", "expert_weights_scale"), float),
    "expert_weights_norm": bool,
}
_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false"}
_MOST_LAYERS = 1000  # a corrupt count must not cost memory
_GLM_5_2_CONTEXT = 1048576
_GLM_5_2_SHARING = {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True}


def hf_config(model: Model) -> dict[str, Any]:
    """The config.json. Raises GGUFProblem naming a missing key, or a value that GLM-5 does not have."""
    config: dict[str, Any] = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **_CONSTANT}
    config |= {key: _required(model, name) for key, name in _REQUIRED.items()}
    config |= {key: _number(model, name, default) for key, (name, default) in _OPTIONAL.items()}

    # block_count counts the NextN block too, as the last
    config["num_hidden_layers"] = _required(model, "block_count") - config["num_nextn_predict_layers"]
    if not 0 < config["num_hidden_layers"] <= _MOST_LAYERS:
        raise GGUFProblem(f"{ARCH}.block_count is {_required(model, 'block_count')}, no GLM-5's; download it again")
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["qk_head_dim"] = _required(model, "attention.key_length_mla")
    config["qk_nope_head_dim"] = config["qk_head_dim"] - config["qk_rope_head_dim"]
    config["head_dim"] = config["qk_rope_head_dim"]  # transformers takes its rotary width from here
    config["vocab_size"] = _vocab_size(model)
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    config |= _rope(model)

    gating = _number(model, "expert_gating_func", 2)
    if gating not in _SCORING:
        raise GGUFProblem(
            f"{ARCH}.expert_gating_func is {gating}, expected 1 (softmax) or 2 (sigmoid); no GLM-5 has it"
        )
    config["scoring_func"] = _SCORING[gating]

    pattern = index_pattern(model, config["num_hidden_layers"])
    if "S" in pattern:
        config["index_topk_pattern"] = pattern
        if pattern == _glm_5_2_pattern(len(pattern)):
            config |= _GLM_5_2_SHARING
    return config | _token_ids(model)


def generation_config(model: Model) -> dict[str, Any]:
    """The generation_config.json: every id at which GLM stops, and the padding id."""
    ids = _token_ids(model)
    return {"_from_model_config": True, "eos_token_id": ids["eos_token_id"], "pad_token_id": ids["pad_token_id"]}


def index_pattern(model: Model, layers: int) -> str:
    """One letter per layer: F runs its own indexer, S shares the selection of the F before it.

    The rule is llama.cpp's. A file with the key says it for each layer (true means full). Without the key, every layer
    is full. But a file with GLM-5.2's context length follows GLM-5.2's schedule.
    """
    types = model.metadata.get(f"{ARCH}.attention.indexer.types")
    if types is None:
        long_context = _required(model, "context_length") >= _GLM_5_2_CONTEXT
        return _glm_5_2_pattern(layers) if long_context else "F" * layers
    if not isinstance(types, list):
        types = [types] * layers
    if len(types) < layers:
        raise GGUFProblem(
            f"{ARCH}.attention.indexer.types has {len(types)} entries, expected {layers}; convert it anew"
        )
    pattern = "".join("F" if full else "S" for full in types[:layers])
    if not pattern.startswith("F"):
        raise GGUFProblem(f"{ARCH}.attention.indexer.types lets layer 0 share a selection that no layer made")
    return pattern


def _glm_5_2_pattern(layers: int) -> str:
    return "".join("F" if layer < 3 or (layer - 2) % 4 == 0 else "S" for layer in range(layers))


def _required(model: Model, name: str) -> Any:
    key = f"{ARCH}.{name}"
    if key not in model.metadata:
        raise GGUFProblem(f"metadata key {key} is missing from {model.parts[0].path.name}; convert the model anew")
    return _number(model, name, None)


def _number(model: Model, name: str, default: Any) -> Any:
    """The value of a key, or `default` without the key. GGUFProblem unless it is of the key's type, finite and >= 0."""
    key = f"{ARCH}.{name}"
    value = model.metadata.get(key, default)
    kind = _KINDS.get(name, int)
    # Converters may write a round float as an integer, and a flag as bool or integer
    if not isinstance(value, (bool, int) if kind is bool else (kind, int)) or not 0 <= value < math.inf:
        raise GGUFProblem(f"metadata key {key} is {value!r}, expected {_KIND_NAMES[kind]}; download it again")
    return kind(value)


def _vocab_size(model: Model) -> int:
    embedding = model.tensors.get("token_embd.weight")
    return _number(model, "vocab_size", 0) or (embedding.shape[0] if embedding else 0)


def _rope(model: Model) -> dict[str, Any]:
    scaling = model.metadata.get(f"{ARCH}.rope.scaling.type", "none")
    if scaling != "none":
        raise GGUFProblem(f"{ARCH}.rope.scaling.type is {scaling}, expected none; no GLM-5 has scaled positions")
    theta = _required(model, "rope.freq_base")
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _token_ids(model: Model) -> dict[str, Any]:
    """GLM ends its turn with the role of the next turn, so <|user|> (eot) and <|observation|> (eom) stop it, too."""
    stops = [_token_id(model, name) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(stop for stop in stops if stop is not None))
    if not eos:
        raise GGUFProblem("metadata key tokenizer.ggml.eos_token_id is missing; convert the model anew")
    pad = _token_id(model, "padding")
    return {
        "eos_token_id": eos,
        "pad_token_id": eos[0] if pad is None else pad,
        "bos_token_id": _token_id(model, "bos"),
    }


def _token_id(model: Model, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = model.metadata.get(key)
    size = _vocab_size(model)
    if value is not None and not (isinstance(value, int) and 0 <= value < size):
        raise GGUFProblem(f"metadata key {key} is {value!r}, expected one of {size} tokens; download it again")
    return value
