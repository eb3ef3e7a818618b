"""How much memory the weights of a GGUF take on each GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shim.gguf.files import Model, Tensor
from shim.gguf.names import split_name

# Every rank holds these in full. All other tensors are divided by the number of ranks.
REPLICATED = ("norm", "ffn_gate_inp", "exp_probs_b", "indexer.", "attn_q_a.", "attn_kv_a_mqa.", "nextn.eh_proj")
# vLLM holds these as bf16 whatever their type in the file (see shim.gguf.quantised_layers).
AS_BF16 = (
    *("token_embd.", "attn_k_b.", "attn_v_b.", "attn_kv_b.", "indexer.attn_k.", "indexer.proj."),
    *("nextn.eh_proj.", "nextn.embed_tokens."),
)


def memory(model: Model, config: dict[str, Any], tp: Sequence[int]) -> dict[str, Any]:
    """Bytes of the weights, without KV cache and activations.

    weights_bytes: on one GPU without speculative decoding. nextn_bytes: what speculative decoding adds to that.
    per_gpu: for each tensor-parallel size of `tp`, as a string, the bytes of the largest rank.
    """
    main, extra = _by_block(model, config["num_hidden_layers"])
    return {
        "weights_bytes": sum(map(_bytes, main)),
        "nextn_bytes": sum(map(_bytes, extra)),
        "per_gpu": {str(ranks): sum(_bytes_per_rank(t, ranks) for t in main) for ranks in tp},
    }


def _by_block(model: Model, n_layers: int) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors without, and those of, the NextN blocks."""
    main: list[Tensor] = []
    extra: list[Tensor] = []
    for tensor in model.tensors.values():
        layer, _ = split_name(tensor.name)
        (main if layer is None or layer < n_layers else extra).append(tensor)
    return main, extra


def _bytes(tensor: Tensor) -> int:
    _, rest = split_name(tensor.name)
    return 2 * math.prod(tensor.shape) if rest.startswith(AS_BF16) else tensor.nbytes


def _bytes_per_rank(tensor: Tensor, ranks: int) -> int:
    _, rest = split_name(tensor.name)
    whole = rest.startswith(REPLICATED) or "norm" in rest
    return _bytes(tensor) if whole else -(-_bytes(tensor) // ranks)
