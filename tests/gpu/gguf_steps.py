"""On a GPU: what does a step of GLM-5 take with GGUF weights, beside the same engine with weights of 16 bits?

    python tests/gpu/gguf_steps.py [--layers 13] [--share 8] [--only 16bit,ud,k,iq] [--tokens 8192] [--graphs off]

Run without PYTHONPATH to the shim, and without vllm-gguf-plugin. The shape is one rank's of tensor parallelism over
--share: one dense layer and MoE ones, random weights. ud: Q4_K gate and up, Q5_K down, Q8_0 rest; k: Q2_K, Q3_K, Q6_K;
iq: IQ3_XXS, IQ4_XS, Q6_K. Each engine runs through the shim, alone on the GPU, in a process of its own: a prefill of
8,192 tokens (steps of --tokens), and decode steps of 1 and 16 requests of 8,000 tokens, medians as in steps.py. Prints
ms, the ratio to 16 bits, what the engine logs of loading, and the kernels of traced
steps. Exit 1 if an engine fails. OUT_DIR keeps logs and results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KINDS = ("16bit", "ud", "k", "iq")


def child(request: dict[str, Any]) -> None:
    import steps
    import torch
    import vllm
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = steps.fill  # type: ignore[assignment, method-assign]
    begin = time.perf_counter()
    llm = vllm.LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=16384,
        max_num_batched_tokens=request["tokens"],
        max_num_seqs=max(steps.BATCHES),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.8,
        kv_cache_memory_bytes=request["layers"] << 29,
        seed=0,
        enforce_eager=request["eager"],
        **({"load_format": "dummy"} if request["kind"] == "16bit" else {}),
    )
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "vllm": vllm.__version__}
    found["start_s"] = time.perf_counter() - begin
    found["quantization"] = str(llm.llm_engine.vllm_config.model_config.quantization)
    run = steps.Steps(llm.llm_engine, request["vocab"])
    found["times"] = {"prefill": run.timed_prefill()} | {f"decode {n}": run.timed_decode(n) for n in steps.BATCHES}
    out = Path(request["out"])
    out.write_text(json.dumps(found))
    traces = {}
    for batch in steps.BATCHES:
        run.decode(batch, steps.STEPS)
        path = out.with_suffix(f".decode{batch}.json.gz")
        traces[f"decode {batch}"] = run.traced(path, steps.STEPS, lambda: run.step(steps.STEPS), set())["kernels"]
        run.drain()
    run.add(1, steps.PREFILL, 1)
    traces["prefill"] = run.traced(out.with_suffix(".prefill.json.gz"), 1, run.drain, set())["kernels"]
    out.write_text(json.dumps(found | {"traces": traces}))


def engine(scratch: Path, request: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    out = Path(request["out"])
    env = os.environ | {
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "GLM5_SHIM_STATE_DIR": str(scratch / "state"),
        "GLM5_SHIM_CACHE_DIR": str(scratch / "cache"),
        "GLM5_SHIM_ASSUME_CAPABILITY": "12.0",
        "GLM5_SHIM_INDEXER": "triton",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    log = out.with_suffix(".log")
    with log.open("w") as file:
        command = [sys.executable, __file__, "--child", json.dumps(request)]
        try:
            status: Any = subprocess.run(
                command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=scratch, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"after {timeout:.0f} s"
    text = log.read_text(errors="replace")
    notes = r"glm5-shim: (?:weights loaded|kernels of).*|Model loading took.*|\w+ compiled a variant after.*"
    print(f"[{out.stem}] exit {status}", *re.findall(notes, text), sep="\n  ", flush=True)
    if status or not out.exists():
        print(text[-4000:], flush=True)
    return json.loads(out.read_text()) if out.exists() else None


def show(found: dict[str, dict[str, Any]]) -> None:
    base = found.get("16bit", {}).get("times")
    for what in next(iter(found.values()))["times"]:
        cells = []
        for kind, one in found.items():
            ms = one["times"][what]["ms"]
            cells.append(f"{kind} {ms:.3f}" + (f" ({ms / base[what]['ms']:.2f}x)" if base and kind != "16bit" else ""))
        print(f"{what:12s}" + "   ".join(cells))
    for kind, one in found.items():
        for what, kernels in one.get("traces", {}).items():
            print(f"\n{kind}: {what}, us of a step (launches)")
            for name in sorted(kernels, key=lambda name: -kernels[name][1])[:12]:
                print(f"  {kernels[name][1]:10.1f} ({kernels[name][0]:6.1f})  {name[:90]}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--share", type=int, choices=(1, 2, 4, 8), default=8)
    parser.add_argument("--only", default="16bit,ud,iq", help="some of " + ",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a step")
    parser.add_argument("--graphs", choices=("on", "off"), default="on")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one engine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    sys.path[:0] = [str(ROOT), str(HERE)]
    from gguf_real_size import VOCAB, rank_share, write_shape
    from steps import model_config

    kinds = arguments.only.split(",")
    if not {*kinds} <= {*KINDS}:
        parser.error("--only is of " + ",".join(KINDS))
    shape, vocab = rank_share(arguments.layers, arguments.share), VOCAB // arguments.share
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        place = Path(os.environ.get("OUT_DIR", scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        for kind in kinds:
            begin = time.monotonic()
            if kind == "16bit":
                model, size = scratch / "model", 0
                model.mkdir()
                config = model_config(arguments.layers, arguments.share) | {"first_k_dense_replace": 1}
                (model / "config.json").write_text(json.dumps(config))
            else:
                model, size = write_shape(scratch / kind, shape, kind, vocab)
                print(f"wrote {size / 1e9:.1f} GB in {time.monotonic() - begin:.0f} s", flush=True)
            request = {"kind": kind, "model": str(model), "vocab": vocab, "layers": arguments.layers}
            request |= {"tokens": arguments.tokens, "eager": arguments.graphs == "off"}
            result = engine(scratch, request | {"out": str(place / f"gguf-{kind}.json")}, arguments.timeout)
            if size:
                model.unlink()
            if result is not None:
                found[kind] = result
    if found:
        show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    quantised = all(one["quantization"] == "glm5_gguf" for kind, one in found.items() if kind != "16bit")
    return 0 if len(found) == len(kinds) and quantised else 1


if __name__ == "__main__":
    sys.exit(main())
