"""The answer that a GLM-5 GGUF must give: transformers' GlmMoeDsaForCausalLM, eager, on the dequantised weights.

It takes config and weights from shim.gguf and nothing else; transformers insists that no tensor is missing or too many.
transformers fixes eps 1e-6 on the q_a and kv_a norms where vLLM uses the config's 1e-5: at most 6e-5 on logits.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shim.gguf.config import hf_config
from shim.gguf.files import open_model
from shim.gguf.tensors import weights


def logits(
    gguf_part1: str | Path, tokens: Sequence[int], *, topk: int | None = None, dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """Teacher-forced logits [len(tokens), vocab] float32. `topk` overrides index_topk: 2048 attends to every token."""
    model = _load(str(gguf_part1), topk, dtype)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return out.float().numpy()


def greedy(gguf_part1: str | Path, tokens: Sequence[int], given: Sequence[int]) -> list[int]:
    """The greedy choice after `tokens` and after each of `given` but the last, in one pass without a cache.

    By induction it is `given` if and only if greedy decoding appends `given` to `tokens`."""
    return logits(gguf_part1, [*tokens, *given])[len(tokens) - 1 : -1].argmax(axis=-1).tolist()


def kl(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """Mean over positions of KL(p || q), in nats, computed in float64. Both [T, vocab]."""
    p, q = _log_softmax(p_logits), _log_softmax(q_logits)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def argmax_agreement(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """The share of positions at which both name the same token."""
    return float((p_logits.argmax(axis=-1) == q_logits.argmax(axis=-1)).mean())


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@functools.lru_cache(maxsize=2)
def _load(path: str, topk: int | None, dtype: torch.dtype) -> Any:
    for extra in ("torchvision", "torchaudio", "torchcodec"):
        # Built for another torch, they break transformers' import; as None they count as absent
        sys.modules.setdefault(extra, None)  # type: ignore[arg-type]
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    gguf_model = open_model(path)
    settings = hf_config(gguf_model)
    if topk is not None:
        settings["index_topk"] = topk
    settings |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = GlmMoeDsaConfig(**settings)
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(config)
    model.to_empty(device="cpu")
    model.load_state_dict(_fuse_experts(dict(weights(gguf_model))), strict=True, assign=True)
    _restore_rotary(model, config)
    model = model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "inv_freq")):  # float32 at any dtype, in transformers as well
            buffer.data = buffer.data.float()
    return model.eval()


def _restore_rotary(model: Any, config: Any) -> None:
    """The rotary frequencies are computed, not loaded, so a model made on the meta device lacks them."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding

    model.model.rotary_emb = GlmMoeDsaRotaryEmbedding(config)


def _fuse_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """experts.E.{gate,up,down}_proj.weight -> experts.gate_up_proj [E, 2 * ffn, hidden] and experts.down_proj."""
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = defaultdict(dict)
    for name in [n for n in state if ".experts." in n]:
        layer, _, rest = name.partition(".experts.")
        number, projection, _ = rest.split(".")
        experts[layer][projection, int(number)] = state.pop(name)
    for layer, parts in experts.items():
        count = 1 + max(number for _, number in parts)
        gate_up = [torch.cat([parts["gate_proj", e], parts["up_proj", e]]) for e in range(count)]
        state[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        state[f"{layer}.experts.down_proj"] = torch.stack([parts["down_proj", e] for e in range(count)])
    return state
