"""Linear layers and output heads with weights in GGML blocks, each of a type of its own where vLLM fuses several."""
# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gguf import GGMLQuantizationType as Type
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from shim.gguf.quantised_layers import Types, linear_parameter
from shim.kernels.ggml.layout import ROWS, shape_of
from shim.kernels.gguf_linear import launch
from shim.kernels.host import sm_count
from shim.quantization import ops  # noqa: F401 - registers the op
from shim.quantization.repacking import OF_DTYPE, Piece, empty, lay
from shim.quantization.workspaces import Workspaces


class Shard(NamedTuple):
    """One tensor of the file in a parameter."""

    start: int  # its first tile (or plain row) in the parameter
    size: int  # tiles or rows
    first: int  # of the file's rows
    end: int
    whole: int  # rows that the file must have


class Glm5GGUFLinear(LinearMethodBase):
    """Of one layer."""

    def __init__(self, types: Types, workspaces: Workspaces, stream: str) -> None:
        self.types, self.workspaces, self.stream = types, workspaces, stream
        self.names: list[str] = []  # of each product: its parameter,
        self.starts: list[int] = []  # its first tile there,
        self.kinds: list[int] = []  # its type,
        self.rows: list[int] = []  # and its width
        self.columns = 0

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attrs: Any,
    ) -> None:
        if len(output_partition_sizes) != len(self.types):
            raise ValueError(f"the layer fuses {len(output_partition_sizes)} weights, the file has {len(self.types)}")
        self.columns = input_size_per_partition
        columns = Piece.of(input_size, self.columns, getattr(layer, "tp_rank", 0), layer.tp_size)
        types = [OF_DTYPE[params_dtype] if kind is None else kind for kind in self.types]
        shards: dict[str, list[Shard]] = {}
        for number, (type, rows) in enumerate(zip(types, output_partition_sizes, strict=True)):
            name = linear_parameter(self.types, number)
            before = shards.setdefault(name, [])
            start = before[-1].start + before[-1].size if before else 0
            first, end, whole = _rows(layer, rows, output_size // sum(output_partition_sizes))
            before.append(Shard(start, shape_of(type, rows, self.columns)[0], first, end, whole))
            self._add_product(name, start, type, rows)
        for name, held in shards.items():
            type = types[self.names.index(name)]
            tall = held[-1].start + held[-1].size
            parameter = empty(type, tall * (1 if self._plain(type) else ROWS), self.columns)
            parameter.weight_loader = Loader(type, held, columns).load  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)
        device = getattr(layer, self.names[0]).device
        for rows in self.rows:
            self.workspaces.need(self.stream, device, *launch.most_needs(rows, self.columns, sm_count(device)))

    def _add_product(self, name: str, start: int, type: Type, rows: int) -> None:
        """Weights of one type that follow each other without a gap are one product."""
        if self.names and self.names[-1] == name and (self._plain(type) or self.rows[-1] % ROWS == 0):
            self.rows[-1] += rows
            return
        self.names.append(name)
        self.starts.append(start)
        self.kinds.append(int(type))
        self.rows.append(rows)

    @staticmethod
    def _plain(type: Type) -> bool:
        return type in OF_DTYPE.values()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Here every layer of the model has said what it needs."""
        layer.gguf_workspace = self.workspaces.get(self.stream, getattr(layer, self.names[0]).device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weights = [getattr(layer, name) for name in self.names]
        sums, counters = layer.gguf_workspace
        out: torch.Tensor = torch.ops.glm5_shim.gguf_linear(
            x, weights, self.starts, self.kinds, self.rows, self.columns, sums, counters
        )
        return out if bias is None else out + bias

    @property
    def form(self) -> object:
        """Layers of one form launch the same kernels."""
        return tuple(self.kinds), tuple(self.rows), self.columns

    def warm_up(self, layer: Any, dtype: torch.dtype) -> None:
        device = getattr(layer, self.names[0]).device
        steps = {step for rows in self.rows for step in launch.steps(rows, self.columns, sm_count(device))}
        for tokens in sorted(steps):
            self.apply(layer, torch.zeros(tokens, self.columns, dtype=dtype, device=device))


def _rows(layer: Any, rows: int, pieces: int) -> tuple[int, int, int]:
    """First and end of this rank's rows in the file, and how many the file has."""
    if isinstance(layer, ParallelLMHead):  # the last rank's rows may be padding, in part or all
        indices = layer.shard_indices
        return indices.org_vocab_start_index, indices.org_vocab_end_index, layer.org_vocab_size
    number, pieces = Piece.of(rows * pieces, rows, layer.tp_rank, layer.tp_size)
    return number * rows, (number + 1) * rows, rows * pieces


class Loader:
    """vLLM looks at a weight loader's `__name__`, and at its first argument's name."""

    def __init__(self, type: Type, shards: list[Shard], columns: Piece) -> None:
        self._type, self._shards, self._columns = type, shards, columns

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: int | None = None) -> None:
        """loaded_weight: all rows of one tensor of the file."""
        shard = self._shards[shard_id or 0] if len(self._shards) > 1 else self._shards[0]
        if loaded_weight.shape[0] != shard.whole:
            raise ValueError(f"the file has {loaded_weight.shape[0]} rows, the layer {shard.whole}")
        target = param.data[shard.start : shard.start + shard.size]
        lay(target, self._type, loaded_weight[shard.first : shard.end], self._columns)
