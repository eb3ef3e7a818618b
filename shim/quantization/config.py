"""The GGUF quantisation of GLM-5: which of vLLM's layers get a method of ours, and of which types.

It imports little of vLLM, since it is loaded with the engine's arguments. Unpickling it registers it in a worker.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from shim.gguf.quantised_layers import QuantisedLayers

METHOD = "glm5_gguf"


@register_quantization_config(METHOD)
class Glm5GGUFConfig(QuantizationConfig):
    """A top-level class: it is pickled to the workers."""

    def __init__(self, plan: QuantisedLayers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        from shim.kernels.ggml.launch import ACTIVATIONS

        return list(ACTIVATIONS)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Glm5GGUFConfig:
        raise ValueError(
            f"quantisation {METHOD} is made from a GGUF, and no config names it; give the GGUF as the model"
        )

    @cached_property
    def _workspaces(self) -> Any:
        """Of this engine in this process: made with its first layer, so it is never pickled."""
        from shim.quantization.workspaces import Workspaces

        return Workspaces()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """vLLM's own unquantised method for a layer that the plan does not name."""
        from vllm.model_executor.layers import fused_moe
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from shim.quantization.linear import Glm5GGUFLinear
        from shim.quantization.moe import Glm5GGUFExperts

        expert_layer: Any = getattr(fused_moe, "RoutedExperts", None) or getattr(fused_moe, "FusedMoE", None)
        if isinstance(layer, expert_layer):
            experts = self.plan.experts.get(prefix)
            return experts and Glm5GGUFExperts(layer.moe_config, experts, self._workspaces)
        types = self.plan.layers.get(prefix)
        if types and isinstance(layer, LinearBase | ParallelLMHead):
            # vLLM runs shared experts beside the routed ones, on a stream of their own
            stream = "shared experts" if ".shared_experts." in prefix else "main"
            return Glm5GGUFLinear(types, self._workspaces, stream)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
