"""Which GGUF tensor is which Hugging Face tensor, of what shape, and what a complete file holds.

The names are those of llama.cpp's converter for glm-dsa. A name is matched whole, or whole after its `blk.N.`. Nothing
is replaced inside a name: other loaders do that, and spoil `weights_proj.weight`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from shim.gguf.config import hf_config
from shim.gguf.files import GGUFProblem, Model


class Row(NamedTuple):
    """One tensor. `where`: the blocks that have it. `shape`: torch's order, in the words of `dimensions`."""

    gguf: str
    hf: str
    where: str
    shape: tuple[str, ...]


KV_B = "self_attn.kv_b_proj.weight"

TOP = (
    Row("token_embd.weight", "model.embed_tokens.weight", "model", ("vocab", "hidden")),
    Row("output_norm.weight", "model.norm.weight", "model", ("hidden",)),
    Row("output.weight", "lm_head.weight", "untied", ("vocab", "hidden")),
)

# A loader should see them in this order: q_a before kv_a, and gate before up. vLLM's fused layers join shards in the
# order in which they arrive. `experts.0` stands for all experts of a stacked tensor.
BLOCK = (
    Row("attn_norm.weight", "input_layernorm.weight", "all", ("hidden",)),
    Row("attn_q_a.weight", "self_attn.q_a_proj.weight", "all", ("q_lora", "hidden")),
    Row("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight", "all", ("kv_lora+rope", "hidden")),
    Row("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "all", ("q_lora",)),
    Row("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "all", ("kv_lora",)),
    Row("attn_q_b.weight", "self_attn.q_b_proj.weight", "all", ("heads*qk", "q_lora")),
    Row("attn_k_b.weight", KV_B, "kv_b halves", ("heads", "kv_lora", "nope")),  # transposed by the converter
    Row("attn_v_b.weight", KV_B, "kv_b halves", ("heads", "v", "kv_lora")),
    Row("attn_kv_b.weight", KV_B, "kv_b fused", ("heads*(nope+v)", "kv_lora")),  # files older than MLA in llama.cpp
    Row("attn_output.weight", "self_attn.o_proj.weight", "all", ("hidden", "heads*v")),
    Row("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight", "indexer", ("index_heads*index_dim", "q_lora")),
    Row("indexer.attn_k.weight", "self_attn.indexer.wk.weight", "indexer", ("index_dim", "hidden")),
    Row("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight", "indexer", ("index_dim",)),
    Row("indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", "indexer", ("index_dim",)),
    Row("indexer.proj.weight", "self_attn.indexer.weights_proj.weight", "indexer", ("index_heads", "hidden")),
    Row("ffn_norm.weight", "post_attention_layernorm.weight", "all", ("hidden",)),
    Row("ffn_gate.weight", "mlp.gate_proj.weight", "dense", ("ffn", "hidden")),
    Row("ffn_up.weight", "mlp.up_proj.weight", "dense", ("ffn", "hidden")),
    Row("ffn_down.weight", "mlp.down_proj.weight", "dense", ("hidden", "ffn")),
    Row("ffn_gate_inp.weight", "mlp.gate.weight", "moe", ("experts", "hidden")),
    Row("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "moe", ("experts",)),
    Row("ffn_gate_exps.weight", "mlp.experts.0.gate_proj.weight", "moe", ("experts", "moe_ffn", "hidden")),
    Row("ffn_up_exps.weight", "mlp.experts.0.up_proj.weight", "moe", ("experts", "moe_ffn", "hidden")),
    Row("ffn_down_exps.weight", "mlp.experts.0.down_proj.weight", "moe", ("experts", "hidden", "moe_ffn")),
    Row("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight", "shared", ("shared_ffn", "hidden")),
    Row("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight", "shared", ("shared_ffn", "hidden")),
    Row("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight", "shared", ("hidden", "shared_ffn")),
    Row("nextn.eh_proj.weight", "eh_proj.weight", "nextn", ("hidden", "2*hidden")),
    Row("nextn.enorm.weight", "enorm.weight", "nextn", ("hidden",)),
    Row("nextn.hnorm.weight", "hnorm.weight", "nextn", ("hidden",)),
    Row("nextn.shared_head_norm.weight", "shared_head.norm.weight", "nextn", ("hidden",)),
    # optional: the NextN block may use the model's own
    Row("nextn.embed_tokens.weight", "embed_tokens.weight", "nextn optional", ("vocab", "hidden")),
    Row("nextn.shared_head_head.weight", "shared_head.head.weight", "nextn optional", ("vocab", "hidden")),
)
_TOP = {row.gguf: row for row in TOP}
_BLOCK = {row.gguf: row for row in BLOCK}
_ORDER = {row.gguf: position for position, row in enumerate(BLOCK)}
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def split_name(gguf_name: str) -> tuple[int | None, str]:
    """`blk.3.attn_q_a.weight` -> (3, `attn_q_a.weight`); a tensor outside the blocks -> (None, its name)."""
    match = _IN_BLOCK.fullmatch(gguf_name)
    return (int(match[1]), match[2]) if match else (None, gguf_name)


def find_row(gguf_name: str, n_layers: int, nextn: int = 0) -> Row | None:
    """The table's row for a tensor. None if a model of `n_layers` blocks and `nextn` NextN blocks does not have it."""
    layer, rest = split_name(gguf_name)
    if layer is None:
        return _TOP.get(rest)
    row = _BLOCK.get(rest)
    if row is None or layer >= n_layers + nextn:
        return None
    return row if layer >= n_layers or not row.where.startswith("nextn") else None


def hf_name(gguf_name: str, n_layers: int, nextn: int = 0) -> str | None:
    """The Hugging Face name, or None if there is none. k_b and v_b (or the fused kv_b) are all `kv_b_proj`."""
    row = find_row(gguf_name, n_layers, nextn)
    layer, _ = split_name(gguf_name)
    return row and (row.hf if layer is None else f"model.layers.{layer}.{row.hf}")


def mapped(model: Model, config: dict[str, Any] | None = None) -> dict[str, str]:
    """GGUF name -> HF name of every tensor that has one, in loading order: TOP, then each block in BLOCK's order."""
    config = config or hf_config(model)
    found = {name: hf_name(name, *_layers(config)) for name in sorted(model.tensors, key=_position)}
    return {name: hf for name, hf in found.items() if hf is not None}


def unmapped(model: Model, config: dict[str, Any] | None = None) -> list[str]:
    """GGUF names without a row. A loader would drop these weights, and nobody would notice."""
    known = mapped(model, config)
    return [name for name in model.tensors if name not in known]


def missing(model: Model, config: dict[str, Any] | None = None) -> list[str]:
    """HF names that the config needs and the file does not have, each with the GGUF name behind it."""
    config = config or hf_config(model)
    absent = [f"{hf} ({name})" for name, hf in required(config).items() if name not in model.tensors]
    for layer in range(sum(_layers(config))):
        k_b, v_b, fused = (
            f"blk.{layer}.{name}.weight" in model.tensors for name in ("attn_k_b", "attn_v_b", "attn_kv_b")
        )
        if not fused and not (k_b and v_b):
            wanted = [name for name, found in (("attn_k_b", k_b), ("attn_v_b", v_b)) if not found]
            absent.append(f"model.layers.{layer}.{KV_B} (blk.{layer}.{' and '.join(wanted)})")
    return absent


def required(config: dict[str, Any]) -> dict[str, str]:
    """GGUF name -> HF name of every tensor that this config needs. kv_b is left out, because it has two forms."""
    n_layers, nextn = _layers(config)
    top = {"model"} | (set() if config["tie_word_embeddings"] else {"untied"})
    names = {row.gguf: row.hf for row in TOP if row.where in top}
    pattern = config.get("index_topk_pattern", "F" * n_layers) + "F" * nextn  # a NextN block has its own indexer
    for layer in range(n_layers + nextn):
        has = {"all", "dense"} if layer < config["first_k_dense_replace"] else {"all", "moe"}
        if "moe" in has and config["n_shared_experts"]:
            has.add("shared")
        if pattern[layer] == "F":
            has.add("indexer")
        if layer >= n_layers:
            has.add("nextn")
        names |= {f"blk.{layer}.{row.gguf}": f"model.layers.{layer}.{row.hf}" for row in BLOCK if row.where in has}
    return names


def wrong_shapes(model: Model, config: dict[str, Any] | None = None) -> list[str]:
    """One line for each tensor whose shape is not the one the config implies."""
    config = config or hf_config(model)
    size = dimensions(config)
    lines = []
    for name in mapped(model, config):
        row = find_row(name, *_layers(config))
        assert row is not None
        expected = tuple(size[letter] for letter in row.shape)
        if model.tensors[name].shape != expected:
            lines.append(f"{name} has shape {model.tensors[name].shape}, expected {expected}")
    return lines


def dimensions(config: dict[str, Any]) -> dict[str, int]:
    """The sizes that the words in `Row.shape` stand for."""
    heads, nope, v = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    hidden, kv_lora, rope = config["hidden_size"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    return {
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "2*hidden": 2 * hidden,
        "heads": heads,
        "nope": nope,
        "v": v,
        "heads*qk": heads * (nope + rope),
        "heads*v": heads * v,
        "heads*(nope+v)": heads * (nope + v),
        "q_lora": config["q_lora_rank"],
        "kv_lora": kv_lora,
        "kv_lora+rope": kv_lora + rope,
        "index_heads": index_heads,
        "index_dim": index_dim,
        "index_heads*index_dim": index_heads * index_dim,
        "ffn": config["intermediate_size"],
        "experts": config["n_routed_experts"],
        "moe_ffn": config["moe_intermediate_size"],
        "shared_ffn": config["moe_intermediate_size"] * config["n_shared_experts"],
    }


def require_complete(model: Model, config: dict[str, Any] | None = None) -> None:
    """Raises GGUFProblem if a tensor is unknown, missing, or of the wrong shape."""
    config = config or hf_config(model)
    if not any(".indexer." in name for name in model.tensors):
        raise GGUFProblem(
            f"{model.parts[0].path.name} has no indexer tensors, without which GLM-5 does not know what to attend to; "
            "take a conversion that has them"
        )
    for names, what in (
        (unmapped(model, config), "have no place in GLM-5; update glm5-shim, or take another conversion"),
        (missing(model, config), "are missing; take a complete conversion"),
        (wrong_shapes(model, config), "do not fit the metadata; take another conversion"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise GGUFProblem(f"{len(names)} tensors {what}: {', '.join(names[:3])}{more}")


def require_nextn(model: Model) -> None:
    """Raises GGUFProblem if the file has no block to draft with."""
    if not hf_config(model)["num_nextn_predict_layers"]:
        raise GGUFProblem(
            f"{model.parts[0].path.name} has no NextN block, which speculative decoding by mtp needs; "
            "leave the speculative config out, or take a conversion that has the block"
        )


def _layers(config: dict[str, Any]) -> tuple[int, int]:
    return config["num_hidden_layers"], config["num_nextn_predict_layers"]


def _position(gguf_name: str) -> tuple[int, int, str]:
    layer, rest = split_name(gguf_name)
    return (-1 if layer is None else layer, _ORDER.get(rest, len(BLOCK)), rest)
