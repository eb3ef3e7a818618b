"""Which ways of sharing a GGUF's quantised tensors among GPUs work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import gguf

from shim.gguf.config import hf_config
from shim.gguf.files import Model, Tensor
from shim.gguf.names import mapped
from shim.gguf.quantised_layers import EXPERTS, LINEAR, layer_kind

# Each rank takes a run of columns of these. All other layers are cut between rows, or not at all.
CUT_ROWS = ("attn_output", "ffn_down", "ffn_down_shexp", "ffn_down_exps")
ALL2ALL = "allgather_reducescatter"  # vLLM's default: ranks gather all tokens, and each computes with its own experts


@dataclass(frozen=True)
class Parallel:
    """What the user asked for. data groups of `tensor` ranks share the experts: a shard of each, or, with
    expert_parallel, whole ones."""

    tensor: int = 1
    data: int = 1
    expert_parallel: bool = False
    eplb: bool = False
    all2all: str = ALL2ALL


def parallel_problem(model: Model, asked: Parallel) -> str | None:
    """One line if the quantised layers cannot do what was asked."""
    if asked.eplb:
        return "--enable-eplb copies experts between GPUs, and those of a GGUF stay where they are loaded; leave it out"
    if asked.expert_parallel and asked.data > 1 and asked.all2all != ALL2ALL:
        return (
            f"--all2all-backend {asked.all2all} sends tokens to kernels of its own, and a GGUF's experts have theirs; "
            f"take {ALL2ALL}, or leave the option out"
        )
    return cut_problem(model, asked)


def cut_problem(model: Model, asked: Parallel) -> str | None:
    """One line if a cut would go through a quantisation block, or would not come out even."""
    config = hf_config(model)
    heads = config["num_attention_heads"]
    if heads % asked.tensor:
        return f"tensor-parallel size {asked.tensor} does not divide the {heads} attention heads; {_advice(model)}"
    expert_ranks = 1 if asked.expert_parallel else asked.tensor * asked.data
    for name in mapped(model, config):
        tensor = model.tensors[name]
        pieces = expert_ranks if layer_kind(name) in EXPERTS else asked.tensor
        if _is_cut(tensor, pieces):
            block, _ = gguf.GGML_QUANT_SIZES[tensor.type]
            return (
                f"tensor-parallel size {pieces} cuts {name}, {tensor.shape[-1]} wide, into pieces that are no multiple "
                f"of {tensor.type.name}'s block of {block}; {_advice(model)}"
            )
    return None


def sizes_that_work(model: Model) -> list[int]:
    """Tensor-parallel sizes, among the divisors of the number of heads, that cut through no quantisation block."""
    config = hf_config(model)
    heads = config["num_attention_heads"]
    tensors = [model.tensors[name] for name in mapped(model, config)]
    sizes = (n for n in range(1, heads + 1) if heads % n == 0)
    return [n for n in sizes if not any(_is_cut(t, n) for t in tensors)]


def _advice(model: Model) -> str:
    sizes = ", ".join(map(str, sizes_that_work(model)))
    return f"sizes that work: {sizes or 'none, this file needs another quantisation'}"


def _is_cut(tensor: Tensor, pieces: int) -> bool:
    kind = layer_kind(tensor.name)
    if kind in CUT_ROWS:
        block, _ = gguf.GGML_QUANT_SIZES[tensor.type]
        return tensor.shape[-1] % (pieces * block) != 0
    # gate and up are cut between rows, into shards of the same width as those of down
    return kind in (*LINEAR[5:], *EXPERTS) and math.prod(tensor.shape[-2:-1]) % pieces != 0
