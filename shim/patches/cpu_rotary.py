"""Target: vllm.model_executor.models.deepseek_v2.get_rope

Why:    on a CPU answers are wrong without any error (KL 0.26 on the oracle). The MLA layer passes views [T, N, 64] to
        the C++ op, which takes the last dimension for all heads, and the stride before it for a token's. That is right
        for [T, N * 64] only.
How:    `get_rope`, as this model sees it, gives GLM-5 a copy of the embedding that always runs `forward_native`. It is
        a copy because vLLM shares one embedding among all layers with the same arguments.
Delete: when `_C.rotary_embedding` on the CPU uses the strides of 3-D views.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.patch import Patch, Verdict

NAME = "cpu_rotary"
GET = "get_rope"


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cpu():
        return Verdict.unneeded("not on the CPU platform")
    if (upstream.parameters(module, GET) or [])[:1] != ["head_size"]:
        return Verdict.unknown(f"{module.__name__}.{GET} does not begin with (head_size)")
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    import copy

    original = upstream.raw(module, GET)

    def get_rope(*args: Any, **kwargs: Any) -> Any:
        rope = original(*args, **kwargs)
        config = module.get_current_vllm_config().model_config.hf_config
        if not upstream.is_glm5(config):
            ledger.idle(NAME, upstream.not_glm5(config))
            return rope
        ledger.used(NAME)
        own = copy.copy(rope)
        own._forward_method = own.forward_native  # CustomOp.forward calls it
        return own

    return {GET: get_rope}


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.models.deepseek_v2",
    replaces=(GET,),
    why="the CPU's rotary op is silently wrong on the 3-D views that MLA passes",
    delete="when `_C.rotary_embedding` on the CPU uses the strides of 3-D views",
    tested="0.28.0, 0.32.0",
    probe=probe,
    apply=apply,
)
