"""Does the release's own DeepGEMM score keys right on this GPU? A child process is asked, once per machine.

A kernel for the wrong architecture may raise, answer nonsense, or hang, and none of that may happen in a worker. The
cache directory keeps the answer, under a key of everything that it depends on. A child that gave no answer (it took too
long, or the GPU had no memory left) proves nothing: this server uses our kernels, and the next one asks again.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from shim import env, process

TIMEOUT_S = 180.0  # DeepGEMM compiles with nvcc on its first call
TOLERANCE = 1e-3  # relative to the largest logit. Both sides see the same fp8 numbers
NO_MEMORY = ("out of memory", "OutOfMemory", "CUBLAS_STATUS_ALLOC_FAILED")


def deep_gemm_directory() -> Path | None:
    """Where the DeepGEMM lies that vLLM will load, by vLLM's own order: a package of the user, then the wheel's."""
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the parent is missing
            continue
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def has_sm120_kernels(directory: Path) -> bool:
    """DeepGEMM compiles at run time from the sources it carries. Releases without SM120 (the wheels of 0.20 to 0.24
    and 0.27) have no `sm120_*` among them, the others have."""
    return any(directory.glob("include/deep_gemm/impls/sm120_*"))


def native_works(heads: int) -> tuple[bool, str]:
    """(may DeepGEMM score GLM-5's keys on this worker's GPU?, why)."""
    directory = deep_gemm_directory()
    if directory is None:
        return False, "there is no DeepGEMM"
    if not has_sm120_kernels(directory):
        return False, "this release's DeepGEMM has no SM120 kernels"
    import torch

    device = torch.cuda.current_device()
    key = _key(directory, heads, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    path = env.cache_dir() / "indexer" / f"{sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    with _one_at_a_time(path):
        kept = _read(path)
        if kept is None:
            works, because, lasting = _ask(device, heads)
            kept = {"works": works, "because": because, "key": key}
            if lasting:
                _write(path, kept)
    return bool(kept["works"]), str(kept["because"])


def _key(directory: Path, heads: int, gpu: str, capability: tuple[int, int]) -> dict[str, Any]:
    binaries = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(directory.glob("*.so"))]
    return {
        "shim": process.identity(),
        "vllm": importlib.metadata.version("vllm"),
        "torch": importlib.metadata.version("torch"),
        "deep_gemm": [str(directory), binaries],
        "gpu": [gpu, list(capability)],
        "heads": heads,
    }


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """The workers of one server come here together: the first one asks, and the others read its answer."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115  (closed below)
    except OSError:  # unwritable: everybody asks
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and {"works", "because"} <= set(kept) else None


def _write(path: Path, kept: dict[str, Any]) -> None:
    """In one rename. Where nothing can be written the next server asks again."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        fresh.write_text(json.dumps(kept))
        fresh.replace(path)
    except OSError:
        pass


def _ask(device: int, heads: int) -> tuple[bool, str, bool]:
    """(works?, why, will the next child say the same?), from a child without the shim."""
    question = {"device": device, "heads": heads}
    try:
        worst = float(process.ask_child(__name__, question, os.environ | {"GLM5_SHIM_OFF": "1"}, TIMEOUT_S))
    except process.ChildProblem as problem:
        if problem.exit_code is None:
            return False, f"DeepGEMM did not answer within {TIMEOUT_S:.0f} s", False
        lasting = not any(word in str(problem) for word in NO_MEMORY)
        return False, f"DeepGEMM failed on this GPU (exit {problem.exit_code}): {problem}", lasting
    return worst < TOLERANCE, f"DeepGEMM's logits on this GPU are within {worst:.1e} of the reference", True


def _answer(question: dict[str, int]) -> str:
    """In the child: the worst relative error of the release's prefill and paged logits. As text: JSON has no inf."""
    import torch

    device = question["device"]
    torch.cuda.set_device(device)
    return str(worst_error(question["heads"], torch.device("cuda", device)))


def worst_error(heads: int, device: Any, blocks: int = 80) -> float:
    """max |theirs - reference| / max |reference| over prefill, and decode of 1 and 2 tokens a request; NaN counts as
    infinite. `blocks` (a multiple of 4): how many of 64 keys there are."""
    import torch
    from vllm.utils import deep_gemm as installed

    from shim.kernels.indexer import reference

    deep_gemm: Any = installed  # its functions differ from release to release
    torch.manual_seed(0)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    tuple_q = hasattr(deep_gemm, "fp8_fp4_mqa_logits")  # 0.20 and later
    rows = 130

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(torch.float8_e4m3fn)

    keys, scales = fp8(blocks, reference.BLOCK, reference.DIM), torch.rand(blocks, reference.BLOCK, device=device)
    asked: Any  # q as this release wants it
    worst = 0.0

    def judge(theirs: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal worst
        valid = expected > -torch.inf
        error = ((theirs - expected)[valid].abs().max() / expected[valid].abs().max()).item()
        worst = max(worst, error if error == error else float("inf"))

    q, weights = fp8(rows, heads, reference.DIM), torch.randn(rows, heads, device=device)
    k, k_scale = keys.flatten(0, 1), scales.flatten()
    ke = torch.arange(k.shape[0] - rows, k.shape[0], device=device, dtype=torch.int32) + 1
    ks = torch.full_like(ke, 100)
    expected = reference.mqa_logits(q, k, k_scale, weights, ks, ke)
    if tuple_q:
        function, asked = deep_gemm.fp8_fp4_mqa_logits, (q, None)
    else:
        function, asked = deep_gemm.fp8_mqa_logits, q
    if _takes(function, "max_seqlen_k"):  # 0.33: row i begins at column 0
        widest = int((ke - ks).max())
        theirs = function(asked, (k, k_scale), weights, ks, ke, widest).float()
        column = ks[:, None].long() + torch.arange(widest, device=device)
        past = column >= ke[:, None]
        shifted = expected.gather(1, column.clamp(max=k.shape[0] - 1)).masked_fill(past, -torch.inf)
        judge(theirs[:, :widest], shifted)
    else:
        judge(function(asked, (k, k_scale), weights, ks, ke, clean_logits=False), expected)

    cache = reference.pack_blocks(keys, scales)
    table = torch.randperm(blocks, device=device).to(torch.int32).view(4, -1)
    max_len = table.shape[1] * reference.BLOCK
    function = deep_gemm.fp8_fp4_paged_mqa_logits if tuple_q else deep_gemm.fp8_paged_mqa_logits
    for next_n in (1, 2):
        q, weights = fp8(4, next_n, heads, reference.DIM), torch.randn(4 * next_n, heads, device=device)
        lens = torch.tensor([max_len, 65, 64, 2], device=device, dtype=torch.int32)
        if tuple_q:
            lens = lens[:, None] - next_n + 1 + torch.arange(next_n, device=device, dtype=torch.int32)
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, reference.BLOCK, num_sms)
        clean = {"clean_logits": False} if _takes(function, "clean_logits") else {}
        asked = (q, None) if tuple_q else q
        theirs = function(asked, cache.unsqueeze(-2), weights, lens, table, schedule, max_model_len=max_len, **clean)
        judge(theirs, reference.paged_mqa_logits(q, cache, weights, lens, table, max_len))
    return worst


def _takes(function: Any, name: str) -> bool:
    return name in function.__code__.co_varnames[: function.__code__.co_argcount]


if __name__ == "__main__":
    process.answer_parent(_answer)
