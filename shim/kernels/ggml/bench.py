"""What the benchmarks of quantised weights share: times of launches back to back, as a step has them, over weights that
are not in L2; the rate of a copy; and random weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import gguf
import torch

from shim.kernels.ggml import repack
from shim.kernels.ggml.blocks import random_blocks
from shim.kernels.ggml.layout import Weight

Run = Callable[[], object]
REPEATS = 9


def us_each(runs: list[Run]) -> float:
    """Median over replays of one graph of all runs, by their number."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(runs))
    return float(statistics.median(times[2:]))


def copy_rate() -> float:
    """Bytes a us, read and written, of a copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(2 * source.numel() / statistics.median(times))


def random_weight(kind: gguf.GGMLQuantizationType, *shape: int) -> Weight:
    """Of many matrices the first 8 are random, the others their copies."""
    if len(shape) == 3 and shape[0] > 8:
        few = random_weight(kind, 8, *shape[1:])
        times = (-(-shape[0] // 8), *[1] * (few.data.dim() - 1))
        return few._replace(data=few.data.repeat(times)[: shape[0]])
    return repack.repack(random_blocks(shape, kind, "cuda"), kind)
