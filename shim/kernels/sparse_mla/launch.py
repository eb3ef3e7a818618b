"""The host side of sparse MLA: checks, plan, launch. No host sync, and no allocation when every buffer is given."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from shim.kernels import interpreter
from shim.kernels.host import Compiled, Form, Launch, form, new, sm_count
from shim.kernels.sparse_mla import kernel, tune, union
from shim.kernels.sparse_mla.reference import FP8_ROW_BYTES, LATENT, ROPE, ROW

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_TYPES = (torch.bfloat16, torch.float16)
compiled = Compiled("sparse_mla", kernel.attend, kernel.merge, union.look, union.mark, union.emit)

interpreter.mend()


class Tensors(NamedTuple):
    """All tensors of one call. Shapes are in `sparse_mla`; latent and rope are the parts of q."""

    latent: torch.Tensor
    rope: torch.Tensor
    cache: torch.Tensor
    topk: torch.Tensor
    req_ids: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def forms(self) -> Forms:
        return new(Forms, [form(tensor) for tensor in self])

    def of_tokens(self, part: slice) -> Tensors:
        return Tensors(
            self.latent[part], self.rope[part], self.cache, self.topk[part], self.req_ids[part], self.block_table,
            self.seq_lens, self.out[part], self.lse[part],
        )  # fmt: skip

    def arguments(
        self, chosen: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The first ten arguments of `kernel.attend`. chosen: top-k positions, or entries of unions."""
        return (
            self.latent, self.rope, self.cache, chosen, self.req_ids, self.block_table, self.seq_lens, counts, out, lse,
        )  # fmt: skip


class Forms(NamedTuple):
    """The forms of `Tensors`. Checks and plans depend on nothing else of them."""

    latent: Form
    rope: Form
    cache: Form
    topk: Form
    req_ids: Form
    block_table: Form
    seq_lens: Form
    out: Form
    lse: Form


class Workspace:
    """Memory for the results of shares, which the merge reads: fp32. Graphs need its address to stay."""

    def __init__(
        self,
        max_tokens: int,
        heads: int,
        cache_dtype: torch.dtype,
        device: torch.device | str,
        columns: int = 2048,
        sms: int | None = None,
        positions: int = 0,
    ) -> None:
        """Large enough for every call of up to `max_tokens` tokens. For larger ones `check` raises ValueError.

        positions: the most positions of a request. 0: neighbouring tokens share no gathers
        """
        device = torch.device(device)
        count = sms or sm_count(device)
        large = is_large(device)
        rows = 0
        for tokens in range(1, max_tokens + 1):
            splits = tune.configuration(tokens, heads, cache_dtype, count, columns, large).splits
            rows = max(rows, tokens * splits * heads if splits > 1 else 0)
        self.out = torch.empty(rows * LATENT, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        sharing = tune.sharing(max_tokens, heads, cache_dtype, large) if positions else None
        self.unions: union.Unions | None = None
        if sharing is not None:
            groups = min(-(-max_tokens // sharing.group), max(1, tune.UNION_BYTES * 8 // positions // sharing.group))
            most = int(tune.MOST_SETS[sharing.group] * columns)
            self.unions = union.Unions(groups, sharing.group, positions, most, device)

    def check(self, tokens: int, splits: int, heads: int) -> None:
        rows = tokens * splits * heads
        if rows > self.lse.numel():
            raise ValueError(f"workspace has {self.lse.numel()} rows, {tokens} tokens x {splits} x {heads} need {rows}")


def sparse_mla(
    q: Query,
    cache: torch.Tensor,
    topk: torch.Tensor,
    req_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    neighbours: int = 0,
    plan: tune.AttentionPlan | None = None,
    sharing: tune.Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends from each token to its chosen rows: `reference.sparse_mla`, on a GPU.

    q:           [T, N, 576] bf16 or fp16, or (latent [T, N, 512], rope [T, N, 64]); strides are multiples of 16 bytes
    cache:       [blocks, page, 576] of q's dtype, or uint8 [blocks, page, 656] (`fp8_ds_mla`); rows and blocks may lie
                 further apart than their size
    topk:        int32 [T, K], positions within the token's own request. -1, at any place, is no token. A position that
                 is not below the request's `seq_lens` is none either: padded rows hold stale ones
    req_ids:     int32 [T], row of `block_table` and `seq_lens` for each token
    block_table: int32 [R, blocks of a request]
    seq_lens:    int32 [R]
    scale:       softmax scale, natural-log units
    out, lse:    [T, N, 512] of q's dtype and fp32 [T, N]; the answer is written to them
    workspace:   for rows that are split. Without it memory is allocated. Shared gathers need one
    neighbours:  how many tokens of a request stand side by side, on average. From two groups on, and with enough
                 tokens, they share gathers
    plan:        in place of `tune.configuration`'s (tuning, tests)
    sharing:     in place of `tune.sharing`'s (tuning, tests)

    Returns out and the natural-log LSE. A token without chosen rows has 0 and -inf. ValueError names an argument that
    does not fit.
    """
    latent, rope = (q[..., :LATENT], q[..., LATENT:]) if isinstance(q, torch.Tensor) else q
    device = latent.device
    if out is None:
        out = torch.empty(latent.shape, dtype=latent.dtype, device=device)
    if lse is None:
        lse = torch.empty(latent.shape[:2], dtype=torch.float32, device=device)
    tensors = new(Tensors, (latent, rope, cache, topk, req_ids, block_table, seq_lens, out, lse))
    forms = tensors.forms()
    call = _call(forms, plan, sm_count(device), is_large(device))
    if call is None:
        return out, lse
    tokens, heads, _ = latent.shape
    if sharing is None and plan is None and workspace is not None and workspace.unions is not None:
        sharing = tune.sharing(tokens, heads, cache.dtype, is_large(device))
        sharing = sharing if sharing is not None and neighbours >= 2 * sharing.group else None
    if sharing is not None:
        if workspace is None or workspace.unions is None:
            raise ValueError("shared gathers need a workspace: give one with positions")
        _attend_shared(tensors, forms, scale, sharing, call.plan.config, workspace.unions)
        return out, lse
    shares, share_lse = out, lse
    if call.merge is not None:
        if workspace is None:
            rows = tokens * call.splits * heads
            shares = torch.empty(rows * LATENT, dtype=torch.float32, device=device)
            share_lse = torch.empty(rows, dtype=torch.float32, device=device)
        else:
            workspace.check(tokens, call.splits, heads)
            shares, share_lse = workspace.out, workspace.lse
    kernel.attend[(call.attend.programs,)](
        *tensors.arguments(topk, topk, shares, share_lse), scale, *call.attend.numbers, **call.attend.options
    )
    if call.merge is not None:
        kernel.merge[(call.merge.programs,)](shares, share_lse, out, lse, *call.merge.numbers, **call.merge.options)
    compiled.tell(call)
    return out, lse


def _attend_shared(
    tensors: Tensors, forms: Forms, scale: float, sharing: tune.Config, alone: tune.Config, unions: union.Unions
) -> None:
    """Attends with `sharing` for groups that have a union, with `alone` for the tokens of the others.

    It takes as many groups at a time as `unions` has memory for."""
    if sharing.group != unions.group:
        raise ValueError(f"sharing is by {sharing.group} tokens, the workspace for {unions.group}")
    with_unions = forms._replace(topk=form(unions.entries))
    tokens, step = len(tensors.topk), unions.groups * sharing.group
    for first in range(0, tokens, step):
        part = tensors if tokens <= step else tensors.of_tokens(slice(first, first + step))
        entries, counts = unions.build(part.topk, part.req_ids, part.seq_lens)
        for config, chosen, its_forms, left in (
            (sharing, entries, with_unions, 0),
            (alone, part.topk, forms, sharing.group),
        ):
            launch = _attend(its_forms, len(part.topk), config, chosen.shape[1], 1, left)
            kernel.attend[(launch.programs,)](
                *part.arguments(chosen, counts, part.out, part.lse), scale, *launch.numbers, **launch.options
            )
            compiled.tell(launch)


class _Call(NamedTuple):
    plan: tune.AttentionPlan
    splits: int
    attend: Launch
    merge: Launch | None


@lru_cache(maxsize=512)  # the forms of a prefill are those of one step, in all layers
def _call(forms: Forms, plan: tune.AttentionPlan | None, sms: int, large: bool) -> _Call | None:
    """Checks and plans `sparse_mla`. None if there is nothing to do."""
    _check(forms)
    _check_output(forms)
    tokens, heads, _ = forms.latent.shape
    columns = forms.topk.shape[1]
    if tokens == 0 or heads == 0:
        return None
    plan = plan or tune.configuration(tokens, heads, forms.cache.dtype, sms, columns, large)
    if plan.splits < 1:
        raise ValueError(f"plan has {plan.splits} splits, expected 1 or more")
    tiles = max(1, -(-columns // plan.config.block_k))
    span = -(-tiles // plan.splits) * plan.config.block_k
    splits = max(1, -(-columns // span))
    attend = _attend(forms, tokens, plan.config, span, splits)
    out = forms.out
    numbers = (heads, splits, out.strides[0] // 8, out.strides[1] // 8, *forms.lse.strides)
    options = merge_constants(splits)
    merge = Launch(tokens * heads * LATENT // options["BLOCK_D"], numbers, options | {"num_warps": tune.MERGE_WARPS})
    return _Call(plan, splits, attend, merge if splits > 1 else None)


@lru_cache(maxsize=512)
def _attend(forms: Forms, tokens: int, config: tune.Config, span: int, splits: int, left: int = 0) -> Launch:
    """Plans `kernel.attend` for `tokens` of a call's tokens, in shares of `span` columns.

    forms: topk is the form of the unions' entries if config.group > 1
    left:  the kernel's LEFT
    """
    latent, rope, cache, topk, _, block_table, _, out, lse = forms
    heads = latent.shape[1]
    unit = 16 // cache.dtype.itemsize
    to_out = (out.strides[0] // 8, 0, out.strides[1] // 8)
    to_lse = (lse.strides[0], 0, lse.strides[1])
    if splits > 1:  # a workspace's
        to_out = (splits * heads * LATENT // 8, heads * LATENT // 8, LATENT // 8)
        to_lse = (splits * heads, heads, 1)
    numbers = (
        tokens, heads, topk.shape[1], span, splits,
        latent.strides[0] // 8, latent.strides[1] // 8, rope.strides[0] // 8, rope.strides[1] // 8,
        cache.strides[0] // unit, cache.strides[1] // unit, topk.strides[0], block_table.strides[0],
        *to_out, *to_lse,
    )  # fmt: skip
    options = constants(config, cache.dtype, cache.shape[1], _converts(latent.device), left)
    programs = -(-tokens // config.group) * splits * -(-heads * config.group // config.block_n)
    return Launch(programs, numbers, options | {"num_warps": config.warps})


def merge_constants(splits: int) -> dict[str, int]:
    """The constants of `kernel.merge`: one variant for each power of two."""
    shares = triton.next_power_of_2(splits)
    return {"SHARES": shares, "BLOCK_D": min(LATENT, tune.MERGE_VALUES // shares)}


@lru_cache
def constants(config: tune.Config, cache_dtype: torch.dtype, page: int, cvt: bool, left: int = 0) -> dict[str, Any]:
    """The constants of `kernel.attend`. cvt: the GPU has an instruction that converts e4m3 (8.9 and up)."""
    return {
        "PAGE": page, "BLOCK_K": config.block_k, "BLOCK_N": config.block_n, "TILE": config.tile,
        "PIECES": LATENT // config.tile, "FP8": cache_dtype == torch.uint8, "CVT": cvt, "SCAN": tune.SCAN,
        "STAGES": config.stages, "GROUP": config.group, "LEFT": left, "APART": config.apart,
        "SWAP": config.swap,
    }  # fmt: skip


def variants(
    heads: int, cache_dtype: torch.dtype, max_tokens: int, sms: int, columns: int = 2048, large: bool = False
) -> Iterator[tuple[int, tune.AttentionPlan]]:
    """A token count with its plan for each variant that calls of up to `max_tokens` tokens compile."""
    seen = set()
    for tokens in range(1, max_tokens + 1):
        plan = tune.configuration(tokens, heads, cache_dtype, sms, columns, large)
        if (key := (plan.config, plan.splits)) not in seen:
            seen.add(key)
            yield tokens, plan


def warm_up(
    heads: int,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    page: int,
    max_tokens: int,
    device: torch.device | str,
    columns: int = 2048,
) -> int:
    """Launches each variant once, so that it is compiled and loaded before a graph is captured. Returns how many."""
    device = torch.device(device)
    width = FP8_ROW_BYTES if cache_dtype == torch.uint8 else ROW
    cache = torch.zeros(1, page, width, dtype=cache_dtype, device=device)
    one = torch.ones(1, 1, dtype=torch.int32, device=device)
    count = 0

    def launch(tokens: int, **options: Any) -> None:
        nonlocal count
        q = torch.ones(tokens, heads, ROW, dtype=q_dtype, device=device)
        topk = torch.full((tokens, columns), -1, dtype=torch.int32, device=device)
        req_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        sparse_mla(q, cache, topk, req_ids, one - 1, one[0], 1.0, **options)
        count += 1

    for tokens, plan in variants(heads, cache_dtype, max_tokens, sm_count(device), columns, is_large(device)):
        launch(tokens, plan=plan)
    if sharing := tune.sharing(max_tokens, heads, cache_dtype, is_large(device)):
        workspace = Workspace(tune.SHARE_FROM, heads, cache_dtype, device, columns, positions=page)
        launch(tune.SHARE_FROM, workspace=workspace, sharing=sharing)  # fewer tokens have other plans for the rest
    compiled.warm(device)
    return count


@lru_cache
def _converts(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache
def is_large(device: torch.device) -> bool:
    """Does this GPU have the shared memory of 9.0?"""
    if device.type != "cuda":
        return False
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 227 << 10


def _check(forms: Forms) -> None:
    latent, rope, cache, topk, req_ids, block_table, seq_lens, _, _ = forms
    if len(latent.shape) != 3 or latent.shape[2] != LATENT or rope.shape != (*latent.shape[:2], ROPE):
        raise ValueError(
            f"q is {list(latent.shape)} and {list(rope.shape)}, expected [T, N, {LATENT}] and [T, N, {ROPE}]"
        )
    if latent.dtype not in _TYPES or rope.dtype != latent.dtype:
        raise ValueError(f"q is {latent.dtype} and {rope.dtype}, expected bfloat16 or float16")
    fp8 = cache.dtype == torch.uint8
    width = FP8_ROW_BYTES if fp8 else ROW
    if len(cache.shape) != 3 or cache.shape[2] != width or not (fp8 or cache.dtype == latent.dtype):
        raise ValueError(
            f"cache is {list(cache.shape)} of {cache.dtype}, expected [blocks, page, {width}] of q's dtype "
            f"({latent.dtype}), or uint8 [blocks, page, {FP8_ROW_BYTES}]"
        )
    tokens = latent.shape[0]
    for name, given, shape in (
        ("topk", topk, (tokens, topk.shape[-1])),
        ("req_ids", req_ids, (tokens,)),
        ("block_table", block_table, (block_table.shape[0], block_table.shape[-1])),
        ("seq_lens", seq_lens, block_table.shape[:1]),
    ):
        if given.dtype != torch.int32 or given.shape != shape or (given.shape.numel() > 1 and given.strides[-1] != 1):
            raise ValueError(f"{name} is {given}, expected int32 {list(shape)}, its last dimension contiguous")
    for name, given in (("q", latent), ("q", rope), ("cache", cache)):
        _check_alignment(name, given)
    for name, given in (
        ("q", rope), ("cache", cache), ("topk", topk), ("req_ids", req_ids), ("block_table", block_table),
        ("seq_lens", seq_lens),
    ):  # fmt: skip
        if given.device != latent.device:
            raise ValueError(f"{name} is on {given.device}, q on {latent.device}")


def _check_output(forms: Forms) -> None:
    latent, out, lse = forms.latent, forms.out, forms.lse
    if out.shape != latent.shape or out.dtype != latent.dtype or out.device != latent.device:
        raise ValueError(f"out is {list(out.shape)} of {out.dtype}, expected {list(latent.shape)} of {latent.dtype}")
    if lse.shape != latent.shape[:2] or lse.dtype != torch.float32 or lse.device != latent.device:
        raise ValueError(f"lse is {list(lse.shape)} of {lse.dtype}, expected {list(latent.shape[:2])} of float32")
    _check_alignment("out", out)


def _check_alignment(name: str, given: Form) -> None:
    if not given.in_16_bytes:
        raise ValueError(
            f"{name} is {given}: its last dimension must be contiguous, its address and other strides multiples of "
            "16 bytes (rows are read and written 16 bytes at a time)"
        )
