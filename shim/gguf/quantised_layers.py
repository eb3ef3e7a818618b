"""Which tensors of a GGUF stay quantised in vLLM's layers, and as which parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGMLQuantizationType as Type

from shim.gguf.config import hf_config
from shim.gguf.files import Model
from shim.gguf.names import mapped, split_name
from shim.gguf.tensor_types import PLAIN_TYPES

# vLLM builds these layers with the quantisation that it is given. It builds router, norms and eh_proj without one.
# Three more are unquantised: kv_b_proj is rebuilt and then split into matrices, the indexer's wk shares a layer with
# weights_proj from 0.20 on, and the embedding's weight is read by fused kernels (0.30 and later).
LINEAR = (
    *("attn_q_a", "attn_kv_a_mqa", "attn_q_b", "attn_output", "indexer.attn_q_b"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
)
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
HEADS = ("output", "nextn.shared_head_head")
# vLLM fuses each pair into one layer.
FUSED = {
    ("attn_q_a", "attn_kv_a_mqa"): "self_attn.fused_qkv_a_proj",
    ("ffn_gate", "ffn_up"): "mlp.gate_up_proj",
    ("ffn_gate_shexp", "ffn_up_shexp"): "mlp.shared_experts.gate_up_proj",
}
PAIRED = {part for pair in FUSED for part in pair}
EXPERT_PARAMETERS = ("gate_qweight", "up_qweight", "qweight")  # vLLM puts w13_ or w2_ before them
Types = tuple[Type | None, ...]  # None: in the model's own 16 bits


@dataclass(frozen=True)
class QuantisedLayers:
    """Plain data: it is pickled to the workers.

    layers: vLLM's linear layers and heads that hold quantised weights, by module name: the type of each weight that the
            layer fuses. experts: its `...mlp.experts`: the types of gate, up and down. All other layers are vLLM's own.
    parameters: GGUF name -> the parameter's last name, for each tensor of these layers.
    """

    layers: Mapping[str, Types]
    experts: Mapping[str, Types]
    parameters: Mapping[str, str]


def quantised_layers(model: Model, config: dict[str, Any] | None = None) -> QuantisedLayers:
    config = config or hf_config(model)
    known = mapped(model, config)
    layers: dict[str, Types] = {}
    experts: dict[str, Types] = {}
    parameters: dict[str, str] = {}

    def hold(found: dict[str, Types], module: str, *names: str) -> Types | None:
        types = tuple(None if (kind := model.tensors[name].type) in PLAIN_TYPES else kind for name in names)
        if not any(types):
            return None
        found[module] = types
        return types

    for layer in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        for pair, module in FUSED.items():
            names = [f"blk.{layer}.{part}.weight" for part in pair]
            if set(names) <= known.keys() and (types := hold(layers, f"model.layers.{layer}.{module}", *names)):
                parameters |= {name: linear_parameter(types, number) for number, name in enumerate(names)}
        names = [f"blk.{layer}.{part}.weight" for part in EXPERTS]
        if set(names) <= known.keys() and hold(experts, f"model.layers.{layer}.mlp.experts", *names):
            parameters |= dict(zip(names, EXPERT_PARAMETERS, strict=True))
    for name, hf in known.items():
        kind = layer_kind(name)
        single = (kind in LINEAR and kind not in PAIRED) or kind == "output"
        if single and hold(layers, hf.removesuffix(".weight"), name):
            parameters[name] = "qweight"
    for layer in range(config["num_hidden_layers"], config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        own = f"blk.{layer}.nextn.shared_head_head.weight"
        source = own if own in known else "output.weight"
        # vLLM's name of what a checkpoint calls shared_head.head
        if source in known and hold(layers, f"model.layers.{layer}.head", source):
            parameters[source] = "qweight"
    return QuantisedLayers(layers, experts, parameters)


def linear_parameter(types: Types, number: int) -> str:
    """The last name of the parameter that holds a layer's weight `number`: weights of one type share one."""
    return "qweight" if number == 0 or len(set(types)) == 1 else f"qweight_{number}"


def layer_kind(name: str) -> str:
    """`blk.3.ffn_up_exps.weight` -> `ffn_up_exps`, for a tensor whose layer can be quantised; else an empty string."""
    _, rest = split_name(name)
    stem = rest.removesuffix(".weight")
    return stem if stem in (*LINEAR, *EXPERTS, *HEADS) else ""


def types_digest(model: Model) -> str:
    """Of the type of each tensor: two files of one config may differ in it."""
    lines = sorted(f"{tensor.name} {tensor.type.name}\n" for tensor in model.tensors.values())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
