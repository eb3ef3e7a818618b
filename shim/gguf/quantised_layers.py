"""Which tensors of a GGUF stay quantised in vLLM's layers, and at which tensor-parallel sizes that can be done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gguf

from shim.gguf.config import hf_config
from shim.gguf.files import PLAIN_TYPES, GGUFProblem, Model, Tensor
from shim.gguf.names import KV_B, mapped, split_name

# The layers that vLLM builds with the quantisation it is given. All others are unquantised there (router, norms,
# eh_proj), or better so: kv_b_proj is rebuilt and then split into matrices, the indexer's wk shares a layer with
# weights_proj from 0.20 on, and the embedding's weight is read by fused kernels (0.30 and later).
LINEAR = (
    *("attn_q_a", "attn_kv_a_mqa", "attn_q_b", "attn_output", "indexer.attn_q_b"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
)
DENSE = (KV_B, "indexer.wk.weight", "indexer.weights_proj.weight")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
HEADS = ("output", "nextn.shared_head_head")
# vLLM fuses each pair into one layer: of two quantised types, yes; of a quantised and an unquantised one, no
FUSED = {
    ("attn_q_a", "attn_kv_a_mqa"): "self_attn.fused_qkv_a_proj",
    ("ffn_gate", "ffn_up"): "mlp.gate_up_proj",
    ("ffn_gate_shexp", "ffn_up_shexp"): "mlp.shared_experts.gate_up_proj",
}
# Their rows are cut, each rank taking a run of columns; all other layers are cut between rows, or not at all
CUT_ROWS = ("attn_output", "ffn_down", "ffn_down_shexp", "ffn_down_exps")
# vLLM's GGUF kernels count the bytes of a layer's experts (gate with up) in int32: the plugin's Triton ones all, CUDA's
# for many tokens. `expert * stride` wraps, and weights are read from elsewhere. Not told apart by type: refused
MOST_EXPERT_BYTES = 2**31 - 1


@dataclass(frozen=True)
class Plan:
    """kept: GGUF names of the tensors that stay quantised.

    unquantised: names of vLLM's linear and embedding modules that could be quantised and are not.
    plain_experts: the `...mlp.experts` modules whose experts are F32, F16 or BF16.
    """

    kept: frozenset[str]
    unquantised: frozenset[str]
    plain_experts: frozenset[str]


def plan(model: Model, config: dict[str, Any] | None = None) -> Plan:
    """Raises GGUFProblem, naming the tensors, if the experts of a layer are of types that vLLM cannot hold."""
    config = config or hf_config(model)
    problems = mixed_experts(model, config)
    if problems:
        raise GGUFProblem(problems[0])
    known = mapped(model, config)
    kept = {name for name in known if _kind(name) and model.tensors[name].type not in PLAIN_TYPES}
    first, nextn = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    loose = {"model.embed_tokens"}
    for layer in range(first + nextn):
        for pair, fused in FUSED.items():
            names = {f"blk.{layer}.{part}.weight" for part in pair} & known.keys()
            if not names <= kept:
                kept -= names
                loose.add(f"model.layers.{layer}.{fused}")
    loose |= {
        hf.removesuffix(".weight")
        for name, hf in known.items()
        if hf.endswith(DENSE) or (name not in kept and _kind(name) in (*LINEAR, *HEADS))
    }
    for layer in range(first, first + nextn):
        own = f"blk.{layer}.nextn.shared_head_head.weight"
        if (own if own in known else "output.weight") not in kept:
            loose.add(f"model.layers.{layer}.head")  # so vLLM calls what a checkpoint calls shared_head.head
    experts = {name for name in known if _kind(name) in EXPERTS}
    plain = {known[name].partition(".experts.")[0] + ".experts" for name in experts - kept}
    return Plan(frozenset(kept), frozenset(loose), frozenset(plain))


def mixed_experts(model: Model, config: dict[str, Any]) -> list[str]:
    """One line for each layer whose experts vLLM's GGUF layers cannot hold: gate and up must be of one type, which
    they keep once for both, and quantised and unquantised ones do not go together."""
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
            said = ", ".join(f"{name} is {kind.name}" for name, kind in found.items())
            rule = "gate and up must be of one type" if len(plain) == 1 else "all must be quantised, or none"
            lines.append(f"{said}; {rule} in vLLM's GGUF layers; take another quantisation")
    return lines


def cut_problem(model: Model, ranks: int, data_parallel: int = 1, expert_parallel: bool = False) -> str | None:
    """One line if cutting into `ranks` pieces goes through a quantisation block, does not come out even, or leaves a
    rank more experts than vLLM's kernels address.

    data_parallel: so many groups of `ranks` share the experts: pieces of each, or under expert_parallel whole ones.
    """
    expert_ranks = 1 if expert_parallel else ranks * data_parallel
    config = hf_config(model)
    heads = config["num_attention_heads"]
    if heads % ranks:
        return f"tensor-parallel size {ranks} does not divide the {heads} attention heads; {_advice(model)}"
    for name in mapped(model, config):
        tensor = model.tensors[name]
        pieces = expert_ranks if _kind(name) in EXPERTS else ranks
        if _is_cut(tensor, pieces):
            block, _ = gguf.GGML_QUANT_SIZES[tensor.type]
            return (
                f"tensor-parallel size {pieces} cuts {name}, {tensor.shape[-1]} wide, into pieces that are no multiple "
                f"of {tensor.type.name}'s block of {block}; {_advice(model)}"
            )
        if (size := _expert_bytes(model, name) / ranks / data_parallel) > MOST_EXPERT_BYTES:
            return (
                f"tensor-parallel size {ranks} leaves {size / 1e9:.1f} GB of experts of {name}'s layer to a rank; "
                f"vLLM's GGUF kernels address 2.1 GB (int32), and would read wrong weights; {_advice(model)}"
            )
    return None


def sizes_that_work(model: Model) -> list[int]:
    """Tensor-parallel sizes, among the divisors of the number of heads, that cut through no quantisation block and
    leave a rank no more experts than vLLM's kernels address."""
    config = hf_config(model)
    heads = config["num_attention_heads"]
    names = mapped(model, config)
    tensors = [model.tensors[name] for name in names]
    most = max((_expert_bytes(model, name) for name in names), default=0)
    sizes = (n for n in range(1, heads + 1) if heads % n == 0 and most <= n * MOST_EXPERT_BYTES)
    return [n for n in sizes if not any(_is_cut(t, n) for t in tensors)]


def _advice(model: Model) -> str:
    sizes = ", ".join(map(str, sizes_that_work(model)))
    return f"sizes that work: {sizes or 'none, this file needs another quantisation'}"


def _expert_bytes(model: Model, name: str) -> int:
    """Of what vLLM makes one tensor of all experts: of gate with up, or of down. 0 for others and plain types."""
    kind = _kind(name)
    if kind not in EXPERTS or model.tensors[name].type in PLAIN_TYPES:
        return 0
    pair = [name] if kind == "ffn_down_exps" else [name.replace(kind, half) for half in EXPERTS[:2]]
    return sum(model.tensors[half].nbytes for half in pair if half in model.tensors)


def _is_cut(tensor: Tensor, pieces: int) -> bool:
    kind = _kind(tensor.name)
    if kind in CUT_ROWS:
        block, _ = gguf.GGML_QUANT_SIZES[tensor.type]
        return tensor.shape[-1] % (pieces * block) != 0
    # gate and up are cut between rows, and must be of the same piece as down
    return kind in (*LINEAR[5:], *EXPERTS) and math.prod(tensor.shape[-2:-1]) % pieces != 0


def _kind(name: str) -> str:
    """`blk.3.ffn_up_exps.weight` -> `ffn_up_exps`, for a tensor whose layer can be quantised; else an empty string."""
    _, rest = split_name(name)
    stem = rest.removesuffix(".weight")
    return stem if stem in (*LINEAR, *EXPERTS, *HEADS) else ""
