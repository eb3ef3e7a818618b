"""Writes a GGUF with GLM-5's own layer sizes and random weights, tensor by tensor, for `gguf_weights.py --big` and
`gguf_steps.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from shim.gguf.config import hf_config
from shim.gguf.files import Model
from shim.gguf.names import dimensions, find_row, required
from shim.gguf.quantize import random_blocks
from shim.gguf.tiny import Shape, add_metadata, tiny_metadata

VOCAB = 154880
GLM5 = Shape(
    layers=2,
    dense=1,
    nextn=0,
    topk=2048,
    hidden=6144,
    ffn=12288,
    moe_ffn=2048,
    heads=64,
    q_lora=2048,
    experts=256,
    experts_used=8,
)
# By name of tensor, "" for the rest. k_b's rows of 192 take blocks of 32 only.
MIXES: dict[str, dict[str, Type]] = {
    "ud": {"": Type.Q8_0, "ffn_gate_exps": Type.Q4_K, "ffn_up_exps": Type.Q4_K, "ffn_down_exps": Type.Q5_K},
    "k": {"": Type.Q6_K, "ffn_gate_exps": Type.Q2_K, "ffn_up_exps": Type.Q2_K, "ffn_down_exps": Type.Q3_K},
    "iq": {"": Type.Q6_K, "ffn_gate_exps": Type.IQ3_XXS, "ffn_up_exps": Type.IQ3_XXS, "ffn_down_exps": Type.IQ4_XS},
}
MOE_LAYER, REST = 5.9, 2.9  # GB: one layer of experts; embedding, head and a dense layer


def write(directory: Path, gigabytes: float) -> tuple[Path, int]:
    """Returns the path and the size in bytes: one dense layer and as many MoE layers as come closest to `gigabytes`."""
    return write_shape(directory, replace(GLM5, layers=1 + max(1, round((gigabytes - REST) / MOE_LAYER))))


def rank_share(layers: int, ranks: int) -> Shape:
    """One dense layer and MoE ones, as one rank of tensor parallelism over `ranks` has them."""
    split = {name: getattr(GLM5, name) // ranks for name in ("ffn", "moe_ffn", "heads")}
    return replace(GLM5, layers=layers, **split)


def write_shape(directory: Path, shape: Shape, mix: str = "ud", vocab: int = VOCAB) -> tuple[Path, int]:
    metadata = tiny_metadata(shape, "big")
    metadata["glm-dsa.vocab_size"] = vocab
    words, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.tokens"] = [*words, *(f"[unused{n}]" for n in range(len(words), vocab))]
    metadata["tokenizer.ggml.token_type"] = [*kinds, *[int(gguf.TokenType.UNUSED)] * (vocab - len(words))]
    tensors = wanted(metadata, MIXES[mix])

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"big-{mix}.gguf"
    writer = gguf.GGUFWriter(path, "glm-dsa")
    add_metadata(writer, metadata)
    for name, (size, kind) in tensors.items():
        held = size if kind is Type.F32 else gguf.quant_shape_to_byte_shape(size, kind)
        stored = np.dtype(np.float32 if kind is Type.F32 else np.uint8)
        nbytes = math.prod(held) * stored.itemsize
        writer.add_tensor_info(name, held, stored, nbytes, raw_dtype=None if kind is Type.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for name, (size, kind) in tensors.items():
        if kind is Type.F32:
            values = np.full(size, 1.0 if "norm" in name else 0.01, dtype=np.float32)
            if len(size) > 1:
                values = rng.standard_normal(size, dtype=np.float32) / np.float32(math.sqrt(size[-1]))
            writer.write_tensor_data(values)
        else:
            writer.write_tensor_data(random_blocks(size, kind, 1 / math.sqrt(size[-1]), rng))
    writer.close()
    return path, path.stat().st_size


def wanted(metadata: dict[str, object], kinds: dict[str, Type]) -> dict[str, tuple[tuple[int, ...], Type]]:
    """Name -> shape and type."""
    config = hf_config(Model([], metadata, {"output.weight": None}))  # type: ignore[dict-item]
    layers = config["num_hidden_layers"]
    names = [*required(config), *(f"blk.{n}.attn_{half}_b.weight" for n in range(layers) for half in "kv")]
    letters = dimensions(config)
    found = {}
    for name in names:
        row = find_row(name, layers)
        assert row is not None
        found[name] = (tuple(letters[letter] for letter in row.shape), kind_of(name, kinds))
    return found


def kind_of(name: str, kinds: dict[str, Type]) -> Type:
    part = name.split(".")[-2]
    if "norm" in name or part in ("exp_probs_b", "ffn_gate_inp", "proj"):
        return Type.F32
    return Type.Q8_0 if part == "attn_k_b" else kinds.get(part, kinds[""])
