"""On a GPU: a plain and a shimmed run of one model in one cache directory each compile graphs of their own.

    python tests/gpu/compile_cache.py

Run without PYTHONPATH to the shim. The model is a directory with a config.json and no weights (`load_format="dummy"`),
which unmodified vLLM serves too. Plain, shimmed, plain, shimmed: the last two must find what the first two compiled,
and answer the same. Exit 1 if not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def child(model: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
        seed=0,
    )
    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": list(range(10, 60))}], parameters, use_tqdm=False)
    print("answer", json.dumps(list(answer.outputs[0].token_ids)), flush=True)


def write_config(directory: Path) -> Path:
    from shim.gguf.config import hf_config
    from shim.gguf.files import open_model
    from shim.gguf.tiny import write_tiny

    model = directory / "model"
    model.mkdir()
    # the natives take no top-k below 128
    config = hf_config(open_model(write_tiny(directory / "gguf", topk=2048)))
    (model / "config.json").write_text(json.dumps(config))
    return model


def run(place: Path, name: str, model: Path, shimmed: bool) -> tuple[str, set[str], bool]:
    cache = place / "vllm"
    env = os.environ | {
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "GLM5_SHIM_STATE_DIR": str(place / "state"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if shimmed:
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        env["GLM5_SHIM_ASSUME_CAPABILITY"] = "12.0"
    command = [sys.executable, __file__, "--child", str(model)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=place)
    (place / f"{name}.log").write_text(done.stdout)
    # the whole model's graph where this vLLM keeps one; a loaded one gives its pieces a directory with a new name
    compiled = cache / "torch_compile_cache"
    compiled = next(compiled.glob("torch_aot_compile"), compiled)
    graphs = {rank.parent.name for rank in compiled.glob("*/rank_*") if rank.is_dir()}
    answer = re.findall(r"^answer (.*)$", done.stdout, re.MULTILINE)
    backends = sorted(set(re.findall(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend", done.stdout)))
    reused = "Directly load" in done.stdout
    print(
        f"[{name}] exit {done.returncode}, {backends}, graph directories {sorted(graphs)}, loaded from cache: {reused}"
    )
    if not answer:
        print(done.stdout[-4000:])
    return (answer[0] if answer else "none"), graphs, reused


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return 0
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(os.environ.get("OUT_DIR", scratch))
        model = write_config(place)
        plain, first, _ = run(place, "plain", model, False)
        shimmed, second, reused = run(place, "shimmed", model, True)
        plain2, third, plain_reused = run(place, "plain again", model, False)
        shimmed2, fourth, shimmed_reused = run(place, "shimmed again", model, True)
    checks = {
        "each run compiled a graph of its own": len(first) == 1 and len(second) == 2 and not reused,
        "the second runs made no other, and loaded theirs alike": second == third == fourth
        and plain_reused == shimmed_reused,
        "the same answers from cached graphs": plain == plain2 != "none" and shimmed == shimmed2 != "none",
    }
    for what, good in checks.items():
        print("ok  " if good else "FAIL", what)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
