"""What the IQ types look up, as small tensors that all weights on a device share. Values: gguf-py's quants.py, which
has them from llama.cpp's ggml-common.h."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants

# bits of an entry's value, what is added to it, and the entry's dtype: few bytes, so that few cache lines are touched
_GRIDS: dict[Type, tuple[Any, int, int, torch.dtype]] = {
    Type.IQ2_XXS: (quants.IQ2_XXS, 8, 0, torch.int64),  # 8 values
    Type.IQ2_XS: (quants.IQ2_XS, 8, 0, torch.int64),
    Type.IQ2_S: (quants.IQ2_S, 8, 0, torch.int64),
    Type.IQ3_XXS: (quants.IQ3_XXS, 8, 0, torch.int32),  # 4 values
    Type.IQ3_S: (quants.IQ3_S, 4, 0, torch.int16),  # 4 values, 1 to 15
    Type.IQ1_S: (quants.IQ1_S, 2, 1, torch.int16),  # 8 values, -1 to 1
    Type.IQ1_M: (quants.IQ1_M, 2, 1, torch.int16),
}


@lru_cache
def table(type: Type, device: torch.device) -> torch.Tensor | None:
    """int [entries], the first value in the lowest bits; fp32 [16] of IQ4_NL and IQ4_XS; None where nothing is looked
    up."""
    if type in (Type.IQ4_NL, Type.IQ4_XS):
        return torch.tensor(quants.IQ4_NL.kvalues, dtype=torch.float32, device=device)
    if type not in _GRIDS:
        return None
    grid, bits, add, dtype = _GRIDS[type]
    grid.init_grid()
    values = grid.grid.reshape(grid.grid_shape).astype(np.int64) + add
    entries = (values << (bits * np.arange(values.shape[1]))).sum(axis=1)
    return torch.from_numpy(entries).to(dtype).to(device)
