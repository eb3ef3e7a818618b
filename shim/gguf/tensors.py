"""A GGUF's weights as torch tensors under their Hugging Face names, one at a time.

Each is dequantised, on the CPU, unless it is of a layer that stays quantised: then it comes as the file has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from shim.gguf.config import hf_config
from shim.gguf.files import Model, Tensor
from shim.gguf.names import KV_B, mapped, require_complete, split_name
from shim.gguf.tensor_types import PLAIN_TYPES

Weights = Iterator[tuple[str, torch.Tensor]]
_NONE: Mapping[str, str] = MappingProxyType({})
_CHUNK = 1 << 24  # values dequantised at a time: 64 MiB of float32, and as much again inside gguf-py
# A NextN block may leave these out, and then uses the model's: (name in the block, name in the model)
_SHARED = (("nextn.embed_tokens.weight", "token_embd.weight"), ("nextn.shared_head_head.weight", "output.weight"))


def weights(
    model: Model, *, nextn: bool = False, dtype: torch.dtype = torch.float32, parameters: Mapping[str, str] = _NONE
) -> Weights:
    """Yields (HF name, tensor) as a DeepSeek-V2 checkpoint holds them: experts one by one, kv_b_proj in one piece.

    Quantised tensors come as `dtype`, F32, F16 and BF16 as they are. `nextn=False` leaves out the NextN blocks. The
    indexers of layers that share a selection are left out, as they are from GLM-5.2's own checkpoint.
    parameters: of the tensors of quantised layers, what their names end in instead of "weight" (see
    `shim.gguf.quantised_layers`). Quantised ones come as uint8 rows that lie in the memory-mapped file.
    Raises GGUFProblem, before the first tensor, unless the file is complete and every shape is right.
    """
    config = hf_config(model)
    require_complete(model, config)
    for name, hf in mapped(model, config).items():
        layer, _ = split_name(name)
        if nextn or layer is None or layer < config["num_hidden_layers"]:
            yield from _tensor(model, config, name, hf, dtype, parameters)
    if "output.weight" not in model.tensors:  # a tied head, which vLLM builds as a layer of its own
        yield "lm_head.weight", dense(model.tensors["token_embd.weight"], dtype=dtype)


def draft_weights(
    model: Model, *, dtype: torch.dtype = torch.float32, parameters: Mapping[str, str] = _NONE
) -> Weights:
    """The same for the NextN blocks alone, each with an embedding and a head: its own, or the model's."""
    config = hf_config(model)
    require_complete(model, config)
    first = config["num_hidden_layers"]
    for name, hf in mapped(model, config).items():
        layer, _ = split_name(name)
        if layer is not None and layer >= first:
            yield from _tensor(model, config, name, hf, dtype, parameters)
    for layer in range(first, first + config["num_nextn_predict_layers"]):
        for own, common in _SHARED:
            if f"blk.{layer}.{own}" not in model.tensors:
                source = common if common in model.tensors else "token_embd.weight"  # a tied head
                hf = f"model.layers.{layer}.{'embed_tokens' if 'embed' in own else 'shared_head.head'}.weight"
                yield from _tensor(model, config, source, hf, dtype, parameters)


def _tensor(
    model: Model, config: dict[str, Any], name: str, hf: str, dtype: torch.dtype, parameters: Mapping[str, str]
) -> Weights:
    """What becomes of one tensor of the file: nothing, one, or as many as there are experts in it."""
    layer, rest = split_name(name)
    tensor = model.tensors[name]
    if rest.startswith("indexer.") and layer is not None and shares_selection(config, layer):
        return
    if hf.endswith(KV_B):
        if rest != "attn_v_b.weight":  # kv_b reads both halves when attn_k_b comes
            yield hf, kv_b(model, layer, dtype)
        return
    experts = range(tensor.shape[0]) if ".experts.0." in hf else [None]
    for expert in experts:
        one = hf if expert is None else hf.replace(".experts.0.", f".experts.{expert}.")
        if name in parameters:
            one = one.removesuffix("weight") + parameters[name]
        stays = name in parameters and tensor.type not in PLAIN_TYPES
        yield one, packed(tensor, expert) if stays else dense(tensor, expert, dtype)


def packed(tensor: Tensor, index: int | None = None) -> torch.Tensor:
    """The tensor, or its `index`-th slice, as uint8 [..., bytes of a row]: a view of the file. Do not write to it."""
    raw = tensor.raw() if index is None else tensor.raw()[index]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw)


def dense(tensor: Tensor, index: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor, or its `index`-th slice (an expert), as a torch tensor that owns its memory.

    A quantised type becomes `dtype`. F32, F16 and BF16 keep their types and bits.
    """
    raw = tensor.raw() if index is None else tensor.raw()[index]
    if tensor.type is Type.BF16:
        return torch.from_numpy(np.array(raw)).view(torch.bfloat16)
    if tensor.type in (Type.F32, Type.F16):
        return torch.from_numpy(np.array(raw))
    shape = tensor.shape if index is None else tensor.shape[1:]
    out = torch.empty(shape, dtype=dtype)
    rows, flat = raw.reshape(-1, raw.shape[-1]), out.view(-1, shape[-1])
    step = max(1, _CHUNK // shape[-1])
    for start in range(0, len(rows), step):
        values = np.ascontiguousarray(gguf.dequantize(rows[start : start + step], tensor.type))
        flat[start : start + step] = torch.from_numpy(values)
    return out


def kv_b(model: Model, layer: int | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """kv_b_proj [heads * (nope + v), kv_lora], rebuilt from k_b and v_b. An older file has it in one piece.

    llama.cpp's converter splits it by head, and transposes k_b: k_b [heads, kv_lora, nope], v_b [heads, v, kv_lora].
    """
    fused = model.tensors.get(f"blk.{layer}.attn_kv_b.weight")
    if fused is not None:
        return dense(fused, dtype=dtype)
    k, v = (dense(model.tensors[f"blk.{layer}.attn_{half}_b.weight"], dtype=dtype) for half in "kv")
    common = torch.promote_types(k.dtype, v.dtype)
    return torch.cat([k.to(common).transpose(1, 2), v.to(common)], dim=1).reshape(-1, v.shape[2])


def shares_selection(config: dict[str, Any], layer: int) -> bool:
    """Does this layer take its top-k from a layer before it? NextN blocks never do."""
    pattern = config.get("index_topk_pattern", "")
    return layer < len(pattern) and pattern[layer] == "S"
