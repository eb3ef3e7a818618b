"""Does the release's own DeepGEMM score keys right on this GPU? A child process finds out, once per machine.

A kernel for the wrong architecture may raise, compute nonsense, or hang. None of that may happen in a worker, so a
child runs it. The answer is kept in the cache directory, under a key of everything that it depends on.

A child that was stopped from outside, took too long, or got no memory on the GPU proves nothing. The workers that were
waiting for it take its answer, so that all ranks of one server use the same kernels, and the next server tries again.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from shim import env, ledger, process

TIMEOUT_S = 180.0  # DeepGEMM compiles with nvcc on its first call
TOLERANCE = 1e-3  # of the largest logit. Both sides see the same fp8 numbers
# what CUDA and torch say when the GPU had no room for the child: another process fills it, or has it for itself
NO_ROOM = ("out of memory", "OutOfMemory", "CUBLAS_STATUS_ALLOC_FAILED", "busy or unavailable")
STOPPED = [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP]  # exit codes of a child that was stopped


def deep_gemm_directory() -> Path | None:
    """The directory of the DeepGEMM that vLLM will load. As vLLM does, it prefers a package that the user installed to
    the one in the wheel."""
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the parent is missing
            continue
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def has_sm120_kernels(directory: Path) -> bool:
    """Can this DeepGEMM compile kernels for SM120? It compiles at run time, from sources that it carries. The wheels of
    0.20 to 0.24 and 0.27 have no `sm120_*` among them."""
    return any(directory.glob("include/deep_gemm/impls/sm120_*"))


def native_works(heads: int) -> tuple[bool, str]:
    """(may DeepGEMM score GLM-5's keys on this worker's GPU?, the reason). heads: of the indexer."""
    directory = deep_gemm_directory()
    if directory is None:
        return False, "there is no DeepGEMM"
    if not has_sm120_kernels(directory):
        return False, "this release's DeepGEMM has no SM120 kernels"
    import torch

    device = torch.cuda.current_device()
    key = _key(directory, heads, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    path = env.cache_dir() / "indexer" / f"{sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    since = time.time()
    with _one_at_a_time(path):
        kept = _read(path, since)
        if kept is not None:
            return kept
        works, because, proved = _ask(device, heads)
        _write(path, {"works": works, "because": because, "proved": proved, "at": time.time(), "key": key})
        return works, because


def _key(directory: Path, heads: int, gpu: str, capability: tuple[int, int]) -> dict[str, Any]:
    binaries = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(directory.glob("*.so"))]
    return {
        "shim": process.identity(),
        "vllm": importlib.metadata.version("vllm"),
        "torch": importlib.metadata.version("torch"),
        "deep_gemm": [str(directory), binaries],
        "compiler": [os.environ.get("CUDA_HOME"), shutil.which("nvcc")],
        "gpu": [gpu, list(capability)],
        "heads": heads,
    }


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """The workers of one server come here at the same time: the first one runs the child, the others wait for it."""
    lock = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # the directory is not writable, or its file system has no locks: each worker runs a child
        pass
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _read(path: Path, since: float) -> tuple[bool, str] | None:
    """The kept answer. One that proves nothing counts only if it came while this worker was waiting, after `since`."""
    try:
        kept = json.loads(path.read_text())
        return (bool(kept["works"]), str(kept["because"])) if kept["proved"] or kept["at"] >= since else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, kept: dict[str, Any]) -> None:
    """Where nothing can be written, the next server runs a child again."""
    try:
        ledger.write_private(path, json.dumps(kept))
    except OSError:
        pass


def _ask(device: int, heads: int) -> tuple[bool, str, bool]:
    """(works?, the reason, would the next child find the same?), from a child without the shim."""
    question = {"device": device, "heads": heads}
    try:
        worst = float(process.ask_child(__name__, question, os.environ | {"GLM5_SHIM_OFF": "1"}, TIMEOUT_S))
    except process.ChildProblem as problem:
        if problem.exit_code is None:
            return False, f"DeepGEMM did not answer within {TIMEOUT_S:.0f} s", False
        proved = problem.exit_code not in STOPPED and not any(words in str(problem) for words in NO_ROOM)
        return False, f"DeepGEMM failed on this GPU (exit {problem.exit_code}): {problem}", proved
    return worst < TOLERANCE, f"DeepGEMM's logits on this GPU are within {worst:.1e} of the reference", True


def _answer(question: dict[str, int]) -> str:
    """In the child: the worst relative error of the release's prefill and paged logits. As text: JSON has no inf."""
    try:
        import torch

        device = question["device"]
        torch.cuda.set_device(device)
        return str(worst_error(question["heads"], torch.device("cuda", device)))
    except Exception as problem:  # in one line, because the parent sees the last one, and CUDA's errors have several
        raise SystemExit(" ".join(f"{type(problem).__name__}: {problem}".split())) from None


def worst_error(heads: int, device: Any, blocks: int = 80) -> float:
    """max |theirs - reference| / max |reference| over prefill, and decode of 1 and 2 tokens a request; NaN counts as
    infinite.

    heads:  of the indexer
    blocks: how many blocks of 64 keys, a multiple of 4
    """
    import torch
    from vllm.utils import deep_gemm

    from shim.kernels.indexer import reference

    torch.manual_seed(0)
    keys = torch.randn(blocks, reference.BLOCK, reference.DIM, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(blocks, reference.BLOCK, device=device)
    errors = [_prefill_error(deep_gemm, heads, keys, scales)]
    errors += [_paged_error(deep_gemm, heads, keys, scales, next_n) for next_n in (1, 2)]
    return max(errors)


def _prefill_error(deep_gemm: Any, heads: int, keys: Any, scales: Any) -> float:
    """Of 130 query rows against all keys but the first 100. keys: fp8 [blocks, 64, 128]; scales: fp32 [blocks, 64]."""
    import torch

    from shim.kernels.indexer import reference

    rows, device = 130, keys.device
    q = torch.randn(rows, heads, reference.DIM, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, heads, device=device)
    k, k_scale = keys.flatten(0, 1), scales.flatten()
    ke = torch.arange(k.shape[0] - rows, k.shape[0], device=device, dtype=torch.int32) + 1
    ks = torch.full_like(ke, 100)
    expected = reference.mqa_logits(q, k, k_scale, weights, ks, ke)
    function, query = _function(deep_gemm, "mqa_logits", q)
    if not _takes(function, "max_seqlen_k"):
        return _error(function(query, (k, k_scale), weights, ks, ke, clean_logits=False), expected)
    widest = int((ke - ks).max())  # 0.33: row i begins at its key ks[i]
    theirs = function(query, (k, k_scale), weights, ks, ke, widest).float()
    column = ks[:, None].long() + torch.arange(widest, device=device)
    expected = expected.gather(1, column.clamp(max=k.shape[0] - 1)).masked_fill(column >= ke[:, None], -torch.inf)
    return _error(theirs[:, :widest], expected)


def _paged_error(deep_gemm: Any, heads: int, keys: Any, scales: Any, next_n: int) -> float:
    """Of 4 requests with `next_n` query rows each; one is as long as its blocks, the others end near a block's edge."""
    import torch

    from shim.kernels.indexer import reference

    device = keys.device
    cache = reference.pack_blocks(keys, scales)
    table = torch.randperm(keys.shape[0], device=device).to(torch.int32).view(4, -1)
    max_len = table.shape[1] * reference.BLOCK
    q = torch.randn(4, next_n, heads, reference.DIM, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(4 * next_n, heads, device=device)
    lens = torch.tensor([max_len, 65, 64, 2], device=device, dtype=torch.int32)
    function, query = _function(deep_gemm, "paged_mqa_logits", q)
    if isinstance(query, tuple):
        lens = lens[:, None] - next_n + 1 + torch.arange(next_n, device=device, dtype=torch.int32)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, reference.BLOCK, num_sms)
    clean = {"clean_logits": False} if _takes(function, "clean_logits") else {}
    theirs = function(query, cache.unsqueeze(-2), weights, lens, table, schedule, max_model_len=max_len, **clean)
    return _error(theirs, reference.paged_mqa_logits(q, cache, weights, lens, table, max_len))


def _function(deep_gemm: Any, name: str, q: Any) -> tuple[Any, Any]:
    """The release's function, and the query as it takes it: from 0.20 on with a scale, which is None for fp8."""
    if hasattr(deep_gemm, f"fp8_fp4_{name}"):
        return getattr(deep_gemm, f"fp8_fp4_{name}"), (q, None)
    return getattr(deep_gemm, f"fp8_{name}"), q


def _error(theirs: Any, expected: Any) -> float:
    """max |theirs - expected| / max |expected| where `expected` is not -inf; infinite where one of theirs is NaN."""
    valid = expected > float("-inf")
    error: float = ((theirs - expected)[valid].abs().max() / expected[valid].abs().max()).item()
    return error if error == error else float("inf")


def _takes(function: Any, name: str) -> bool:
    """Has `function` a parameter of this name?"""
    return name in function.__code__.co_varnames[: function.__code__.co_argcount]


if __name__ == "__main__":
    process.answer_parent(_answer)
