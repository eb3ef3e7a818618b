"""Target: vllm.platforms.cuda._get_backend_priorities, CudaPlatformBase.get_attn_backend_cls

Why:    for sparse MLA on capability 12.x vLLM has no backend up to 0.23 ("No valid attention backend found"). From
        0.24 on it has one, which is reported to hang under load.
How:    TRITON_MLA_SPARSE goes first in the MLA list where the capability is 12.x, or is assumed to be
        (GLM5_SHIM_ASSUME_CAPABILITY). Dense MLA is as before: our backend says that it is sparse only, so vLLM takes
        the next one in the list. If vLLM's own sparse backend is chosen on 12.x by its name, the log says that it is
        reported to hang, so that the user can tell a hang from work.
Delete: when backend_member is deleted (vllm#38006, vllm#51921).
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from shim import ledger, process, upstream
from shim.attention import MEMBER
from shim.patch import Patch, Verdict

NAME = "backend_choice"
SYMBOL = "_get_backend_priorities"
CHOICE = "CudaPlatformBase.get_attn_backend_cls"
NATIVE = "FlashInferMLASparse"  # part of the class path of vLLM's own sparse backend for 12.x (0.24 and later)
HANG = (
    "FLASHINFER_MLA_SPARSE_SM120 is reported to hang under load on capability 12.x (vllm#51921, vllm#54929): "
    f"if requests stall, start with --attention-backend {MEMBER}"
)


def probe(module: ModuleType) -> Verdict:
    found = upstream.parameters(module, SYMBOL)
    if found is None:
        return Verdict.unknown(f"{module.__name__}.{SYMBOL} does not exist")
    if found[:2] != ["use_mla", "device_capability"]:
        expected = "(use_mla, device_capability, ...)"
        return Verdict.unknown(f"{module.__name__}.{SYMBOL} takes ({', '.join(found)}), expected {expected}")
    known = ["cls", "selected_backend", "attn_selector_config"]
    problem = upstream.signature_problem(module, CHOICE, known, [*known, "num_heads"])
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = getattr(module, SYMBOL)
    signature = inspect.signature(original)

    def _get_backend_priorities(*args: Any, **kwargs: Any) -> list[Any]:
        given = signature.bind(*args, **kwargs).arguments
        priorities = list(original(*args, **kwargs))
        capability = given["device_capability"]
        if not given["use_mla"]:
            ledger.idle(NAME, "the model does not use MLA")
        elif _major(capability) != 12:
            ledger.idle(NAME, f"capability {capability.major}.{capability.minor} is not 12.x")
        else:
            member = module.AttentionBackendEnum[MEMBER]
            ledger.used(NAME)
            return [member, *(b for b in priorities if b is not member)]
        return priorities

    choose = upstream.raw(module, CHOICE).__func__

    def get_attn_backend_cls(cls: Any, *args: Any, **kwargs: Any) -> str:
        path: str = choose(cls, *args, **kwargs)
        if NATIVE in path and _major(cls.get_device_capability()) == 12:
            process.log.warning(HANG)
        return path

    return {SYMBOL: _get_backend_priorities, CHOICE: classmethod(get_attn_backend_cls)}


def _major(found: Any) -> int:
    return upstream.capability((found.major, found.minor))[0]


PATCH = Patch(
    name=NAME,
    target="vllm.platforms.cuda",
    replaces=(SYMBOL, CHOICE),
    why="no backend takes sparse MLA on capability 12.x up to vLLM 0.23; the one of 0.24 and later hangs under load",
    delete="when backend_member is deleted (vllm#38006, vllm#51921)",
    tested="an H200 with 0.23.0, 0.26.0, 0.33.0; sources of 0.16.0",
    needs=("backend_member",),
    probe=probe,
    apply=apply,
)
