"""A GGUF's weights as torch tensors under their Hugging Face names, one at a time, dequantised on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from shim.gguf.config import hf_config
from shim.gguf.files import Model, Tensor
from shim.gguf.names import KV_B, mapped, require_complete, split_name


def weights(model: Model, *, nextn: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (HF name, tensor) as a DeepSeek-V2 checkpoint holds them: experts one by one, kv_b_proj in one piece.

    Quantised tensors come as float32, F32, F16 and BF16 as they are. `nextn=False` leaves out the NextN blocks. The
    indexers of layers that share a selection are left out, as they are from GLM-5.2's own checkpoint.
    Raises GGUFProblem, before the first tensor, unless the file is complete and every shape is right.
    """
    config = hf_config(model)
    require_complete(model, config)
    for name, hf in mapped(model, config).items():
        layer, rest = split_name(name)
        tensor = model.tensors[name]
        if layer is not None and layer >= config["num_hidden_layers"] and not nextn:
            continue
        if layer is not None and rest.startswith("indexer.") and shares_selection(config, layer):
            continue
        if hf.endswith(KV_B):
            if rest != "attn_v_b.weight":  # attn_k_b brings its other half along
                yield hf, kv_b(model, layer)
        elif ".experts.0." in hf:
            for expert in range(tensor.shape[0]):
                yield hf.replace(".experts.0.", f".experts.{expert}."), dense(tensor, expert)
        else:
            yield hf, dense(tensor)


def dense(tensor: Tensor, index: int | None = None) -> torch.Tensor:
    """The tensor, or only its `index`-th slice (an expert), as a torch tensor that owns its memory.

    float32 for a quantised type; F32, F16 and BF16 keep theirs, bit for bit.
    """
    raw = tensor.raw() if index is None else tensor.raw()[index]
    if tensor.type is Type.BF16:
        return torch.from_numpy(np.array(raw)).view(torch.bfloat16)
    if tensor.type in (Type.F32, Type.F16):
        return torch.from_numpy(np.array(raw))
    return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(raw, tensor.type)))


def kv_b(model: Model, layer: int | None) -> torch.Tensor:
    """kv_b_proj [heads * (nope + v), kv_lora], rebuilt from k_b and v_b, or as it is in an older file.

    llama.cpp's converter splits it by head and transposes k_b: k_b [heads, kv_lora, nope], v_b [heads, v, kv_lora].
    """
    fused = model.tensors.get(f"blk.{layer}.attn_kv_b.weight")
    if fused is not None:
        return dense(fused)
    k = dense(model.tensors[f"blk.{layer}.attn_k_b.weight"])
    v = dense(model.tensors[f"blk.{layer}.attn_v_b.weight"])
    if k.dtype != v.dtype:
        k, v = k.float(), v.float()
    return torch.cat([k.transpose(1, 2), v], dim=1).reshape(-1, v.shape[2])


def shares_selection(config: dict[str, Any], layer: int) -> bool:
    """Does this layer take its top-k from a layer before it? NextN blocks never do."""
    pattern = config.get("index_topk_pattern", "")
    return layer < len(pattern) and pattern[layer] == "S"
