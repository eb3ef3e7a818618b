"""GLM-5's rotary embeddings on the CPU run vLLM's torch code, not its C++ op.

Target:  vllm.model_executor.models.deepseek_v2
Symptom: silently wrong answers (KL 0.26 on the oracle). The MLA layer hands the op views [T, N, 64]; the C++ op takes
         the last dimension for all heads and the stride before it for a token's: right for [T, N * 64] only.
How:     `get_rope`, as this model sees it, gives GLM-5 a twin of the embedding that always runs `forward_native`. vLLM
         shares one embedding among all who ask alike, so the original is left as it is, for everybody else.
Delete:  when `_C.rotary_embedding` on the CPU heeds 3-D strides.
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
        twin = copy.copy(rope)
        twin._forward_method = twin.forward_native  # what CustomOp.forward calls
        return twin

    return {GET: get_rope}


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.models.deepseek_v2",
    why="the CPU's rotary op is silently wrong on the 3-D views that MLA passes",
    delete="none; delete when _C.rotary_embedding on the CPU heeds 3-D strides",
    tested="0.28.0, 0.32.0",
    probe=probe,
    apply=apply,
    replaces=(GET,),
)
