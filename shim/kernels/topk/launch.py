"""The host side of top-k: checks, plan, launch. No host sync, and no allocation when every buffer is given."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from shim.kernels.host import Compiled, Form, Launch, form, sm_count
from shim.kernels.topk import kernel, tune

compiled = Compiled("topk", kernel.whole_rows, kernel.shared_rows)


class Workspace:
    """Memory for what is collected from rows. Graphs need its address to stay. Calls that may run at the same time need
    a workspace each."""

    def __init__(self, max_rows: int, max_columns: int, device: torch.device | str, sms: int | None = None) -> None:
        """Large enough for every call of up to `max_rows` rows of up to `max_columns`."""
        device = torch.device(device)
        count = sms or sm_count(device)
        slots, shared = 0, 0
        for rows, _, plan in _plans(max_rows, max_columns, count):
            slots = max(slots, plan.slots(rows))
            shared = max(shared, rows if plan.parts > 1 else 0)
        self._allocate(slots, shared, device)

    @classmethod
    def of(cls, plan: tune.TopKPlan, rows: int, device: torch.device) -> Workspace:
        """A workspace for calls of `rows` rows with this plan."""
        self = cls.__new__(cls)
        self._allocate(plan.slots(rows), rows if plan.parts > 1 else 0, device)
        return self

    def _allocate(self, slots: int, shared: int, device: torch.device) -> None:
        self.slots, self.shared = slots, shared
        self.values = torch.empty(slots, tune.CAPACITY, dtype=torch.int32, device=device)
        self.indices = torch.empty_like(self.values)
        self.ties = torch.empty(slots, tune.MOST, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shared, dtype=torch.int64, device=device)  # the kernel leaves both zero
        self.arrived = torch.zeros(shared, dtype=torch.int32, device=device)

    def check(self, plan: tune.TopKPlan, rows: int, device: torch.device) -> None:
        slots, shared = plan.slots(rows), rows if plan.parts > 1 else 0
        if slots > self.slots or shared > self.shared:
            raise ValueError(
                f"workspace is for {self.slots} programs and {self.shared} shared rows, this call has {slots} and "
                f"{shared}"
            )
        if self.values.device != device:
            raise ValueError(f"workspace is on {self.values.device}, logits on {device}")


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    out: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    next_n: int | None = None,
    workspace: Workspace | None = None,
    plan: tune.TopKPlan | None = None,
) -> torch.Tensor:
    """The columns of the k largest logits of each row, counted from the start of its window: `reference.topk`.

    logits:    fp32 [M, N], rows contiguous and any distance apart. What lies outside a window does not count.
               NaN is larger than inf
    lengths:   int32 [M], how many columns of each row count. With next_n and M = B * next_n rows: [B, next_n]; or [B]
               or [B, 1], and then row b * next_n + j has max(0, lengths[b] - next_n + 1 + j)
    k:         1 to 2,048
    out:       int32 [M, k], rows at least k apart; the answer is written to it
    starts:    int32 [M], first column of each window; None: 0. A window ends with its row at the latest
    workspace: without it memory is allocated
    plan:      in place of `tune.plan`'s (tuning, tests)

    Returns int32 [M, k] in no particular order, which may differ from call to call; -1 fills up windows of fewer than k
    columns. Of equal logits any may be chosen. ValueError names an argument that does not fit.
    """
    rows, device = logits.shape[0], logits.device
    plan, launch = _launch(
        form(logits), form(lengths), k, None if out is None else form(out), None if starts is None else form(starts),
        next_n, plan, sm_count(device),
    )  # fmt: skip
    if out is None:
        out = torch.empty(rows, k, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    if workspace is None:
        workspace = Workspace.of(plan, rows, device)
    workspace.check(plan, rows, device)
    tensors = (
        logits.view(torch.int32), lengths, lengths if starts is None else starts, out,
        workspace.values, workspace.indices, workspace.ties,
    )  # fmt: skip
    if plan.parts > 1:
        kernel.shared_rows[(launch.programs,)](
            *tensors, workspace.counts, workspace.arrived, *launch.numbers, **launch.options
        )
    else:
        kernel.whole_rows[(launch.programs,)](*tensors, *launch.numbers, **launch.options)
    compiled.tell(launch)
    return out


@lru_cache(maxsize=512)  # the forms of a prefill are those of one step, in all layers
def _launch(
    logits: Form,
    lengths: Form,
    k: int,
    out: Form | None,
    starts: Form | None,
    next_n: int | None,
    plan: tune.TopKPlan | None,
    sms: int,
) -> tuple[tune.TopKPlan, Launch]:
    """Checks and plans `topk`."""
    shared_lengths = _check(logits, lengths, k, starts, next_n)
    if out is not None:
        _check_output(out, logits, k)
    rows, columns = logits.shape
    plan = plan or tune.plan(rows, columns, sms)
    numbers = (
        columns, k, next_n if next_n and shared_lengths else 1, logits.strides[0] if rows > 1 else 0,
        out.strides[0] if out is not None else k,
    )  # fmt: skip
    how = constants(plan.config, starts is not None) | options(plan.config)
    if plan.parts > 1:
        return plan, Launch(rows * plan.parts, (*numbers, plan.parts), how)
    return plan, Launch(plan.slots(rows), (rows, *numbers), how)


@lru_cache
def constants(config: tune.Config, starts: bool) -> dict[str, Any]:
    """The constants of the kernels."""
    return {
        "STARTS": starts, "SAMPLE": config.sample, "CHUNK": config.chunk, "TILE": config.tile,
        "WIDTH": 32 * config.warps, "CAPACITY": tune.CAPACITY, "MOST": tune.MOST, "STEP": config.step,
        "BITS": tune.BITS, "STAGES": config.stages, "WRITE": config.write,
    }  # fmt: skip


@lru_cache
def options(config: tune.Config) -> dict[str, Any]:
    return {"num_warps": config.warps, "maxnreg": config.registers}


def _plans(max_rows: int, max_columns: int, sms: int) -> Iterator[tuple[int, int, tune.TopKPlan]]:
    """(rows, columns, plan) of all row counts: for the widest call without a sample, and of each sample size."""
    widest = [tune.CAPACITY, *(32 * sample for sample in tune.SAMPLES[:-1]), max_columns]
    widths = sorted({min(columns, max_columns) for columns in widest})
    for columns in widths:
        for rows in range(1, max_rows + 1):
            yield rows, columns, tune.plan(rows, columns, sms)


def variants(max_rows: int, max_columns: int, sms: int) -> list[tuple[int, int, tune.TopKPlan]]:
    """A call (rows, columns, plan) for each variant that calls up to this size compile."""
    seen = {(plan.config, plan.parts > 1): (r, c, plan) for r, c, plan in _plans(max_rows, max_columns, sms)}
    return list(seen.values())


def warm_up(k: int, max_rows: int, max_columns: int, device: torch.device | str) -> int:
    """Launches each variant once, so that it is compiled and loaded before a graph is captured. Returns how many."""
    device = torch.device(device)
    count = 0
    for rows, columns, plan in variants(max_rows, max_columns, sm_count(device)):
        lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        logits = torch.zeros(1, columns, dtype=torch.float32, device=device).expand(rows, -1)
        for starts in (None, lengths):
            topk(logits, lengths, k, starts=starts, plan=plan)
            count += 1
    compiled.warm(device)
    return count


def _check(logits: Form, lengths: Form, k: int, starts: Form | None, next_n: int | None) -> bool:
    """Raises ValueError for arguments that do not fit. Returns whether one length stands for next_n rows."""
    if len(logits.shape) != 2 or logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.strides[1] != 1):
        raise ValueError(f"logits is {logits}, expected float32 [M, N], its last dimension contiguous")
    if not 1 <= k <= tune.MOST:
        raise ValueError(f"k is {k}, expected 1 to {tune.MOST}")
    rows = logits.shape[0]
    if next_n is None:
        shapes: list[tuple[int, ...]] = [(rows,)]
    elif next_n >= 1 and rows % next_n == 0:
        shapes = [(rows // next_n,), (rows // next_n, 1), (rows // next_n, next_n)]
    else:
        raise ValueError(f"next_n is {next_n}, expected a divisor of {rows} rows")
    for name, found, allowed in (("lengths", lengths, shapes), ("starts", starts, [(rows,)])):
        if found is None:
            continue
        if found.dtype != torch.int32 or found.shape not in allowed or not found.contiguous:
            raise ValueError(
                f"{name} is {found}, expected contiguous int32 {' or '.join(str(list(shape)) for shape in allowed)}"
            )
        if found.device != logits.device:
            raise ValueError(f"{name} is on {found.device}, logits on {logits.device}")
    return lengths.shape.numel() != rows


def _check_output(out: Form, logits: Form, k: int) -> None:
    shape = (logits.shape[0], k)
    if out.shape != shape or out.dtype != torch.int32 or out.device != logits.device:
        raise ValueError(f"out is {out}, expected int32 {list(shape)}")
    if (k > 1 and out.strides[1] != 1) or (shape[0] > 1 and out.strides[0] < k):
        raise ValueError(f"out has strides {out.strides}, expected rows at least {k} apart, their columns contiguous")
