"""Writes a tiny GLM-5 as GGUF: random weights, real geometry, a real tokenizer. For the demo and the tests.

It is quantised and laid out as unsloth's UD-Q4_K_XL of GLM-5: the first part has no tensors, kv_b is split into k_b and
v_b, and attn_kv_a_mqa comes before attn_q_a. `write_tiny` calls `tiny_metadata`, `tiny_tensors` and `write_gguf`. Tests
call these themselves and change what they return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from shim.gguf import tiny_tokenizer
from shim.gguf.quantize import quantize

Tensors = dict[str, tuple[np.ndarray, Type]]  # GGUF name -> (float32 values in torch order, type in the file)


# Types by name of tensor; "" is for all others. k_b's rows are 192 wide, which is no multiple of 256, so llama-quantize
# falls back to types of 32 values a block.
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps")
MIXES: dict[str, dict[str, Type]] = {
    "ud": {"": Type.Q8_0, **dict.fromkeys(_EXPERTS, Type.Q4_K), "ffn_down_exps": Type.Q5_K},
    "q8_0": {"": Type.Q8_0},
    "k": {
        **{"": Type.Q6_K, "attn_k_b": Type.Q5_1, "attn_q_a": Type.Q4_K, "ffn_up_shexp": Type.Q5_K, "output": Type.Q6_K},
        **dict.fromkeys(_EXPERTS, Type.Q5_K),
        "ffn_down_exps": Type.Q6_K,
    },
    "low": {
        **{"": Type.Q3_K, "attn_k_b": Type.Q4_0, "output": Type.Q6_K, "token_embd": Type.Q4_K, "attn_q_b": Type.Q5_0},
        **dict.fromkeys(_EXPERTS, Type.Q2_K),
    },
    "iq": {
        **{"": Type.IQ4_XS, "attn_k_b": Type.IQ4_NL, "output": Type.Q5_K, "attn_q_a": Type.IQ4_NL},
        **{"ffn_gate_shexp": Type.IQ3_S, "ffn_up_shexp": Type.IQ2_S, "ffn_gate": Type.IQ1_M, "ffn_up": Type.IQ3_XXS},
        **dict.fromkeys(_EXPERTS, Type.IQ2_XS),
        "ffn_down_exps": Type.IQ3_S,
    },
    "bf16": {"": Type.BF16},
    "f16": {"": Type.F16},
    "f32": {"": Type.F32},
}


@dataclass(frozen=True)
class Shape:
    """The geometry. K-quants need widths that are multiples of 256. Only `nope` is 192, as in GLM-5."""

    layers: int = 4
    dense: int = 1
    nextn: int = 1
    topk: int = 64
    context: int = 202752
    vocab: int = 1024
    hidden: int = 256
    ffn: int = 512
    moe_ffn: int = 256
    heads: int = 8
    q_lora: int = 256
    kv_lora: int = 512
    rope: int = 64
    nope: int = 192
    v: int = 256
    experts: int = 8
    experts_used: int = 2
    index_heads: int = 32
    index_dim: int = 128


def write_tiny(
    directory: Path,
    *,
    name: str = "tiny-glm5",
    parts: int = 4,
    seed: int = 0,
    mix: str = "ud",
    layers: int = 4,
    dense: int = 1,
    nextn: int = 1,
    topk: int = 64,
    context: int = 202752,
) -> Path:
    """Writes the model and returns the path of its first part. The same arguments give the same bytes.

    parts: 1, or more, of which the first has metadata only
    mix:   "ud" (Q4_K, Q5_K, Q6_K experts, Q8_0 for the rest) or another key of MIXES; norms and router are always F32
    """
    shape = Shape(layers=layers, dense=dense, nextn=nextn, topk=topk, context=context)
    return write_gguf(directory, name, tiny_metadata(shape, name), tiny_tensors(shape, seed, mix), parts)


def tiny_metadata(shape: Shape, name: str = "tiny-glm5") -> dict[str, Any]:
    """Every key that llama.cpp's converter writes for GLM-5, without attention.indexer.types: few files have it."""
    tokenizer = tiny_tokenizer.train(shape.vocab)
    tokens, kinds, merges = tiny_tokenizer.gguf_tables(tokenizer)
    arch = {
        "block_count": shape.layers + shape.nextn,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": 1,
        "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_used_count": shape.experts_used,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "leading_dense_block_count": shape.dense,
        "vocab_size": shape.vocab,
        "attention.q_lora_rank": shape.q_lora,
        "attention.kv_lora_rank": shape.kv_lora,
        "attention.key_length": shape.kv_lora + shape.rope,
        "attention.value_length": shape.kv_lora,
        "attention.key_length_mla": shape.nope + shape.rope,
        "attention.value_length_mla": shape.v,
        "expert_feed_forward_length": shape.moe_ffn,
        "expert_count": shape.experts,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "rope.dimension_count": shape.rope,
        "nextn_predict_layers": shape.nextn,
        "attention.indexer.head_count": shape.index_heads,
        "attention.indexer.key_length": shape.index_dim,
        "attention.indexer.top_k": shape.topk,
    }
    tokenizer_keys = {
        "model": "gpt2",
        "pre": "glm4",
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges,
        "eos_token_id": tokenizer.token_to_id(tiny_tokenizer.EOS),
        "padding_token_id": tokenizer.token_to_id(tiny_tokenizer.PAD),
        "bos_token_id": tokenizer.token_to_id(tiny_tokenizer.BOS),
        "eot_token_id": tokenizer.token_to_id(tiny_tokenizer.EOT),
        "eom_token_id": tokenizer.token_to_id(tiny_tokenizer.EOM),
    }
    return {
        "general.architecture": "glm-dsa",
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": 2,
        **{f"glm-dsa.{key}": value for key, value in arch.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer_keys.items()},
        "tokenizer.chat_template": tiny_tokenizer.CHAT_TEMPLATE,
    }


def tiny_tensors(shape: Shape, seed: int = 0, mix: str = "ud") -> Tensors:
    """The weights, in the order of llama.cpp's converter.

    The gains make attention flat, its output large, and the experts small. So rounding to bf16 changes the answer
    little, and attention to wrong tokens, or to all of them, changes it much.
    """
    rng = np.random.default_rng(seed)

    def normal(*size: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(size, dtype=np.float32) * np.float32(gain / math.sqrt(size[-1]))).astype(np.float32)

    def spread(size: int, mean: float, deviation: float) -> np.ndarray:
        return (mean + deviation * rng.standard_normal(size, dtype=np.float32)).astype(np.float32)

    kinds = _kinds(shape, mix)
    tensors: Tensors = {}

    def add(tensor: str, values: np.ndarray) -> None:
        tensors[tensor] = (values, kinds(tensor))

    add("token_embd.weight", normal(shape.vocab, shape.hidden, gain=math.sqrt(shape.hidden)))
    for layer in range(shape.layers + shape.nextn):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", spread(shape.hidden, 1, 0.2))
        if layer < shape.dense:
            add(block + "ffn_down.weight", normal(shape.hidden, shape.ffn, gain=0.2))
            add(block + "ffn_gate.weight", normal(shape.ffn, shape.hidden))
            add(block + "ffn_up.weight", normal(shape.ffn, shape.hidden))
        else:
            add(block + "exp_probs_b.bias", spread(shape.experts, 0, 0.1))
            add(block + "ffn_gate_inp.weight", normal(shape.experts, shape.hidden, gain=4))
            add(block + "ffn_down_shexp.weight", normal(shape.hidden, shape.moe_ffn, gain=0.2))
            add(block + "ffn_gate_shexp.weight", normal(shape.moe_ffn, shape.hidden))
            add(block + "ffn_up_shexp.weight", normal(shape.moe_ffn, shape.hidden))
        add(block + "ffn_norm.weight", spread(shape.hidden, 1, 0.2))
        add(block + "indexer.k_norm.bias", spread(shape.index_dim, 0, 0.3))
        add(block + "indexer.k_norm.weight", spread(shape.index_dim, 1, 0.2))
        add(block + "indexer.proj.weight", normal(shape.index_heads, shape.hidden))
        add(block + "indexer.attn_k.weight", normal(shape.index_dim, shape.hidden))
        add(block + "indexer.attn_q_b.weight", normal(shape.index_heads * shape.index_dim, shape.q_lora))
        add(block + "attn_kv_a_norm.weight", spread(shape.kv_lora, 1, 0.2))
        add(block + "attn_kv_a_mqa.weight", normal(shape.kv_lora + shape.rope, shape.hidden))
        kv_b = normal(shape.heads, shape.nope + shape.v, shape.kv_lora)
        add(block + "attn_k_b.weight", np.ascontiguousarray(kv_b[:, : shape.nope].transpose(0, 2, 1)))
        add(block + "attn_v_b.weight", np.ascontiguousarray(kv_b[:, shape.nope :]))
        add(block + "attn_output.weight", normal(shape.hidden, shape.heads * shape.v, gain=4))
        add(block + "attn_q_a_norm.weight", spread(shape.q_lora, 1, 0.2))
        add(block + "attn_q_a.weight", normal(shape.q_lora, shape.hidden))
        add(block + "attn_q_b.weight", normal(shape.heads * (shape.nope + shape.rope), shape.q_lora, gain=0.3))
        if layer >= shape.dense:
            add(block + "ffn_gate_exps.weight", normal(shape.experts, shape.moe_ffn, shape.hidden))
            add(block + "ffn_up_exps.weight", normal(shape.experts, shape.moe_ffn, shape.hidden))
            add(block + "ffn_down_exps.weight", normal(shape.experts, shape.hidden, shape.moe_ffn, gain=0.2))
        if layer >= shape.layers:
            add(block + "nextn.eh_proj.weight", normal(shape.hidden, 2 * shape.hidden))
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                add(block + f"nextn.{norm}.weight", spread(shape.hidden, 1, 0.2))
    add("output_norm.weight", spread(shape.hidden, 1, 0.2))
    add("output.weight", normal(shape.vocab, shape.hidden, gain=4))
    return tensors


def _kinds(shape: Shape, mix: str) -> Callable[[str], Type]:
    """Tensor name -> type. In "ud", ffn_down_exps of one layer is Q6_K, as in unsloth's UD-Q4_K_XL."""
    kinds = MIXES[mix]

    def kind(name: str) -> Type:
        part = name.split(".")[-2]
        if "norm" in name or part in ("exp_probs_b", "ffn_gate_inp", "proj"):
            return Type.F32
        if mix == "ud" and name == f"blk.{shape.dense}.ffn_down_exps.weight":
            return Type.Q6_K
        return kinds.get(part, kinds[""])

    return kind


def write_gguf(
    directory: Path,
    name: str,
    metadata: Mapping[str, Any],
    tensors: Tensors,
    parts: int = 1,
    *,
    empty_first: bool = True,
) -> Path:
    """Quantises and writes `name.gguf`, or `name-00001-of-....gguf` and so on. Returns the first path.

    empty_first: the first of several parts has metadata only, as unsloth's has.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    per_part = math.ceil(len(tensors) / max(parts - empty_first, 1))
    writer = gguf.GGUFWriter(
        directory / f"{name}.gguf",
        metadata["general.architecture"],
        split_max_tensors=per_part if parts > 1 else 0,
        small_first_shard=parts > 1 and empty_first,
    )
    add_metadata(writer, metadata)
    for tensor, (values, kind) in tensors.items():
        plain = kind in (Type.F32, Type.F16)
        writer.add_tensor(tensor, quantize(values, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / (f"{name}.gguf" if parts == 1 else f"{name}-00001-of-{parts:05d}.gguf")


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if key != "general.architecture":  # the writer's constructor has written it
            _add_key(writer, key, value)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Uses the types of llama.cpp's converter. bool comes before int, because True is an int."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
