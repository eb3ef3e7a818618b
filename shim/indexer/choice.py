"""Chooses whose indexer kernels run in this process: vLLM's own or ours. Once, when the first indexer is built.

Only a worker builds an indexer, on its own device, and it does so before weights, profiling and graph capture. So the
choice is never made in the API server, nor in a process without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shim import env, ledger, process, upstream
from shim.patch import State

LOGITS, TOPK = "indexer_logits", "indexer_topk"


@dataclass(frozen=True)
class Choice:
    """Whose kernels run for GLM-5 in this process.

    logits:  True if the logits are computed by our kernel, False if by vLLM's
    topk:    the same for top-k
    because: the reason, for the log and the ledger
    """

    logits: bool
    topk: bool
    because: str


_choice: Choice | None = None


def logits_are_ours() -> bool:
    return _choice is not None and _choice.logits


def topk_is_ours() -> bool:
    return _choice is not None and _choice.topk


def settle(vllm_config: Any = None) -> None:
    """Chooses for the model that is being built (None: vLLM's current config). A choice for GLM-5 is final.

    Another model keeps vLLM's kernels and settles nothing, because GLM-5's draft model has a model_type of its own.
    """
    global _choice
    if _choice is not None:
        return
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    config = vllm_config or get_current_vllm_config_or_none()
    model = config.model_config if config is not None else None
    hf_config = model.hf_config if model is not None else None
    if hf_config is None or not upstream.is_glm5(hf_config):
        for name in (LOGITS, TOPK):
            ledger.idle(name, upstream.not_glm5(hf_config))
        return
    capability: Any = current_platform.get_device_capability()
    _choice = choose((capability.major, capability.minor), hf_config)
    process.log.info("glm5-shim: %s, because %s", _in_words(_choice), _choice.because)
    for name, ours in ((LOGITS, _choice.logits), (TOPK, _choice.topk)):
        if process.is_applied(name):
            ledger.record(name, State.APPLIED.value, _choice.because)
            if ours:
                ledger.used(name)
            else:
                ledger.idle(name, _choice.because)


def choose(capability: tuple[int, int], hf_config: Any) -> Choice:
    """The choice for GLM-5 on a GPU of this (real) capability. May run DeepGEMM in a child process, see `probe`."""
    mode = env.indexer()
    logits, topk = process.is_applied(LOGITS), process.is_applied(TOPK)
    if mode == "native":
        return Choice(False, False, "GLM5_SHIM_INDEXER=native")
    if mode == "triton":
        return Choice(logits, topk, "GLM5_SHIM_INDEXER=triton")
    major, minor = upstream.capability(capability)
    if major != 12:
        return Choice(False, False, f"capability {major}.{minor} is not 12.x")
    if not logits:
        return Choice(False, topk, f"{LOGITS} is not applied")
    from shim.indexer import probe

    text = getattr(hf_config, "text_config", None) or hf_config
    works, because = probe.native_works(text.index_n_heads)
    return Choice(not works, topk, because)


def _in_words(choice: Choice) -> str:
    owner = {True: "the shim's Triton kernel", False: "vLLM's own"}
    return f"indexer logits by {owner[choice.logits]}, top-k by {owner[choice.topk]}"
