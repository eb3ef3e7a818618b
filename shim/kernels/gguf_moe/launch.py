"""The host side of quantised experts: checks, plan, launch. No host sync; grids depend on shapes alone, so that a
captured graph serves any choice of experts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shim.kernels.ggml.launch import ACTIVATIONS, Operand, check_weight, dequantize, operand, operand_width, rows_view
from shim.kernels.ggml.layout import PLAIN, Weight
from shim.kernels.gguf_moe import kernel, tune
from shim.kernels.host import Compiled, sm_count

compiled = Compiled(
    "gguf_moe", kernel.gate_up_few, kernel.down_few, kernel.count, kernel.place, kernel.gate_up_many,
    kernel.down_many, kernel.gate_up_dense, kernel.down_dense, kernel.add_up,
)  # fmt: skip


class Experts(NamedTuple):
    """The weights of a layer's experts: each [E, ...], each of a type of its own.

    gate, up: [E, I, K]; down: [E, K, I]
    """

    gate: Weight
    up: Weight
    down: Weight

    @classmethod
    def stacked(cls, gate_up: Weight, down: Weight) -> Experts:
        """Of gate and up in one, [E, 2 * I, K], gate first. ValueError unless I is whole 16."""
        half = gate_up.rows // 2
        return cls(rows_view(gate_up, 0, half), rows_view(gate_up, half, half), down)


class Workspace:
    """What programs that share a product leave for the last of them (few tokens): at one address for as long as graphs
    are replayed. Calls that may run at the same time need one each."""

    def __init__(self, sums: int, tiles: int, device: torch.device | str) -> None:
        """sums: fp32 numbers; tiles: counters, which every launch leaves at zero."""
        self.partial = torch.empty(sums, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, slots: int, top_k: int, experts: Experts, device: torch.device, plan: tune.Plan) -> Workspace:
        return cls(*needs(_few(slots, top_k, experts, plan, sm_count(device)), slots, top_k, experts), device)

    @classmethod
    def holding(cls, partial: torch.Tensor, arrived: torch.Tensor) -> Workspace:
        """Of memory that is there: fp32 sums, and counters that are zero."""
        made = cls.__new__(cls)
        made.partial, made.arrived = partial, arrived
        return made

    def check(self, sums: int, tiles: int) -> None:
        if sums > self.partial.numel() or tiles > self.arrived.numel():
            raise ValueError(
                f"workspace has {self.partial.numel()} sums and {self.arrived.numel()} counters, this call needs "
                f"{sums} and {tiles}"
            )


class Few(NamedTuple):
    """How few slots are dealt out."""

    gate_up_tiles: int
    gate_up_splits: int
    down_tiles: int
    down_splits: int


def _few(slots: int, top_k: int, experts: Experts, plan: tune.Plan, sms: int) -> Few:
    up, down = -(-experts.gate.rows // plan.gate_up.block_n), -(-experts.down.rows // plan.down.block_n)
    wide = -(-experts.gate.columns // 256)
    return Few(
        up, tune.splits(slots * up, wide, plan.gate_up, sms),
        down, tune.splits(slots // top_k * down, top_k, plan.down, sms),
    )  # fmt: skip


def needs(few: Few, slots: int, top_k: int, experts: Experts) -> tuple[int, int]:
    """Sums and counters of a workspace."""
    tokens = slots // top_k
    sums = [2 * few.gate_up_splits * slots * experts.gate.rows] if few.gate_up_splits > 1 else []
    sums += [few.down_splits * tokens * experts.down.rows] if few.down_splits > 1 else []
    return max(sums, default=0), max(slots * few.gate_up_tiles, tokens * few.down_tiles) if sums else 0


def most_needs(top_k: int, experts: Experts, device: torch.device) -> tuple[int, int]:
    """Sums and counters of a workspace that serves any number of tokens."""
    sums, tiles = 0, 0
    for slots in range(top_k, tune.FEW_SLOTS + 1, top_k):
        plan = tune.plan(slots, capability(device))
        if plan.few:
            more = needs(_few(slots, top_k, experts, plan, sm_count(device)), slots, top_k, experts)
            sums, tiles = max(sums, more[0]), max(tiles, more[1])
    return sums, tiles


def steps(top_k: int, experts: Experts, device: torch.device) -> list[tuple[int, tune.Plan]]:
    """Numbers of tokens, each with a plan, that between them launch every kernel. Plans for many slots are for all from
    the number on that they are first made for, and few tokens will do."""
    found: dict[Any, tuple[int, tune.Plan]] = {}
    for tokens in range(1, tune.FEW_SLOTS // top_k + 2):
        slots = tokens * top_k
        plan = tune.plan(slots, capability(device))
        few = _few(slots, top_k, experts, plan, sm_count(device)) if plan.few else None
        key = (few and (few.gate_up_splits, few.down_splits), (slots - 1).bit_length()) if plan.few else plan
        found.setdefault(key, (tokens, plan))
    least = max(tokens for tokens, _ in found.values())
    for power in range(24):
        plan = tune.plan(1 << power, capability(device))
        if not plan.few:
            found.setdefault(plan, (least, plan))
    return list(found.values())


def moe(
    x: torch.Tensor,
    experts: Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    plan: tune.Plan | None = None,
) -> torch.Tensor:
    """sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    x:            [T, K] bf16 or fp16, rows contiguous and any distance apart
    topk_ids:     int32 [T, top_k], contiguous; -1: not computed here (expert parallelism)
    topk_weights: fp32 [T, top_k], contiguous
    out:          [T, K] of x's dtype to be written, rows contiguous and any distance apart; not x
    workspace:    for few tokens; without it memory is allocated, and cleared, where programs share a product
    plan:         another than `tune.plan`'s (tuning, tests)

    Returns [T, K] of x's dtype; 0 for a token without experts. Products are summed in fp32; what lies between gate and
    down is of x's dtype, and so are a token's shares of the answer where there are many tokens. ValueError names an
    argument that does not fit.
    """
    _check(x, experts, topk_ids, topk_weights, out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0 or topk_ids.numel() == 0:
        return out.zero_()
    plain = all(w.type in PLAIN and w.data.dtype == x.dtype for w in experts)
    plan = plan or tune.plan(topk_ids.numel(), capability(x.device), plain)
    if plan.few:
        _launch_few(x, experts, topk_ids, topk_weights, out, workspace, plan)
    else:
        _launch_many(x, experts, topk_ids, topk_weights, out, plan)
    compiled.tell(plan)
    return out


def _launch_few(
    x: torch.Tensor,
    experts: Experts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace | None,
    plan: tune.Plan,
) -> None:
    tokens, top_k = ids.shape
    slots, (gate, up, down) = ids.numel(), experts
    few = _few(slots, top_k, experts, plan, sm_count(x.device))
    if workspace is None:
        workspace = Workspace.of(slots, top_k, experts, x.device, plan)
    workspace.check(*needs(few, slots, top_k, experts))
    g, u, d, width = operand(gate), operand(up), operand(down), operand_width(x.device)
    hidden = torch.empty(slots, gate.rows, dtype=x.dtype, device=x.device)
    kernel.gate_up_few[(few.gate_up_tiles * few.gate_up_splits, slots)](
        x, g.data, g.table, u.data, u.table, ids, hidden, workspace.partial, workspace.arrived,
        slots, top_k, gate.rows, gate.columns, g.tiles, u.tiles, g.matrix, u.matrix, x.stride(0),
        SLOTS=1 << (slots - 1).bit_length(), SPLITS=few.gate_up_splits, **gate_up_constants(plan.gate_up, g, u, width),
    )  # fmt: skip
    kernel.down_few[(tokens, few.down_tiles * few.down_splits)](
        hidden, d.data, d.table, ids, weights, out, workspace.partial, workspace.arrived,
        tokens, top_k, down.rows, down.columns, d.tiles, d.matrix, out.stride(0),
        SPLITS=few.down_splits, **down_constants(plan.down, d, width),
    )  # fmt: skip


def _launch_many(
    x: torch.Tensor, experts: Experts, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, plan: tune.Plan
) -> None:
    tokens, top_k = ids.shape
    slots, (gate, up, down) = ids.numel(), experts
    count = gate.data.shape[0]
    hidden = torch.empty(slots, gate.rows, dtype=x.dtype, device=x.device)
    order, blocks = sort(ids, count, plan.gate_up.tokens)
    for first, some in _parts((gate, up), x.dtype, plan):
        _gate_up(x, some[0], some[1], order, blocks, hidden, first, top_k, plan)
    if plan.down.tokens != plan.gate_up.tokens:
        order, blocks = sort(ids, count, plan.down.tokens, order)
    step = columns_at_once(slots, down.rows)
    shares = torch.empty(slots * step, dtype=x.dtype, device=x.device)
    for middle in range(0, down.rows, step):
        rows = min(step, down.rows - middle)
        for first, some in _parts((rows_view(down, middle, rows),), x.dtype, plan):
            _down(hidden, some[0], order, blocks, weights, shares, first, plan)
        kernel.add_up[(tokens, -(-rows // tune.ADD))](
            shares, ids, out, top_k, rows, middle, count, out.stride(0), BLOCK=tune.ADD
        )


def columns_at_once(slots: int, columns: int) -> int:
    """Of the answer: slots' shares of all are added up before those of the next. Whole 256, as even as can be."""
    most = max(1, tune.PARTS_BYTES // (2 * slots * 256))
    wide = -(-columns // 256)
    return min(columns, -(-wide // -(-wide // most)) * 256)


def _gate_up(
    x: torch.Tensor,
    gate: Weight,
    up: Weight,
    order: torch.Tensor,
    blocks: torch.Tensor,
    hidden: torch.Tensor,
    first: int,
    top_k: int,
    plan: tune.Plan,
) -> None:
    """Of the experts from `first` on that gate and up hold."""
    config, count = plan.gate_up, gate.data.shape[0]
    grid = (-(-gate.rows // config.block_n), len(blocks))
    if plan.dense:
        kernel.gate_up_dense[grid](
            x, gate.data, up.data, order, blocks, hidden, first, count, top_k, gate.rows, gate.columns,
            gate.data.stride(0), up.data.stride(0), x.stride(0), **dense_constants(config),
        )  # fmt: skip
    else:
        g, u = operand(gate), operand(up)
        kernel.gate_up_many[grid](
            x, g.data, g.table, u.data, u.table, order, blocks, hidden,
            first, count, top_k, gate.rows, gate.columns, g.tiles, u.tiles, g.matrix, u.matrix, x.stride(0),
            **gate_up_constants(config, g, u, operand_width(x.device)),
        )  # fmt: skip


def _down(
    hidden: torch.Tensor,
    down: Weight,
    order: torch.Tensor,
    blocks: torch.Tensor,
    weights: torch.Tensor,
    shares: torch.Tensor,
    first: int,
    plan: tune.Plan,
) -> None:
    """Of the experts from `first` on that down holds."""
    config, count = plan.down, down.data.shape[0]
    grid = (-(-down.rows // config.block_n), len(blocks))
    if plan.dense:
        kernel.down_dense[grid](
            hidden, down.data, order, blocks, weights, shares, first, count, down.rows, down.columns,
            down.data.stride(0), **dense_constants(config),
        )  # fmt: skip
    else:
        d = operand(down)
        kernel.down_many[grid](
            hidden, d.data, d.table, order, blocks, weights, shares,
            first, count, down.rows, down.columns, d.tiles, d.matrix,
            **down_constants(config, d, operand_width(hidden.device)),
        )  # fmt: skip


def sort(
    ids: torch.Tensor, experts: int, tokens: int, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots, expert by expert (int32 [slots]), and blocks of up to `tokens` of one expert (int32 [blocks, 3]: expert or
    -1, first, end; as many as there can be). order: what an earlier sort of the same ids gave, which stays as it is."""
    slots = ids.numel()
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    ranks = torch.empty(slots, dtype=torch.int32, device=ids.device)
    kernel.count[(-(-slots // tune.COUNT),)](ids, counts, ranks, slots, experts, CHUNK=tune.COUNT)
    most = min(slots, -(-slots // tokens) + experts)
    plan = torch.empty(most, 3, dtype=torch.int32, device=ids.device)
    sorted = torch.empty(slots, dtype=torch.int32, device=ids.device)
    programs = max(-(-slots // tune.PLACE), -(-most // tune.PLACE_BLOCKS))
    kernel.place[(programs,)](
        ids, counts, ranks, sorted, plan, slots, experts, most,
        EXPERTS=1 << (experts - 1).bit_length(), CHUNK=tune.PLACE, BLOCKS=tune.PLACE_BLOCKS, TOKENS=tokens,
    )  # fmt: skip
    return sorted if order is None else order, plan


def _parts(weights: tuple[Weight, ...], dtype: torch.dtype, plan: tune.Plan) -> Any:
    """The experts as the kernels take them: all at once, or (`plan.dense`) some at a time in 16 bits."""
    count = weights[0].data.shape[0]
    if not plan.dense or all(w.type in PLAIN and w.data.dtype == dtype for w in weights):
        yield 0, weights
        return
    each = sum(2 * w.rows * w.columns for w in weights)
    most = max(1, min(count, tune.WORKSPACE_BYTES // each))
    step = -(-count // -(-count // most))  # much the same each time
    types = {t: k for k, t in PLAIN.items()}
    space = [torch.empty(step, w.rows, w.columns, dtype=dtype, device=w.data.device) for w in weights]
    for first in range(0, count, step):
        some = [w._replace(data=w.data[first : first + step]) for w in weights]
        dense = [dequantize(w, dtype, out=s[: len(w.data)]) for w, s in zip(some, space, strict=True)]
        yield first, tuple(w._replace(data=x, type=types[dtype]) for w, x in zip(some, dense, strict=True))


def gate_up_constants(config: tune.Config, gate: Operand, up: Operand, width: int) -> dict[str, Any]:
    types = {"GATE": gate.type, "GATE_BYTES": gate.bytes, "UP": up.type, "UP_BYTES": up.bytes}
    return types | _constants(config, width, gate.type, up.type)


def down_constants(config: tune.Config, down: Operand, width: int) -> dict[str, Any]:
    return {"TYPE": down.type, "BYTES": down.bytes} | _constants(config, width, down.type)


def dense_constants(config: tune.Config) -> dict[str, Any]:
    return {
        "BLOCK_N": config.block_n, "TOKENS": config.tokens, "BLOCK_K": tune.BLOCK_K, "STAGES": config.stages,
        "num_warps": config.warps,
    }  # fmt: skip


def _constants(config: tune.Config, width: int, *types: str) -> dict[str, Any]:
    stages = 1 if set(types) & set(tune.UNSTAGED) else config.stages
    return {
        "BLOCK_N": config.block_n, "TOKENS": config.tokens, "STAGES": stages, "WARPS": config.warps,
        "WIDTH": width, "num_warps": config.warps, "maxnreg": config.registers,
    }  # fmt: skip


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """A CPU under the interpreter counts as 12.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (12, 0)


def _check(
    x: torch.Tensor, experts: Experts, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None
) -> None:
    gate, up, down = experts
    count = gate.data.shape[0]
    for name, weight in zip(("gate", "up", "down"), experts, strict=True):
        check_weight(name, weight, count)
    if (up.rows, up.columns) != (gate.rows, gate.columns) or (down.rows, down.columns) != (gate.columns, gate.rows):
        raise ValueError(
            f"gate is {gate.rows} x {gate.columns}, up {up.rows} x {up.columns}, down {down.rows} x {down.columns}: "
            f"expected I x K, I x K, K x I"
        )
    if x.dim() != 2 or x.shape[1] != gate.columns or x.dtype not in ACTIVATIONS or x.stride(1) != 1:
        raise ValueError(
            f"x is {list(x.shape)} of {x.dtype} with strides {x.stride()}, expected [T, {gate.columns}] of "
            f"{' or '.join(map(str, ACTIVATIONS))}, rows contiguous"
        )
    if x.shape[0] * max(x.stride(0), ids.shape[-1] * gate.rows) >= 1 << 31:
        raise ValueError(
            f"x is {list(x.shape)} with strides {x.stride()}, {ids.shape[-1]} experts of width {gate.rows} each: "
            f"expected less than 2**31 values of x, from first to last, and between gate and down"
        )
    for name, found, dtype in (("topk_ids", ids, torch.int32), ("topk_weights", weights, torch.float32)):
        if found.dim() != 2 or found.shape[0] != x.shape[0] or found.dtype != dtype or not found.is_contiguous():
            raise ValueError(
                f"{name} is {list(found.shape)} of {found.dtype}, expected contiguous {dtype} [{x.shape[0]}, top_k]"
            )
    if ids.shape != weights.shape:
        raise ValueError(f"topk_weights is {list(weights.shape)}, topk_ids {list(ids.shape)}: expected the same")
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.stride(1) != 1):
        raise ValueError(
            f"out is {list(out.shape)} of {out.dtype}, expected {list(x.shape)} of {x.dtype}, rows contiguous"
        )
    devices = {t.device for t in (x, gate.data, up.data, down.data, ids, weights)} | (
        {out.device} if out is not None else set()
    )
    if len(devices) > 1:
        raise ValueError(f"arguments are on {', '.join(sorted(map(str, devices)))}: expected one device")
