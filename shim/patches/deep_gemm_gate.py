"""Target: vllm.platforms.cuda.CudaPlatformBase.support_deep_gemm

Why:    0.24 and 0.27 claim DeepGEMM for SM120, but the library in their wheels has no SM120 kernels. Quantised layers
        trust the claim and die in `deep_gemm_warmup` ("Unknown recipe").
How:    on capability 12.x the answer is no where the library has no `sm120_*` sources, from which it compiles at run
        time.
Delete: when 0.24 and 0.27 are no longer supported (vllm#47304, vllm#52035).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.patch import Patch, Verdict

NAME = "deep_gemm_gate"
SYMBOL = "CudaPlatformBase.support_deep_gemm"


def probe(module: ModuleType) -> Verdict:
    if upstream.parameters(module, SYMBOL) is None:
        return Verdict.unneeded("the platform makes no claim about DeepGEMM in this release")
    problem = upstream.signature_problem(module, SYMBOL, ["cls"])
    if problem:
        return Verdict.unknown(problem)
    if 120 not in upstream.raw(module, SYMBOL).__func__.__code__.co_consts:
        return Verdict.unneeded("vLLM does not claim DeepGEMM for 12.x in this release")
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, SYMBOL).__func__

    def support_deep_gemm(cls: Any) -> bool:
        claimed = bool(original(cls))
        found = cls.get_device_capability()
        if not claimed or found is None or upstream.capability((found.major, found.minor))[0] != 12:
            ledger.idle(NAME, "DeepGEMM is not claimed for 12.x here")
            return claimed
        from shim.indexer import probe

        directory = probe.deep_gemm_directory()
        if directory is None or probe.has_sm120_kernels(directory):
            ledger.idle(NAME, "this DeepGEMM has SM120 kernels")
            return claimed
        ledger.used(NAME)
        return False

    return {SYMBOL: classmethod(support_deep_gemm)}


PATCH = Patch(
    name=NAME,
    target="vllm.platforms.cuda",
    replaces=(SYMBOL,),
    why="0.24 and 0.27 claim DeepGEMM for SM120, and their library has no SM120 kernels",
    delete="when 0.24 and 0.27 are no longer supported (vllm#47304, vllm#52035)",
    tested="sources of 0.24.0, 0.27.1, 0.33.0",
    probe=probe,
    apply=apply,
)
