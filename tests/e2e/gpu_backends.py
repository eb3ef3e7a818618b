"""On a GPU: a random GLM-5 with real head sizes, served by each sparse MLA backend; are ours and the native ones one
model?

    python tests/e2e/gpu_backends.py [--heads 64] [--tp 1] [--quick]

Every engine runs in a child process, on the same GGUF, through the shim. The noise floor is what the two native
backends differ by; a random model amplifies rounding, so only ratios to it mean something. Prints a table, exit 1 if
a gate fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
VOCAB = 512
LENGTHS = (300, 2047, 2049, 6000)
OURS, FA3, FLASHMLA = "TRITON_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"


def child(request: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        max_logprobs=-1,
        max_model_len=8192,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        gpu_memory_utilization=0.5,
        seed=0,
        **request["engine"],
    )
    rng = np.random.default_rng(11)
    found: dict[str, np.ndarray] = {}

    def prompts(lengths: Any) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": rng.integers(0, 400, n).tolist()} for n in lengths]

    def ask(what: list[Any], tokens: int, teacher: bool = False, logprobs: int | None = None) -> list[Any]:
        parameters = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=VOCAB if teacher else None,
            logprobs=logprobs,
        )
        return llm.generate(what, parameters, use_tqdm=False)

    def table(entries: Any) -> np.ndarray:
        rows = np.full((len(entries), VOCAB), -np.inf, dtype=np.float32)
        for at, entry in enumerate(entries):
            for token, value in entry.items():
                rows[at, token] = value.logprob
        return rows

    for length, output in zip(LENGTHS, ask(prompts(LENGTHS), 1, teacher=True), strict=True):
        found[f"teacher/{length}"] = table(output.prompt_logprobs[1:])
    mixed = prompts(rng.integers(20, 4500, 16))
    long = prompts([1500])
    if "batch" in request["jobs"]:
        for name, groups in (("alone", [[p] for p in mixed]), ("together", [mixed]), ("again", [mixed])):
            if name != "again":
                llm.reset_prefix_cache()
            answers = [o for group in groups for o in ask(group, 8, logprobs=VOCAB)]
            for number, output in enumerate(answers):
                found[f"{name}/{number}"] = table(output.outputs[0].logprobs)
                found[f"{name}/{number}/tokens"] = np.array(output.outputs[0].token_ids)
    if "long" in request["jobs"]:
        answer = ask(long, 1000, logprobs=0)[0].outputs[0]
        found["long/tokens"] = np.array(answer.token_ids)
        found["long/logprobs"] = np.array(
            [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        )
        # the same tokens, teacher-forced: what a decode step by step must agree with
        forced = [{"prompt_token_ids": long[0]["prompt_token_ids"] + list(answer.token_ids)}]
        llm.reset_prefix_cache()
        found["long/forced"] = table(ask(forced, 1, teacher=True)[0].prompt_logprobs[1:])[-1000:]
    np.savez(request["out"], **found)


def run(
    model: Path, place: Path, name: str, backend: str | None, jobs: list[str], env: dict[str, str], **engine: Any
) -> Any:
    request = {"model": str(model), "jobs": jobs, "out": str(place / f"{name}.npz"), "engine": engine}
    if backend:
        request["engine"]["attention_backend"] = backend
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if engine.get("tensor_parallel_size", 1) > 1 else "0",
        "GLM5_SHIM_STATE_DIR": str(place / f"state-{name}"),
        "GLM5_SHIM_CACHE_DIR": str(place / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **env,
    }
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(request)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (place / f"{name}.log").write_text(done.stdout)
    chosen = re.findall(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend", done.stdout)
    print(f"[{name}] exit {done.returncode}, backends in the log: {sorted(set(chosen))}", flush=True)
    if done.returncode:
        print(done.stdout[-6000:], flush=True)
        return None
    return dict(np.load(place / f"{name}.npz")) | {"log": done.stdout}


def kl(p: np.ndarray, q: np.ndarray) -> float:
    p, q = p.astype(np.float64), q.astype(np.float64)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="choice and KL only")
    parser.add_argument("--natives", default=f"{FA3},{FLASHMLA}")
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0

    from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(os.environ.get("OUT_DIR", scratch))
        shape = Shape(vocab=VOCAB, hidden=1024, ffn=1024, heads=arguments.heads, q_lora=512, topk=2048, nextn=0)
        model = write_gguf(place / "model", "random", tiny_metadata(shape, "random"), tiny_tensors(shape, 0, "bf16"))
        tp = {"tensor_parallel_size": arguments.tp}
        full = [] if arguments.quick else ["batch", "long"]
        assume = {"GLM5_SHIM_ASSUME_CAPABILITY": "12.0"}
        first, second = arguments.natives.split(",")
        runs = {
            "ours": run(model, place, "ours", None, full, assume, **tp),
            "native": run(model, place, "native", first, ["long"] if full else [], {}, **tp),
            "native2": run(model, place, "native2", second, [], {}, **tp),
            "native fp8": run(model, place, "native_fp8", FLASHMLA, [], {}, kv_cache_dtype="fp8", **tp),
            "ours fp8": run(model, place, "ours_fp8", None, [], assume, kv_cache_dtype="fp8", **tp),
        }
        if full:
            runs["ours eager"] = run(model, place, "ours_eager", None, ["long"], assume, enforce_eager=True, **tp)
        return judge(runs, full)


def judge(runs: dict[str, Any], full: list[str]) -> int:
    failed = [name for name, found in runs.items() if found is None]
    ok = not failed

    def gate(what: str, value: float, limit: float) -> None:
        nonlocal ok
        good = value <= limit
        ok &= good
        print(f"{'ok  ' if good else 'FAIL'} {what}: {value:.3g} (limit {limit:.3g})")

    def between(a: str, b: str, length: int) -> float:
        return kl(runs[a][f"teacher/{length}"], runs[b][f"teacher/{length}"])

    # Up to top-k tokens both natives run one and the same dense prefill and differ by nothing; the floor of two sparse
    # kernels shows in the longest prompt only.
    print("\nmean KL of prompt log-probabilities")
    if not {"native", "native2", "ours"} & set(failed):
        floor = between("native", "native2", LENGTHS[-1])
        print(f"floor, the natives at {LENGTHS[-1]} tokens: {floor:.3g}")
        for length in LENGTHS:
            for native in ("native", "native2"):
                gate(f"{length} tokens, ours against {native}", between(native, "ours", length), 2 * floor)
    if not {"native2", "native fp8", "ours fp8"} & set(failed):
        spread = between("native2", "native fp8", LENGTHS[-1])
        gate("fp8, ours against native, longest", between("native fp8", "ours fp8", LENGTHS[-1]), spread)
    if "ours" not in failed:
        log = runs["ours"]["log"]
        chosen = f"Using {OURS} attention backend" in log
        ok &= chosen
        print(f"{'ok  ' if chosen else 'FAIL'} chosen without a flag: {chosen}")
    if full and "ours" not in failed:
        ours = runs["ours"]
        for name in ("together", "again"):
            worst = max(kl(ours[f"alone/{i}"][:1], ours[f"{name}/{i}"][:1]) for i in range(16))
            gate(f"16 requests {name} against alone, first token, worst KL", worst, max(floor, 1e-6))
        for name in ("ours", "native", "ours eager"):
            found = runs[name]
            forced = found["long/forced"]
            said = forced[np.arange(1000), found["long/tokens"]]
            drift = float(np.abs(said - found["long/logprobs"]).mean())
            print(f"  {name}: 1,000 decode steps against the same tokens as a prompt, mean |d logprob| {drift:.3g}")
            found["drift"] = drift
        gate("1,000 decode steps, ours against the native run's own drift", ours["drift"], 2 * runs["native"]["drift"])
        finite = bool(np.isfinite(ours["long/logprobs"]).all())
        ok &= finite
        eager = runs["ours eager"]
        same = float((ours["long/tokens"] == eager["long/tokens"]).mean())
        print(f"  finite: {finite}; graphs and eager agree on {same:.3f} of 1,000 greedy tokens")
    print("OK" if ok else "NOT OK", "failed runs:" if failed else "", *failed)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
