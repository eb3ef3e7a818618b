"""How much memory the weights of a GGUF take on each GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type

from shim.gguf.files import Model, Tensor
from shim.gguf.names import split_name
from shim.gguf.quantised_layers import layer_kind
from shim.gguf.tensor_parallel import CUT_ROWS
from shim.gguf.tensor_types import PLAIN_TYPES

# Every rank holds these in full. All other tensors are divided by the number of ranks.
REPLICATED = ("norm", "ffn_gate_inp", "exp_probs_b", "indexer.", "attn_q_a.", "attn_kv_a_mqa.", "nextn.eh_proj")
# vLLM holds these as bf16 whatever their type in the file (see shim.gguf.quantised_layers).
AS_BF16 = (
    *("token_embd.", "attn_k_b.", "attn_v_b.", "attn_kv_b.", "indexer.attn_k.", "indexer.proj."),
    *("nextn.eh_proj.", "nextn.embed_tokens."),
)


def memory(model: Model, config: dict[str, Any], tp: Sequence[int]) -> dict[str, Any]:
    """Bytes of the weights as they are held on GPUs, without KV cache and activations.

    weights_bytes: on one GPU without speculative decoding. nextn_bytes: what speculative decoding adds to that.
    per_gpu: for each tensor-parallel size of `tp`, as a string, the bytes of the largest rank.
    """
    main, extra = _by_block(model, config["num_hidden_layers"])
    return {
        "weights_bytes": sum(_held(t, 1) for t in main),
        "nextn_bytes": sum(_held(t, 1) for t in extra),
        "per_gpu": {str(ranks): sum(_held(t, ranks) for t in main) for ranks in tp},
    }


def _by_block(model: Model, n_layers: int) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors without, and those of, the NextN blocks."""
    main: list[Tensor] = []
    extra: list[Tensor] = []
    for tensor in model.tensors.values():
        layer, _ = split_name(tensor.name)
        (main if layer is None or layer < n_layers else extra).append(tensor)
    return main, extra


def _held(tensor: Tensor, ranks: int) -> int:
    """Bytes on one rank. Quantised layers hold tiles of 16 rows by 256 columns (`shim.kernels.ggml.layout`)."""
    _, rest = split_name(tensor.name)
    kind = layer_kind(tensor.name)
    whole = rest.startswith(REPLICATED) or "norm" in rest
    share = 1 if whole else ranks
    if not kind or tensor.type in PLAIN_TYPES:
        as_bf16 = bool(kind) or rest.startswith(AS_BF16)
        return -(-(2 * math.prod(tensor.shape) if as_bf16 else tensor.nbytes) // share)
    *matrices, rows, columns = tensor.shape
    if kind in CUT_ROWS:
        columns = -(-columns // share)
    else:
        rows = -(-rows // share)
    block, size = gguf.GGML_QUANT_SIZES[Type.TQ2_0 if tensor.type is Type.TQ1_0 else tensor.type]
    tile = 16 * (256 // block) * size
    return math.prod(matrices) * -(-rows // 16) * -(-columns // 256) * tile
