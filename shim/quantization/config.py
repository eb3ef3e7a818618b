"""vLLM's GGUF quantisation as GLM-5 needs it: the in-tree one (up to 0.23) or vllm-gguf-plugin's (0.24 and later).

Their linear and MoE layers, kernels and parameters do the work. Two things are changed. A layer is quantised or not by
its exact name, where they look for a substring of it. And bf16 is accepted on every GPU.
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
    """The quantisation config of our load format. vLLM pickles it to the workers, so it is a top-level class."""

    layers: QuantisedLayers | None = None  # set in each worker, before the model is built

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Up to 0.23 vLLM refuses bf16 from capability 10.0 on, because it dequantises in fp16. But a value of a GGUF
        block is an fp16 scale times an integer, so nothing is lost, and results have the activations' dtype."""
        return [torch.bfloat16, torch.half, torch.float32]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method for the layer of this name; None for the layer's own default. RuntimeError before `layers` is
        set."""
        if self.layers is None:
            raise RuntimeError(
                "Glm5GGUFConfig does not know which layers are quantised; load GLM-5 with --load-format glm5_gguf"
            )
        if prefix in self.layers.unquantised:
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            if isinstance(layer, VocabParallelEmbedding):
                return UnquantizedEmbeddingMethod()
        if any(prefix == name or prefix.startswith(f"{name}.") for name in self.layers.plain_experts):
            return None
        return super().get_quant_method(layer, prefix)


def prepare(model: torch.nn.Module) -> None:
    """Corrects the weight loaders of the model's GGUF parameters, before the first weight arrives.

    - vLLM's in-tree layers allocate a layer's experts from one tensor that holds them all. Here they come one by one.
    - The plugin's ReplicatedLinear (the indexer's wq_b) uses a loader that compares sizes with a parameter that has no
      size yet.
    - The plugin's merged linears take the rank from an argument that vLLM does not give. So each rank would get the
      shard of rank 0, without an error.
    """
    for module in model.modules():
        parameters: Any = module._parameters
        for name in ("w13_qweight", "w2_qweight"):
            parameter = parameters.get(name)
            if getattr(parameter, "is_gguf_weight", False):
                parameter.weight_loader = partial(_load_expert, module, parameter.weight_loader)
        parameter = parameters.get("qweight")
        if not hasattr(parameter, "_store"):  # an in-tree layer
            continue
        if isinstance(module, ReplicatedLinear):
            for name in ("qweight", "qweight_type"):
                parameters[name].weight_loader = partial(_store, parameters[name])
        if isinstance(module, MergedColumnParallelLinear):
            load = parameter.load_merged_column_weight
            parameter.load_merged_column_weight = partial(load, tp_rank=module.tp_rank)


def _load_expert(layer: Any, load: Any, param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Loads one expert, uint8 [rows, bytes of a row]. With the first one it allocates all experts of the layer."""
    if isinstance(param, UninitializedParameter):
        experts = param.__dict__["tensor_shape"][0]
        rows, width = loaded_weight.shape
        ranks = layer.moe_config.moe_parallel_config.tp_size
        shape = (rows, width // ranks) if kwargs["shard_id"] == "w2" else (2 * (rows // ranks), width)
        param.materialize((experts, *shape), dtype=loaded_weight.dtype)
    return load(param, loaded_weight, *args, **kwargs)


def _store(parameter: Any, same: Any, loaded_weight: torch.Tensor) -> None:
    parameter._store(loaded_weight)
