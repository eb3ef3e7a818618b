"""vLLM's GGUF quantisation as GLM-5 needs it: the in-tree one (up to 0.23) or vllm-gguf-plugin's (0.24 and later).

Their linear and MoE layers, kernels and parameters do the work. What is changed is which layers are quantised, by exact
name where they look for a substring of it; and bf16, which is right on every GPU.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from shim.gguf.quantised_layers import QuantisedLayers

if find_spec("vllm.model_executor.layers.quantization.gguf"):
    from vllm.model_executor.layers.quantization.gguf import GGUFConfig
else:
    from vllm_gguf_plugin.quantization import GGUFConfig


class Glm5GGUFConfig(GGUFConfig):
    """A top-level class: it is pickled to the workers."""

    plan: QuantisedLayers | None = None  # set in each worker, before the model is built

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Up to 0.23 bf16 is refused from capability 10.0 on, because dequantisation goes through fp16. A value of a
        GGUF block is fp16 scale times integer, so that loses nothing: results are written in the activations' type."""
        return [torch.bfloat16, torch.half, torch.float32]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if self.plan is None:
            raise RuntimeError("Glm5GGUFConfig has no plan; GLM-5's weights come by --load-format glm5_gguf only")
        if prefix in self.plan.unquantised:
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            if isinstance(layer, VocabParallelEmbedding):
                return UnquantizedEmbeddingMethod()
        if any(prefix == name or prefix.startswith(f"{name}.") for name in self.plan.plain_experts):
            return None  # the layer's own default
        return super().get_quant_method(layer, prefix)


def prepare(model: torch.nn.Module) -> None:
    """Mends the weight loaders of the model's GGUF parameters, before the first weight arrives.

    - In the tree, experts are allocated from a tensor that holds all of a layer's; here they come one by one.
    - Of the plugin, a ReplicatedLinear (the indexer's wq_b) falls back to a loader that compares sizes with those of a
      parameter which has none yet.
    - Of the plugin, a merged linear's parameter takes the rank from an argument that vLLM does not give, so every rank
      would get rank 0's share, in silence.
    """
    for module in model.modules():
        parameters: Any = module._parameters
        for name in ("w13_qweight", "w2_qweight"):
            parameter = parameters.get(name)
            if getattr(parameter, "is_gguf_weight", False):
                parameter.weight_loader = partial(_load_expert, module, parameter.weight_loader)
        parameter = parameters.get("qweight")
        if not hasattr(parameter, "_store"):  # in the tree
            continue
        if isinstance(module, ReplicatedLinear):
            for name in ("qweight", "qweight_type"):
                parameters[name].weight_loader = partial(_store, parameters[name])
        if isinstance(module, MergedColumnParallelLinear):
            load = parameter.load_merged_column_weight
            parameter.load_merged_column_weight = partial(load, tp_rank=module.tp_rank)


def _load_expert(layer: Any, load: Any, param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`loaded_weight`: one expert, uint8 [rows, bytes of a row]."""
    if isinstance(param, UninitializedParameter):
        experts = param.__dict__["tensor_shape"][0]
        rows, width = loaded_weight.shape
        ranks = layer.moe_config.moe_parallel_config.tp_size
        shape = (rows, width // ranks) if kwargs["shard_id"] == "w2" else (2 * (rows // ranks), width)
        param.materialize((experts, *shape), dtype=loaded_weight.dtype)
    return load(param, loaded_weight, *args, **kwargs)


def _store(parameter: Any, same: Any, loaded_weight: torch.Tensor) -> None:
    parameter._store(loaded_weight)
