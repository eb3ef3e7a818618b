"""`glm5-shim gguf`: what vLLM gets from a GGUF."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from shim.commands.output import print_columns
from shim.gguf.config import hf_config
from shim.gguf.files import Model
from shim.gguf.memory import memory
from shim.gguf.names import mapped, missing, unmapped, wrong_shapes
from shim.gguf.tensor_parallel import sizes_that_work
from shim.gguf.tokenizer import tables


def report(model: Model, tp: Sequence[int] = (1, 2, 4, 8)) -> dict[str, Any]:
    """The JSON object of `glm5-shim gguf --json`.

    memory: see `shim.gguf.memory.memory`.
    tensor_parallel: sizes that cut through no quantisation block.
    Raises GGUFProblem for metadata from which no config or no tokenizer can be made.
    """
    config = hf_config(model)
    tables(model)
    lost, absent, misshapen = unmapped(model, config), missing(model, config), wrong_shapes(model, config)
    return {
        "arch": model.metadata["general.architecture"],
        "name": model.metadata.get("general.name"),
        "config": config,
        "parts": [{"path": str(p.path), "tensors": p.tensors, "bytes": p.bytes} for p in model.parts],
        "quant_types": dict(Counter(t.type.name for t in model.tensors.values()).most_common()),
        "tensors": {"mapped": len(mapped(model, config)), "unmapped": lost, "missing": absent},
        "memory": memory(model, config, tp),
        "tensor_parallel": [] if lost or absent or misshapen else sizes_that_work(model),
        "problems": [
            *(f"tensor {name} has no place in GLM-5" for name in lost),
            *(f"tensor {name} is missing" for name in absent),
            *misshapen,
        ],
    }


def show(found: dict[str, Any]) -> None:
    """Prints what `report` found, for a person."""
    config, needs, tensors = found["config"], found["memory"], found["tensors"]
    layers, heads, topk = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "index_topk"))
    click.echo(f"{found['arch']}: {layers} layers, {heads} heads, top-k {topk}")
    print_columns([(p["path"], f"{p['tensors']} tensors", f"{p['bytes']:,} bytes") for p in found["parts"]])
    click.echo("quant types: " + ", ".join(f"{name} x {count}" for name, count in found["quant_types"].items()))
    click.echo(
        f"tensors: {tensors['mapped']} mapped, {len(tensors['unmapped'])} unmapped, {len(tensors['missing'])} missing"
    )
    per_gpu = ", ".join(f"TP{tp} {size / 2**30:.2f} GiB" for tp, size in needs["per_gpu"].items())
    click.echo(f"weights: {needs['weights_bytes'] / 2**30:.2f} GiB; per GPU: {per_gpu}")
    sizes = ", ".join(map(str, found["tensor_parallel"]))
    click.echo(f"tensor-parallel sizes that keep quantisation blocks whole: {sizes or 'none'}")
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")
