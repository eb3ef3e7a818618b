"""What vLLM gets from a GGUF, as one JSON object: the answer of `glm5-shim gguf`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shim.gguf.config import hf_config
from shim.gguf.files import Model
from shim.gguf.memory import memory
from shim.gguf.names import mapped, missing, unmapped, wrong_shapes
from shim.gguf.quantised_layers import mixed_experts
from shim.gguf.tensor_parallel import sizes_that_work
from shim.gguf.tokenizer import tables


def report(model: Model, tp: Sequence[int] = (1, 2, 4, 8)) -> dict[str, Any]:
    """The JSON object of `glm5-shim gguf --json`.

    memory: see `shim.gguf.memory.memory`.
    tensor_parallel: sizes that cut through no quantisation block and leave a rank no more experts than vLLM addresses.
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
            *mixed_experts(model, config),
        ],
    }
