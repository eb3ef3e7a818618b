"""On two GPUs: vLLM's own Ray executor under `glm5-shim wrap`, on a Ray that was started without the shim.

    python tests/gpu/ray_executor.py

Needs `ray`, and the shim installed as a wheel (its entry point is what switches workers on). The answers must be those
of vLLM's multiprocessing executor, and each worker must have written a ledger. Exit 1 if not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PORT = 6399
V2 = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def child(request: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        max_model_len=512,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
        tensor_parallel_size=2,
        distributed_executor_backend=request["executor"],
        enforce_eager=True,
        seed=0,
    )
    rng = np.random.default_rng(2)
    prompts = [{"prompt_token_ids": rng.integers(5, 900, n).tolist()} for n in (40, 200)]
    parameters = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    answers = [llm.generate([p], parameters, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    print("answer", json.dumps([list(a) for a in answers]), flush=True)


def run(place: Path, name: str, executor: str, model: Path, env: dict[str, str]) -> list[list[int]] | None:
    request = json.dumps({"model": str(model), "executor": executor})
    done = subprocess.run(
        [sys.executable, "-m", "shim.commands.cli", "wrap", sys.executable, __file__, "--child", request],
        env=env | {"GLM5_SHIM_STATE_DIR": str(place / f"state-{name}"), "VLLM_CACHE_ROOT": str(place / f"vllm-{name}")},
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (place / f"{name}.log").write_text(done.stdout)
    answer = re.findall(r"^answer (.*)$", done.stdout, re.MULTILINE)
    backends = sorted(set(re.findall(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend", done.stdout)))
    print(f"[{name}] exit {done.returncode}, backends {backends}", flush=True)
    for ledger in (json.loads(path.read_text()) for path in sorted((place / f"state-{name}").glob("*.json"))):
        states = [patch["state"] for patch in ledger["patches"]]
        used = sum(bool(patch.get("used")) for patch in ledger["patches"])
        who = " ".join(ledger["command"])[-60:]
        print(f"[{name}] {ledger['role']}: {states.count('applied')} applied, {used} used: {who}", flush=True)
    if done.returncode or not answer:
        print(done.stdout[-5000:], flush=True)
        return None
    found: list[list[int]] = json.loads(answer[0])
    return found


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return 0
    from shim.gguf.tiny import write_tiny

    bare = {k: v for k, v in os.environ.items() if not k.startswith("GLM5_SHIM")}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(os.environ.get("OUT_DIR", scratch))
        model = write_tiny(place / "model", mix="q8_0")  # 256 columns are one block of a K-quant: not to be halved
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
        head = ["start", "--head", f"--port={PORT}", "--num-gpus=2", "--num-cpus=8", "--include-dashboard=false"]
        head += ["--disable-usage-stats", "--object-store-memory=200000000"]
        subprocess.run([*ray, *head], env=bare, cwd=place, check=True)
        env = bare | {
            "GLM5_SHIM_ASSUME_CAPABILITY": "12.0",
            "GLM5_SHIM_CACHE_DIR": str(place / "cache"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        try:
            cluster = {"RAY_ADDRESS": f"127.0.0.1:{PORT}"}
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(run, place, "mp", "mp", model, env)
                answers = {
                    "ray": run(place, "ray", "ray", model, env | cluster | {V2: "0"}),
                    "ray v2": run(place, "ray-v2", "ray", model, env | cluster | {V2: "1"}),
                }
                expected = first.result()
        finally:
            subprocess.run([*ray, "stop", "--force"], env=bare)
    ok = expected is not None
    for name, found in answers.items():
        same = found is not None and found == expected
        ok &= same
        print(f"{'ok  ' if same else 'FAIL'} {name}: the answers of the multiprocessing executor: {same}")
    print("OK" if ok else "NOT OK")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
