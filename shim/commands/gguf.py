"""`glm5-shim gguf`: what vLLM will be told of a GGUF."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from shim.commands.output import print_columns
from shim.gguf.config import hf_config
from shim.gguf.files import Model, Tensor
from shim.gguf.names import mapped, missing, split_name, unmapped, wrong_shapes
from shim.gguf.quantised_layers import mixed_experts, sizes_that_work
from shim.gguf.tokenizer import tables

# Every rank holds all of these; everything else is cut into as many pieces as there are ranks.
REPLICATED = ("norm", "ffn_gate_inp", "exp_probs_b", "indexer.", "attn_q_a.", "attn_kv_a_mqa.", "nextn.eh_proj")
# vLLM holds these as bf16 whatever their type in the file (see shim.gguf.quantised_layers).
AS_BF16 = (
    *("token_embd.", "attn_k_b.", "attn_v_b.", "attn_kv_b.", "indexer.attn_k.", "indexer.proj."),
    *("nextn.eh_proj.", "nextn.embed_tokens."),
)


def report(model: Model, tp: Sequence[int] = (1, 2, 4, 8)) -> dict[str, Any]:
    """The JSON object of `glm5-shim gguf --json`.

    memory: weights only, without KV cache and activations. `weights_bytes` is what one GPU would hold without
    speculative decoding, `nextn_bytes` what that adds. Per GPU: replicated tensors (norms, router, indexer, q_a,
    kv_a) in full, the others divided by the number of GPUs; what vLLM holds as bf16 (`AS_BF16`) counts as that.
    tensor_parallel: sizes that cut through no quantisation block and leave a rank no more experts than vLLM addresses.
    Raises GGUFProblem for metadata from which no config or no tokenizer can be made.
    """
    config = hf_config(model)
    tables(model)
    main, extra = _by_block(model, config["num_hidden_layers"])
    lost, absent, misshapen = unmapped(model, config), missing(model, config), wrong_shapes(model, config)
    return {
        "arch": model.metadata["general.architecture"],
        "name": model.metadata.get("general.name"),
        "config": config,
        "parts": [{"path": str(p.path), "tensors": p.tensors, "bytes": p.bytes} for p in model.parts],
        "quant_types": dict(Counter(t.type.name for t in model.tensors.values()).most_common()),
        "tensors": {"mapped": len(mapped(model, config)), "unmapped": lost, "missing": absent},
        "memory": {
            "weights_bytes": sum(map(_bytes, main)),
            "nextn_bytes": sum(map(_bytes, extra)),
            "per_gpu": {str(ranks): sum(_bytes_per_rank(t, ranks) for t in main) for ranks in tp},
        },
        "tensor_parallel": [] if lost or absent or misshapen else sizes_that_work(model),
        "problems": [
            *(f"tensor {name} has no place in GLM-5" for name in lost),
            *(f"tensor {name} is missing" for name in absent),
            *misshapen,
            *mixed_experts(model, config),
        ],
    }


def show(found: dict[str, Any]) -> None:
    """Prints what `report` found, for a person."""
    config, memory, tensors = found["config"], found["memory"], found["tensors"]
    layers, heads, topk = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "index_topk"))
    click.echo(f"{found['arch']}: {layers} layers, {heads} heads, top-k {topk}")
    print_columns([(p["path"], f"{p['tensors']} tensors", f"{p['bytes']:,} bytes") for p in found["parts"]])
    click.echo("quant types: " + ", ".join(f"{name} x {count}" for name, count in found["quant_types"].items()))
    click.echo(
        f"tensors: {tensors['mapped']} mapped, {len(tensors['unmapped'])} unmapped, {len(tensors['missing'])} missing"
    )
    per_gpu = ", ".join(f"TP{tp} {size / 2**30:.2f} GiB" for tp, size in memory["per_gpu"].items())
    click.echo(f"weights: {memory['weights_bytes'] / 2**30:.2f} GiB; per GPU: {per_gpu}")
    sizes = ", ".join(map(str, found["tensor_parallel"]))
    click.echo(f"tensor-parallel sizes that keep quantisation blocks whole: {sizes or 'none'}")
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")


def _by_block(model: Model, n_layers: int) -> tuple[list[Tensor], list[Tensor]]:
    main: list[Tensor] = []
    extra: list[Tensor] = []
    for tensor in model.tensors.values():
        layer, _ = split_name(tensor.name)
        (main if layer is None or layer < n_layers else extra).append(tensor)
    return main, extra


def _bytes(tensor: Tensor) -> int:
    _, rest = split_name(tensor.name)
    if not rest.startswith(AS_BF16):
        return tensor.nbytes
    size = 2
    for length in tensor.shape:
        size *= length
    return size


def _bytes_per_rank(tensor: Tensor, ranks: int) -> int:
    _, rest = split_name(tensor.name)
    whole = rest.startswith(REPLICATED) or "norm" in rest
    return _bytes(tensor) if whole else -(-_bytes(tensor) // ranks)
