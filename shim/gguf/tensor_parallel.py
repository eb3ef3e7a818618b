"""At which tensor-parallel sizes a GGUF's quantised tensors can be cut into shards."""

from __future__ import annotations

import math

import gguf

from shim.gguf.config import hf_config
from shim.gguf.files import Model, Tensor
from shim.gguf.names import mapped
from shim.gguf.quantised_layers import EXPERTS, LINEAR, layer_kind
from shim.gguf.tensor_types import PLAIN_TYPES

# Each rank takes a run of columns of these. All other layers are cut between rows, or not at all.
CUT_ROWS = ("attn_output", "ffn_down", "ffn_down_shexp", "ffn_down_exps")
# vLLM's GGUF kernels count the bytes of a layer's experts (gate with up) in int32: all of the plugin's Triton kernels,
# and the CUDA kernels for many tokens. `expert * stride` wraps, and weights are read from elsewhere. So larger layers
# are refused, whatever their type.
MOST_EXPERT_BYTES = 2**31 - 1


def cut_problem(model: Model, ranks: int, data_parallel: int = 1, expert_parallel: bool = False) -> str | None:
    """One line if `ranks` shards would cut through a quantisation block, would not come out even, or would leave a
    rank more experts than vLLM's kernels address.

    data_parallel: so many groups of `ranks` share the experts: a shard of each expert, or, under expert_parallel, whole
    experts.
    """
    expert_ranks = 1 if expert_parallel else ranks * data_parallel
    config = hf_config(model)
    heads = config["num_attention_heads"]
    if heads % ranks:
        return f"tensor-parallel size {ranks} does not divide the {heads} attention heads; {_advice(model)}"
    for name in mapped(model, config):
        tensor = model.tensors[name]
        pieces = expert_ranks if layer_kind(name) in EXPERTS else ranks
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
    """Bytes of the tensor that vLLM makes of one tensor of all experts: gate with up, or down. 0 for others and plain
    types."""
    kind = layer_kind(name)
    if kind not in EXPERTS or model.tensors[name].type in PLAIN_TYPES:
        return 0
    pair = [name] if kind == "ffn_down_exps" else [name.replace(kind, half) for half in EXPERTS[:2]]
    return sum(model.tensors[half].nbytes for half in pair if half in model.tensors)


def _is_cut(tensor: Tensor, pieces: int) -> bool:
    kind = layer_kind(tensor.name)
    if kind in CUT_ROWS:
        block, _ = gguf.GGML_QUANT_SIZES[tensor.type]
        return tensor.shape[-1] % (pieces * block) != 0
    # gate and up are cut between rows, into shards of the same width as those of down
    return kind in (*LINEAR[5:], *EXPERTS) and math.prod(tensor.shape[-2:-1]) % pieces != 0
