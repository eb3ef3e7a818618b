"""Times launches on this GPU by CUDA events around captured graphs, or says why nothing can be timed here."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

Run = Callable[[], Any]
REPEATS = 24  # timed, after WARM_UP that are not
WARM_UP = 3
SPILL_BYTES = 256 << 20  # several times L2


def refusal() -> str | None:
    """Why nothing can be measured here. None if this machine has torch and a GPU."""
    try:
        import torch
    except ImportError as problem:
        return f"nothing to measure: {problem}"
    if not torch.cuda.is_available():
        return "no CUDA GPU here, so nothing to measure (python -m shim.kernels.roofline needs none)"
    if os.environ.get("TRITON_INTERPRET"):
        return "TRITON_INTERPRET is set: unset it to measure kernels"
    return None


def time_us(runs: list[Run], graph: bool = True) -> float:
    """The median time of one run in us, with a cold L2, which is overwritten before each timing.

    runs:  do the same work on different inputs, and are timed in turn
    graph: each run is captured, and its replays are timed
    """
    import torch

    _first_calls(runs)
    if graph:
        runs = [_captured([run]) for run in runs]
    spill = torch.empty(SPILL_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(REPEATS + WARM_UP):
        spill.fill_(i)
        times.append(_one_us(runs[i % len(runs)]))
    return float(statistics.median(times[WARM_UP:]))


def time_in_turn_us(runs: list[Run]) -> float:
    """The median time of one run in us. One graph has all runs in turn, so L2 holds what earlier runs left."""
    _first_calls(runs)
    replay = _captured(runs)
    times = [_one_us(replay) / len(runs) for _ in range(REPEATS + WARM_UP)]
    return float(statistics.median(times[WARM_UP:]))


def _first_calls(runs: list[Run]) -> None:
    import torch

    for run in runs:
        run()
    torch.cuda.synchronize()


def _captured(runs: list[Run]) -> Run:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay


def _one_us(run: Run) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) * 1e3)
