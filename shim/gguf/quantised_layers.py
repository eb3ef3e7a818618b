"""Which tensors of a GGUF stay quantised in vLLM's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shim.gguf.config import hf_config
from shim.gguf.files import GGUFProblem, Model
from shim.gguf.names import KV_B, mapped, split_name
from shim.gguf.tensor_types import PLAIN_TYPES

# vLLM builds these layers with the quantisation that it is given. It builds router, norms and eh_proj without one.
# Three more are better unquantised: kv_b_proj is rebuilt and then split into matrices, the indexer's wk shares a layer
# with weights_proj from 0.20 on, and fused kernels read the embedding's weight (0.30 and later).
LINEAR = (
    *("attn_q_a", "attn_kv_a_mqa", "attn_q_b", "attn_output", "indexer.attn_q_b"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
)
DENSE = (KV_B, "indexer.wk.weight", "indexer.weights_proj.weight")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
HEADS = ("output", "nextn.shared_head_head")
# vLLM fuses each pair into one layer. The two may be of different quantised types, but not one of them unquantised.
FUSED = {
    ("attn_q_a", "attn_kv_a_mqa"): "self_attn.fused_qkv_a_proj",
    ("ffn_gate", "ffn_up"): "mlp.gate_up_proj",
    ("ffn_gate_shexp", "ffn_up_shexp"): "mlp.shared_experts.gate_up_proj",
}


@dataclass(frozen=True)
class QuantisedLayers:
    """kept: GGUF names of the tensors that stay quantised.

    unquantised: names of vLLM's linear and embedding modules that could be quantised and are not.
    plain_experts: the `...mlp.experts` modules whose experts are F32, F16 or BF16.
    """

    kept: frozenset[str]
    unquantised: frozenset[str]
    plain_experts: frozenset[str]


def quantised_layers(model: Model, config: dict[str, Any] | None = None) -> QuantisedLayers:
    """Raises GGUFProblem, naming the tensors, if the experts of a layer are of types that vLLM cannot hold."""
    config = config or hf_config(model)
    problems = mixed_experts(model, config)
    if problems:
        raise GGUFProblem(problems[0])
    known = mapped(model, config)
    kept = {name for name in known if layer_kind(name) and model.tensors[name].type not in PLAIN_TYPES}
    first, nextn = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    unquantised = {"model.embed_tokens"}
    for layer in range(first + nextn):
        for pair, fused in FUSED.items():
            names = {f"blk.{layer}.{part}.weight" for part in pair} & known.keys()
            if not names <= kept:
                kept -= names
                unquantised.add(f"model.layers.{layer}.{fused}")
    unquantised |= {
        hf.removesuffix(".weight")
        for name, hf in known.items()
        if hf.endswith(DENSE) or (name not in kept and layer_kind(name) in (*LINEAR, *HEADS))
    }
    for layer in range(first, first + nextn):
        own = f"blk.{layer}.nextn.shared_head_head.weight"
        if (own if own in known else "output.weight") not in kept:
            unquantised.add(f"model.layers.{layer}.head")  # vLLM's name of what a checkpoint calls shared_head.head
    experts = {name for name in known if layer_kind(name) in EXPERTS}
    plain = {known[name].partition(".experts.")[0] + ".experts" for name in experts - kept}
    return QuantisedLayers(frozenset(kept), frozenset(unquantised), frozenset(plain))


def mixed_experts(model: Model, config: dict[str, Any]) -> list[str]:
    """One line for each layer whose experts vLLM's GGUF layers cannot hold.

    The layers keep one type for gate and up. They hold quantised experts, or unquantised ones, and not both.
    """
    lines = []
    for layer in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        found = {
            name: model.tensors[name].type
            for part in EXPERTS
            if (name := f"blk.{layer}.{part}.weight") in model.tensors
        }
        if len(found) < len(EXPERTS):
            continue
        gate, up, _ = found.values()
        plain = {kind in PLAIN_TYPES for kind in found.values()}
        if len(plain) == 2 or (plain == {False} and gate != up):
            types = ", ".join(f"{name} is {kind.name}" for name, kind in found.items())
            rule = "gate and up must be of one type" if len(plain) == 1 else "all must be quantised, or none"
            lines.append(f"{types}; {rule} in vLLM's GGUF layers; take another quantisation")
    return lines


def layer_kind(name: str) -> str:
    """`blk.3.ffn_up_exps.weight` -> `ffn_up_exps`, for a tensor whose layer can be quantised; else an empty string."""
    _, rest = split_name(name)
    stem = rest.removesuffix(".weight")
    return stem if stem in (*LINEAR, *EXPERTS, *HEADS) else ""
