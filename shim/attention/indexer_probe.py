"""Does the release's own DeepGEMM score keys right on this GPU? Asked in a child process, answered once per machine.

A kernel for the wrong architecture may raise, answer nonsense, or hang: none of that may happen in a worker. The
answer is kept in the cache directory, keyed by everything that it depends on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from shim import env

TIMEOUT_S = 180.0  # DeepGEMM compiles with nvcc on its first call
TOLERANCE = 1e-3  # relative to the largest logit; both sides see the same fp8 numbers
MARK = "glm5-shim-probe "


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
    kept = _read(path)
    if kept is None:
        works, because = _ask(device, heads)
        kept = {"works": works, "because": because, "key": key}
        _write(path, kept)
    return bool(kept["works"]), str(kept["because"])


def _key(directory: Path, heads: int, gpu: str, capability: tuple[int, int]) -> dict[str, Any]:
    binaries = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(directory.glob("*.so"))]
    return {
        "vllm": importlib.metadata.version("vllm"),
        "deep_gemm": [str(directory), binaries],
        "gpu": [gpu, list(capability)],
        "heads": heads,
    }


def _read(path: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and {"works", "because"} <= set(kept) else None


def _write(path: Path, kept: dict[str, Any]) -> None:
    """Whole or not at all: workers of one server may do this at the same time. Unwritable: asked again each time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as fresh:
            json.dump(kept, fresh)
        os.replace(fresh.name, path)
    except OSError:
        pass


def _ask(device: int, heads: int) -> tuple[bool, str]:
    """Runs `main` in a child without the shim, and ends the child and its compilers after TIMEOUT_S."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"from shim.attention.indexer_probe import main; main({device}, {heads})"],
        env=os.environ | {"GLM5_SHIM_OFF": "1"},
        cwd=Path(__file__).parents[2],  # where `shim` is: -c looks there first
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return False, f"DeepGEMM did not answer within {TIMEOUT_S:.0f} s"
    answers = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
    if child.returncode or not answers:
        last = (said.strip().splitlines() or ["nothing said"])[-1]
        return False, f"DeepGEMM failed on this GPU (exit {child.returncode}): {last[:200]}"
    worst = float(answers[-1])
    return worst < TOLERANCE, f"DeepGEMM's logits on this GPU are within {worst:.1e} of the reference"


def main(device: int, heads: int) -> None:
    """In the child: prints the worst relative error of the release's prefill and paged logits on `device`."""
    import torch

    torch.cuda.set_device(device)
    print(f"{MARK}{worst_error(heads, torch.device('cuda', device))}", flush=True)


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
