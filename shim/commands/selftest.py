"""`glm5-shim selftest`: every kernel against its reference on this machine's GPU, and how long it takes.

Without a GPU the kernels run in Triton's interpreter on small inputs, and are not timed. The test runs in a child
process for two reasons: TRITON_INTERPRET must be set before Triton is imported, and a kernel that crashes ends its
process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from shim import process

if TYPE_CHECKING:
    import torch

HEADS, INDEX_HEADS = 8, 32  # GLM-5's attention heads per GPU at TP8, and its indexer heads
TOPK = 2048


class SelftestProblem(Exception):
    """The child gave no answer. The message is one line."""


@dataclass(frozen=True)
class Case:
    """`call` runs the kernel once. `compare` takes its answer and returns pairs (expected in float64, found)."""

    name: str
    case: str
    limit: float
    call: Callable[[], Any]
    compare: Callable[[Any], list[tuple[torch.Tensor, torch.Tensor]]]


def selftest() -> dict[str, Any]:
    """`{"device", "ok", "kernels": [{"name", "case", "rel_error", "limit", "ok", "median_us"}]}`.

    median_us is None without a GPU. For a kernel that raised, rel_error and median_us are None, and "error" has the
    exception. SelftestProblem if the child gives no answer.
    """
    import torch

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    try:
        found: dict[str, Any] = process.ask_child("shim.commands.selftest", None, env)
    except process.ChildProblem as problem:
        raise SelftestProblem(f"the kernels could not be tested: {problem}") from None
    return found


def show(found: dict[str, Any]) -> None:
    """Prints what `selftest` found, for a person."""
    click.echo(found["device"])
    for row in found["kernels"]:
        error = row.get("error") or f"relative error {row['rel_error']:.1e}, limit {row['limit']:.0e}"
        time = "" if row["median_us"] is None else f", {row['median_us']} us"
        click.echo(f"{'ok ' if row['ok'] else 'BAD'}  {row['name']}  {row['case']}: {error}{time}")


def run() -> dict[str, Any]:
    """The test itself, in this process. Without a GPU, TRITON_INTERPRET=1 must be set before Triton is imported."""
    import torch

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    rows = [_judge(case, gpu) for case in cases(torch.device(device), gpu)]
    named = torch.cuda.get_device_name() if gpu else "CPU, Triton's interpreter"
    return {"device": named, "ok": all(row["ok"] for row in rows), "kernels": rows}


def _judge(case: Case, timed: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name, "case": case.case, "limit": case.limit}
    try:
        error = max(relative_error(want, got) for want, got in case.compare(case.call()))
        micros = _median_us(case.call) if timed else None
    except Exception as problem:
        line = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return row | {"rel_error": None, "ok": False, "median_us": None, "error": line}
    return row | {"rel_error": error, "ok": error <= case.limit, "median_us": micros}


def relative_error(want: torch.Tensor, got: torch.Tensor) -> float:
    """|got - want| / |want| in the Euclidean norm over all elements. At most 1e9; NaN counts as that, because JSON has
    neither NaN nor infinity."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if error < 1e9 else 1e9


def _median_us(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return round(float(do_bench(call, return_mode="median")) * 1000, 1)


def cases(device: torch.device, large: bool) -> Iterator[Case]:
    """Every kernel, on new random inputs. large: sizes of a real server; else sizes that an interpreter can do in
    seconds."""
    import torch

    generator = torch.Generator(device=device)
    generator.seed()
    length = 65_536 if large else 192
    for kv in ("bf16", "fp8"):
        for tokens in (1, 64, 4096) if large else (2,):
            yield sparse_mla_case(generator, tokens, length, TOPK if large else 64, kv)
        yield sparse_mla_case(generator, 4096 if large else 8, length, TOPK if large else 64, kv, alike=True)
    yield prefill_case(generator, *((1024, 32_768) if large else (8, 192)))
    for batch in (1, 32) if large else (2,):
        yield paged_case(generator, batch, length)
    yield topk_case(generator, 32 if large else 3, length, TOPK if large else 32, windows=False)
    yield topk_case(generator, 1024 if large else 3, length // 2, TOPK if large else 32, windows=True)


def sparse_mla_case(
    generator: torch.Generator, tokens: int, length: int, columns: int, kv: str, alike: bool = False
) -> Case:
    """One request of `length` cached tokens. A quarter of the chosen positions is -1.

    alike: the other positions are the same for all tokens. The tokens then share gathers, if this GPU's plan does that.
    """
    import torch

    from shim.kernels.sparse_mla import launch, reference, tune

    draw = _Draw(generator)
    rows = draw.normal(length // 64, 64, reference.ROW)
    cache = reference.pack_fp8_ds_mla(rows) if kv == "fp8" else rows.bfloat16()
    q = draw.normal(tokens, HEADS, reference.ROW).bfloat16()
    topk = draw.permutation(length)[:columns].repeat(tokens, 1) if alike else draw.integers(length, tokens, columns)
    topk[draw.integers(4, tokens, columns) == 0] = -1
    req_ids = torch.zeros(tokens, dtype=torch.int32, device=generator.device)
    table = draw.permutation(length // 64)[None]
    seq_lens = torch.full((1,), length, dtype=torch.int32, device=generator.device)
    scale = reference.ROW**-0.5
    options: dict[str, Any] = {}
    most = max(tokens, tune.SHARE_FROM)
    sharing = tune.sharing(most, HEADS, cache.dtype, launch.is_large(generator.device)) if alike else None
    if sharing is not None:
        workspace = launch.Workspace(most, HEADS, cache.dtype, generator.device, columns, positions=length)
        options = {"workspace": workspace, "sharing": sharing}

    def call() -> Any:
        return launch.sparse_mla(q, cache, topk, req_ids, table, seq_lens, scale, **options)

    def compare(got: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        few = slice(0, 64)  # rows are independent, and float64 is slow
        want = reference.sparse_mla(q[few], cache, topk[few], req_ids[few], table, scale, torch.float64)
        return [(w, g[few]) for w, g in zip(want, got, strict=True)]

    what = f"{tokens} tokens{' alike' if alike else ''}, {HEADS} heads, top-k {columns} of {length}, {kv} cache"
    return Case("sparse_mla", what, 1e-2, call, compare)


def prefill_case(generator: torch.Generator, queries: int, keys: int) -> Case:
    """Causal windows over one run of keys."""
    import torch

    from shim.kernels.indexer import launch, reference

    draw = _Draw(generator)
    q = draw.normal(queries, INDEX_HEADS, reference.DIM).to(torch.float8_e4m3fn)
    k = draw.normal(keys, reference.DIM).to(torch.float8_e4m3fn)
    k_scale, weights = draw.uniform(keys), draw.normal(queries, INDEX_HEADS)
    ke = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=generator.device)
    ks = draw.integers(keys // 4, queries)

    def call() -> Any:
        return launch.mqa_logits(q, k, k_scale, weights, ks, ke)

    def compare(got: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        few = slice(0, 128)
        want = reference.mqa_logits(q[few], k, k_scale, weights[few], ks[few], ke[few], torch.float64)
        return [_seen(want, got[few])]

    return Case("indexer_prefill", f"{queries} queries, {keys} keys, {INDEX_HEADS} heads", 1e-2, call, compare)


def paged_case(generator: torch.Generator, batch: int, length: int) -> Case:
    """One new token for each request, lengths between half and all of `length`."""
    import torch

    from shim.kernels.indexer import launch, reference

    draw = _Draw(generator)
    blocks = batch * length // reference.BLOCK
    k = draw.normal(blocks, reference.BLOCK, reference.DIM).to(torch.float8_e4m3fn)
    cache = reference.pack_blocks(k, draw.uniform(blocks, reference.BLOCK))
    q = draw.normal(batch, 1, INDEX_HEADS, reference.DIM).to(torch.float8_e4m3fn)
    weights = draw.normal(batch, INDEX_HEADS)
    lens = length - draw.integers(length // 2, batch)
    table = draw.permutation(blocks).view(batch, -1)

    def call() -> Any:
        return launch.paged_mqa_logits(q, cache, weights, lens, table, length)

    def compare(got: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [_seen(reference.paged_mqa_logits(q, cache, weights, lens, table, length, torch.float64), got)]

    return Case("indexer_paged", f"{batch} requests of up to {length} keys, {INDEX_HEADS} heads", 1e-2, call, compare)


def topk_case(generator: torch.Generator, rows: int, columns: int, k: int, *, windows: bool) -> Case:
    """Compares the sorted values of the chosen columns, because any of several equal columns is right. The last row is
    shorter than k."""
    import torch

    from shim.kernels.topk import launch, reference

    draw = _Draw(generator)
    logits = draw.normal(rows, columns)
    starts = draw.integers(columns // 4, rows) if windows else None
    lengths = columns // 2 + draw.integers(columns // 4, rows)
    lengths[-1] = k // 2

    def call() -> Any:
        return launch.topk(logits, lengths, k, starts=starts)

    def values(chosen: torch.Tensor) -> torch.Tensor:
        first = 0 if starts is None else starts[:, None]
        held = logits.gather(1, (chosen + first).clamp(0, columns - 1).long())
        # a position that is no column counts 100, so an answer with a missing or invented column is far off
        return held.masked_fill((chosen < 0) | (chosen >= lengths[:, None]), 100.0).sort(dim=1).values

    def compare(got: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        distinct = torch.stack([row.unique().numel() + (row < 0).sum() - (row < 0).any().int() for row in got])
        return [
            (values(reference.topk(logits, lengths, k, starts)), values(got)),
            (torch.full_like(distinct, k), distinct),
        ]

    what = f"{k} of {columns} in {rows} rows{', windows' if windows else ''}"
    return Case("topk", what, 0.0, call, compare)


def _seen(want: torch.Tensor, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both at the places that have a key. The kernel does not write the others."""
    seen = want.isfinite()
    return want[seen], got[seen]


class _Draw:
    """Random tensors on the generator's device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.given: dict[str, Any] = {"generator": generator, "device": generator.device}

    def normal(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.randn(*shape, **self.given)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Between 0.1 and 1.1."""
        import torch

        return torch.rand(*shape, **self.given) + 0.1

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        import torch

        return torch.randint(below, shape, dtype=torch.int32, **self.given)

    def permutation(self, count: int) -> torch.Tensor:
        import torch

        return torch.randperm(count, **self.given).int()


if __name__ == "__main__":
    process.answer_parent(lambda _: run())
