"""Target: vllm.model_executor.layers.sparse_attn_indexer.SparseAttnIndexer, forward_native and forward_cpu

Why:    vLLM's op cannot run GLM-5 on a CPU. Up to 0.28 `forward_native` raises NotImplementedError. Later
        `forward_cpu` is DeepSeek-V4's: it asserts index_topk == 512 and writes no keys.
How:    for a key cache that `cpu_indexer` built, both methods run `shim.indexer.cpu.choose`: it writes keys, scores
        them and chooses, all in plain torch.
Delete: when vLLM's own CPU sparse indexer runs glm_moe_dsa.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.patch import Patch, Verdict

NAME = "cpu_indexer_op"
NATIVE = "SparseAttnIndexer.forward_native"
CPU = "SparseAttnIndexer.forward_cpu"  # CustomOp's, if the class has none


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cpu():
        return Verdict.unneeded("not on the CPU platform")
    own = ["self", "hidden_states", "q_quant", "k", "weights"]
    problem = upstream.signature_problem(module, NATIVE, own) or upstream.signature_problem(
        module, CPU, own, ["self", "*args", "**kwargs"]
    )
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    def replacement(original: Any) -> Any:
        def forward(self: Any, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
            from shim.indexer import cpu

            if self.k_cache.get_attn_backend() is not cpu.ReferenceIndexerBackend:
                ledger.idle(NAME, "the indexer's key cache is not GLM-5's")
                return original(self, hidden_states, q_quant, k, weights)
            ledger.used(NAME)
            return cpu.choose(self, q_quant, k, weights)

        return forward

    return {symbol: replacement(upstream.raw(module, symbol)) for symbol in (NATIVE, CPU)}


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.layers.sparse_attn_indexer",
    replaces=(NATIVE, CPU),
    why="vLLM's indexer op has no CPU path for GLM-5",
    delete="when vLLM's own CPU sparse indexer runs glm_moe_dsa",
    tested="0.28.0, 0.32.0",
    probe=probe,
    apply=apply,
)
