"""On a GPU: a random GLM-5 with real head sizes, served by each sparse MLA backend; are ours and the native ones one
model?

    python tests/gpu/backends.py [--heads 64] [--tp 1] [--only ours,native,...] [--jobs batch,long]

Every engine runs in a process of its own, several at a time, on the same GGUF, through the shim. The noise floor is
what the two native backends differ by; a random model amplifies rounding, so only ratios to it mean something. The
natives take their top-k path for every prompt (`sparse_mla_force_mqa`; up to top-k tokens they would share one dense
prefill and differ by nothing). Prints a table, exit 1 if a gate fails.
"""

from __future__ import annotations

import argparse
import itertools
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

ROOT = Path(__file__).parents[2]
VOCAB = 512
LENGTHS = (300, 2047, 2049, 6000, 20000)
STEPS = 1000
OURS, FA3, FLASHMLA = "TRITON_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"
ASSUME = {"GLM5_SHIM_ASSUME_CAPABILITY": "12.0"}


def child(request: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        max_logprobs=-1,
        max_model_len=24576,
        max_num_batched_tokens=4096,
        max_num_seqs=32,
        gpu_memory_utilization=0.03,  # engines share the card
        kv_cache_memory_bytes=2 << 30,
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
            flat_logprobs=True,
        )
        return llm.generate(what, parameters, use_tqdm=False)

    def table(flat: Any, first: int = 0) -> np.ndarray:
        """Log-probabilities [positions from `first` on, VOCAB]."""
        rows = np.full((len(flat) - first, VOCAB), -np.inf, dtype=np.float32)
        for at in range(first, len(flat)):
            entry = slice(flat.start_indices[at], flat.end_indices[at])
            rows[at - first, flat.token_ids[entry]] = flat.logprobs[entry]
        return rows

    for length in LENGTHS:
        found[f"teacher/{length}"] = table(ask(prompts([length]), 1, teacher=True)[0].prompt_logprobs, 1)
    mixed = prompts(rng.integers(20, 4500, 16))
    long = prompts([1500])[0]
    if "batch" in request["jobs"]:
        for name, groups in (("alone", [[p] for p in mixed]), ("together", [mixed]), ("again", [mixed])):
            if name != "again":
                llm.reset_prefix_cache()
            answers = [o for group in groups for o in ask(group, 8, logprobs=VOCAB)]
            for number, output in enumerate(answers):
                found[f"{name}/{number}"] = table(output.outputs[0].logprobs)
                found[f"{name}/{number}/tokens"] = np.array(output.outputs[0].token_ids)
    if "long" in request["jobs"]:
        answer = ask([long], STEPS, logprobs=VOCAB)[0].outputs[0]
        found["long/tokens"] = np.array(answer.token_ids)
        found["long/logprobs"] = table(answer.logprobs)
        # the same tokens, teacher-forced: what a decode step by step must agree with
        forced = [{"prompt_token_ids": long["prompt_token_ids"] + list(answer.token_ids)}]
        llm.reset_prefix_cache()
        found["long/forced"] = table(ask(forced, 1, teacher=True)[0].prompt_logprobs, 1)[-STEPS:]
    np.savez(request["out"], **found)
    if request["engine"]["tensor_parallel_size"] > 1:  # Python's end may abort beside NCCL's threads, whatever backend
        llm.llm_engine.engine_core.shutdown()
        sys.stdout.flush()
        os._exit(0)


def run(model: Path, place: Path, name: str, jobs: list[str], env: dict[str, str], engine: dict[str, Any]) -> Any:
    request = {"model": str(model), "jobs": jobs, "out": str(place / f"{name}.npz"), "engine": engine}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if engine["tensor_parallel_size"] > 1 else "0",
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
    graphs = re.findall(r"Capturing CUDA graphs \(([^)]*)\)", done.stdout)
    for line in re.findall(
        r"glm5-shim: (indexer logits.*)|((?:topk|sparse_mla|indexer) compiled a variant.*)", done.stdout
    ):
        print(f"[{name}] {''.join(line)}")
    print(f"[{name}] exit {done.returncode}, backends {sorted(set(chosen))}, graphs {sorted(set(graphs))}", flush=True)
    if done.returncode:
        print(done.stdout[-5000:], flush=True)
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
    parser.add_argument("--jobs", default="", help="batch,long")
    parser.add_argument("--natives", default=f"{FA3},{FLASHMLA}")
    parser.add_argument("--only", default="ours,native,native2")
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0

    from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf

    jobs = [job for job in arguments.jobs.split(",") if job]
    first, second = arguments.natives.split(",")
    alone = [job for job in jobs if job == "long"]
    # name: what vLLM is told, the environment, the jobs; "a b" runs after "a" and shares its compiled code
    force = {"attention_config": {"sparse_mla_force_mqa": True}} if _can_force() else {}
    graphless = {"compilation_config": {"cudagraph_mode": "NONE"}}
    native_indexer, our_indexer = {"GLM5_SHIM_INDEXER": "native"}, {"GLM5_SHIM_INDEXER": "triton"}
    engines: dict[str, tuple[dict[str, Any], dict[str, str], list[str]]] = {
        "ours": ({}, ASSUME | native_indexer, jobs),
        "ours graphless": (graphless, ASSUME | native_indexer, alone),
        "native": ({"attention_backend": first} | force, {}, jobs),
        "native graphless": ({"attention_backend": first} | force | graphless, {}, alone),
        "native2": ({"attention_backend": second} | force, {}, []),
        "native fp8": ({"attention_backend": FLASHMLA, "kv_cache_dtype": "fp8"} | force, {}, []),
        "ours fp8": ({"kv_cache_dtype": "fp8"}, ASSUME | native_indexer, []),
        "auto": ({}, ASSUME, []),  # the probe decides
        "shim": ({}, ASSUME | our_indexer, jobs),
        "shim graphless": (graphless, ASSUME | our_indexer, alone),
        "shim fp8": ({"kv_cache_dtype": "fp8"}, ASSUME | our_indexer, []),
    }
    wanted = arguments.only.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(os.environ.get("OUT_DIR", scratch))
        shape = Shape(vocab=VOCAB, hidden=1024, ffn=1024, heads=arguments.heads, q_lora=512, topk=2048, nextn=0)
        model = write_gguf(place / "model", "random", tiny_metadata(shape, "random"), tiny_tensors(shape, 0, "bf16"))

        def chain(root: str) -> dict[str, Any]:
            found = {}
            for name in (name for name in wanted if name == root or name == f"{root} graphless"):
                engine, env, what = engines[name]
                engine = engine | {"tensor_parallel_size": arguments.tp}
                env = env | {"VLLM_CACHE_ROOT": str(place / f"vllm-{root}".replace(" ", "-"))}
                found[name] = run(model, place, name, what, env, engine)
            return found

        roots = [name for name in wanted if not name.endswith(" graphless")]
        with ThreadPoolExecutor(len(roots)) as pool:
            runs = {name: found for each in pool.map(chain, roots) for name, found in each.items()}
        return judge(runs)


def _can_force() -> bool:
    """0.24 to 0.33 have the option; up to 0.23 every prompt takes the top-k path."""
    from vllm.config.attention import AttentionConfig

    return "sparse_mla_force_mqa" in AttentionConfig.__dataclass_fields__


def judge(runs: dict[str, Any]) -> int:
    failed = [name for name, found in runs.items() if found is None]
    runs = {name: found for name, found in runs.items() if found is not None}
    ok = not failed

    def gate(what: str, value: float, limit: float) -> None:
        nonlocal ok
        good = value <= limit
        ok &= good
        print(f"{'ok  ' if good else 'FAIL'} {what}: {value:.3g} (limit {limit:.3g})")

    def between(a: str, b: str, length: int) -> float:
        return kl(runs[a][f"teacher/{length}"], runs[b][f"teacher/{length}"])

    print("\nmean KL of prompt log-probabilities")
    floors = {n: between("native", "native2", n) for n in LENGTHS} if {"native", "native2"} <= set(runs) else {}
    for length in LENGTHS:
        floor = floors.get(length)
        if floor is not None:
            print(f"floor, the natives at {length} tokens: {floor:.3g}")
        for name, native in itertools.product(("ours", "shim", "auto"), ("native", "native2")):
            if {name, native} <= set(runs):
                what, value = f"{length} tokens, {name} against {native}", between(native, name, length)
                if floor is not None:
                    gate(what, value, 2 * floor)
                else:
                    print(f"     {what}: {value:.3g} (one native backend: no floor)")
    bf16 = "native2" if "native2" in runs else "native"
    if {bf16, "native fp8"} <= set(runs):
        for name in (n for n in ("ours fp8", "shim fp8") if n in runs):
            spread = between(bf16, "native fp8", LENGTHS[3])
            gate(f"{LENGTHS[3]} tokens, {name} against native fp8", between("native fp8", name, LENGTHS[3]), spread)
    for name in (n for n in ("ours", "shim") if n in runs):
        chosen = f"Using {OURS} attention backend" in runs[name]["log"]
        ok &= chosen
        print(f"{'ok  ' if chosen else 'FAIL'} {name} chosen without a flag: {chosen}")
    for name, found in runs.items():
        if "alone/0" in found:
            for how in ("together", "again"):
                each = [kl(found[f"alone/{i}"][:1], found[f"{how}/{i}"][:1]) for i in range(16)]
                same = np.mean([(found[f"alone/{i}/tokens"] == found[f"{how}/{i}/tokens"]).mean() for i in range(16)])
                print(f"{name}: 16 requests {how} against alone, first token: mean KL {np.mean(each):.3g}, "
                      f"worst {max(each):.3g}; greedy tokens equal {same:.3f}")  # fmt: skip
                if name != "native" and floors:
                    gate(f"{name}, {how}, mean", float(np.mean(each)), max(floors.values()))
        if "long/tokens" in found:
            drift = kl(found["long/forced"], found["long/logprobs"])
            finite = bool(np.isfinite(found["long/logprobs"]).all())
            found["drift"] = drift
            ok &= finite
            print(f"{name}: {STEPS} decode steps against the same tokens as a prompt: KL {drift:.3g}, finite {finite}")
    for name in (n for n in ("ours", "shim") if n in runs and "drift" in runs[n] and "drift" in runs.get("native", {})):
        gate(
            f"{name}: drift of {STEPS} steps against twice the native's",
            runs[name]["drift"],
            2 * runs["native"]["drift"],
        )
    for name in (n for n in runs if f"{n} graphless" in runs and "long/tokens" in runs[n]):
        graphs, eager = runs[name], runs[f"{name} graphless"]
        tokens = float((graphs["long/tokens"] == eager["long/tokens"]).mean())
        bits = float((graphs["long/logprobs"] == eager["long/logprobs"]).all(-1).mean())
        print(
            f"{name}: graphs and no graphs: {tokens:.3f} of {STEPS} greedy tokens equal, {bits:.3f} of steps bit-equal"
        )
    print("OK" if ok else "NOT OK", "failed runs:" if failed else "", *failed)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
