"""Routed experts with weights in GGML blocks: gate, up and down each of a type of its own."""
# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from shim.gguf.quantised_layers import EXPERT_PARAMETERS, Types
from shim.kernels.ggml.layout import Weight
from shim.kernels.gguf_moe import launch
from shim.quantization.repacking import OF_DTYPE, Piece, empty, lay
from shim.quantization.workspaces import Workspaces

STREAM = "experts"
SHARDS = ("w1", "w3", "w2")  # vLLM's names of gate, up and down
NAMES = tuple(
    f"w{'2' if shard == 'w2' else '13'}_{name}" for shard, name in zip(SHARDS, EXPERT_PARAMETERS, strict=True)
)
LAYER = ("expert_map", "_map_global_expert_id_to_local_expert_id", "moe_config", "activation", "top_k")


class Glm5GGUFExperts(FusedMoEMethodBase):
    """Of one layer. vLLM has chosen and weighed a token's experts before `apply`, and adds up over ranks after it."""

    def __init__(self, moe: Any, types: Types, workspaces: Workspaces) -> None:
        super().__init__(moe)
        self.types, self.workspaces = types, workspaces
        self.experts: launch.Experts | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attrs: Any,
    ) -> None:
        """num_experts: of this rank; it has them whole under expert parallelism, else a share of each."""
        missing = [name for name in LAYER if not hasattr(layer, name)]
        if missing:
            raise RuntimeError(f"this vLLM's expert layer has no {', '.join(missing)}; use a supported release")
        activation: Any = getattr(layer.activation, "value", layer.activation)
        if activation != "silu" or getattr(layer, "apply_router_weight_on_input", False):
            raise ValueError(f"GGUF experts of activation {activation}: expected silu, weighed behind it")
        self.shapes = (
            *[(intermediate_size_per_partition, hidden_size)] * 2,
            (hidden_size, intermediate_size_per_partition),
        )
        self.kinds = [OF_DTYPE[params_dtype] if kind is None else kind for kind in self.types]
        parallel = layer.moe_config.moe_parallel_config
        for name, type, (rows, columns) in zip(NAMES, self.kinds, self.shapes, strict=True):
            parameter = empty(type, rows, columns, num_experts)
            loader = Loader(layer, type, (rows, columns), Piece(parallel.tp_rank, parallel.tp_size))
            parameter.weight_loader = loader.load  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)
        experts, device = self._weights(layer), layer.w2_qweight.device
        self.workspaces.need(STREAM, device, *launch.most_needs(layer.top_k, experts, device))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.gguf_workspace = self.workspaces.get(STREAM, layer.w2_qweight.device)

    @property
    def form(self) -> object:
        """Layers of one form launch the same kernels."""
        return tuple(self.kinds), self.shapes

    def warm_up(self, layer: Any, dtype: torch.dtype) -> None:
        device, experts = layer.w2_qweight.device, self._weights(layer)
        count, top_k = experts.down.data.shape[0], layer.top_k
        workspace = launch.Workspace.holding(*layer.gguf_workspace)
        for tokens, plan in launch.steps(top_k, experts, device):
            x = torch.zeros(tokens, experts.gate.columns, dtype=dtype, device=device)
            ids = torch.arange(tokens * top_k, dtype=torch.int32, device=device).view(tokens, top_k) % count
            launch.moe(x, experts, ids, torch.ones_like(ids, dtype=torch.float32), workspace=workspace, plan=plan)

    def _weights(self, layer: Any) -> launch.Experts:
        data = (getattr(layer, name).data for name in NAMES)
        return launch.Experts(*(Weight(d, t, *s) for d, t, s in zip(data, self.kinds, self.shapes, strict=True)))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def maybe_make_prepare_finalize(self, *args: Any, **kwargs: Any) -> None:
        """None: 0.16 to 0.27 would replace this method by kernels of their own."""
        return None

    def apply(  # type: ignore[override]
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """x: [T, hidden]; topk_ids: [T, top_k], of all ranks' experts. Returns [T, hidden], a new tensor."""
        ids = topk_ids.to(torch.int32)
        if layer.expert_map is not None:
            ids = torch.where(ids < 0, -1, layer.expert_map[ids.clamp(min=0).long()]).to(torch.int32)
        workspace = launch.Workspace.holding(*layer.gguf_workspace)
        weights = topk_weights.to(torch.float32).contiguous()
        return launch.moe(x, self._weights(layer), ids.contiguous(), weights, workspace=workspace)


class Loader:
    def __init__(self, layer: Any, type: Type, shape: tuple[int, int], piece: Piece) -> None:
        self._layer, self._type, self._shape, self._piece = layer, type, shape, piece

    def load(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """loaded_weight: one expert's matrix as the file has it. False: the expert is another rank's."""
        expert = self._layer._map_global_expert_id_to_local_expert_id(expert_id)
        if expert < 0:
            return False if return_success else None
        rows, _ = self._shape
        if shard_id == "w2":
            columns, first, whole = self._piece, 0, rows
        else:
            columns, first, whole = Piece(), self._piece.number * rows, rows * self._piece.pieces
        if loaded_weight.shape[0] != whole:
            raise ValueError(f"expert {expert_id} has {loaded_weight.shape[0]} rows in the file, {whole} in the layer")
        lay(param.data[expert], self._type, loaded_weight[first : first + rows], columns)
        return True if return_success else None
