"""On a GPU: a GLM-5 GGUF served with its weights quantised, against answers computed elsewhere.

    python tests/gpu/gguf_weights.py --oracle DIR [--jobs ours64,ours2048,native2048] [--dtype bfloat16] [--tokens 64]
    python tests/gpu/gguf_weights.py --mtp
    python tests/gpu/gguf_weights.py --big [--gigabytes 10] [--tp 2 [--expert-parallel]]

Every engine runs in a child process, through the shim. DIR holds `*-00001-of-*.gguf`, tokens300.json, hf_deq_mix.npz
(top-k 64) and hf_deqmix_dense.npz (top-k 2048), each with `logits` [300, vocab]. `ours`: the shim's backend and
indexer, the card counted as 12.0; `native`: the card's own. --tokens 64 keeps to the kernels for
few tokens, 512 takes those for many. Prints KL and argmax agreement, exit 1 if a gate fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
JOBS = ("ours64", "ours2048", "native2048")  # the native backends take no top-k of 64: whole blocks of 128
# KL from the reference, argmax agreement, and how far from attending to every token (only where top-k selects).
# The indexer's fp8 alone costs KL 0.03 at top-k 64; activations rounded to 8 bits by the GGUF kernels another 0.015.
GATES = {"64": (0.05, 0.85, (0.15, 0.3)), "2048": (0.01, 0.93, None)}
MTP = {"method": "mtp", "num_speculative_tokens": 1}


def child(request: dict[str, Any]) -> None:
    memory = Memory()
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm = LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        max_logprobs=-1,
        gpu_memory_utilization=0.03,  # engines share the card
        kv_cache_memory_bytes=1 << 30,
        seed=0,
        disable_log_stats=False,
        **{"max_num_seqs": 8, **request["engine"]},
    )
    found: dict[str, Any] = {"ready_s": time.monotonic() - started, "anonymous_gib": memory.peak_gib()}
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    if "teacher" in request:
        settings = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=vocab)
        (output,) = llm.generate([{"prompt_token_ids": request["teacher"]}], settings, use_tqdm=False)
        table = np.full((len(request["teacher"]) - 1, vocab), -np.inf, dtype=np.float32)
        for row, entry in zip(table, output.prompt_logprobs[1:], strict=True):
            for token, value in entry.items():
                row[token] = value.logprob
        found["teacher"] = table
    if "greedy" in request:
        settings = SamplingParams(temperature=0, max_tokens=request["greedy"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        found["tokens"] = np.array([output.outputs[0].token_ids for output in outputs])
        counts = {m.name: getattr(m, "value", 0) for m in llm.get_metrics() if "spec_decode" in m.name}
        found["drafted"] = counts.get("vllm:spec_decode_num_draft_tokens", 0)
        found["accepted"] = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
    np.savez(request["out"], **found)


class Memory:
    """The highest anonymous memory of this process and its children in GiB, looked at ten times a second. Pages of
    mapped files, which the kernel drops when it needs them, do not count."""

    def __init__(self) -> None:
        self._peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def peak_gib(self) -> float:
        return self._peak / 2**20

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, max((anonymous_kib(pid) for pid in family(os.getpid())), default=0))
            time.sleep(0.1)


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child_pid in children for one in family(int(child_pid)))]


def anonymous_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) if found else 0


def run(place: Path, name: str, model: Path, ours: bool, more: dict[str, Any], **engine: Any) -> dict[str, Any] | None:
    request = {"model": str(model), "out": str(place / f"{name}.npz"), "engine": engine, **more}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if engine.get("tensor_parallel_size", 1) > 1 else "0",
        "GLM5_SHIM_STATE_DIR": str(place / f"state-{name}"),
        "GLM5_SHIM_CACHE_DIR": str(place / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **({"GLM5_SHIM_ASSUME_CAPABILITY": "12.0", "GLM5_SHIM_INDEXER": "triton"} if ours else {}),
    }
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(request)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (place / f"{name}.log").write_text(done.stdout)
    backends = sorted(set(re.findall(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend", done.stdout)))
    print(f"[{name}] exit {done.returncode} after {time.monotonic() - began:.0f} s, backends {backends}", flush=True)
    if done.returncode:
        print(done.stdout[-6000:], flush=True)
        return None
    kept = "quantization=glm5_gguf" in done.stdout
    print(f"[{name}] weights stay quantised: {kept}", flush=True)
    return {**np.load(place / f"{name}.npz"), "kept": kept, "log": done.stdout}


class Verdict:
    good = True

    def say(self, what: str, ok: bool) -> None:
        self.good &= bool(ok)
        print(f"{'ok  ' if ok else 'FAIL'} {what}", flush=True)


def oracle(place: Path, directory: Path, jobs: list[str], dtype: str, tokens: int, verdict: Verdict) -> None:
    from hf_reference import argmax_agreement, kl

    model, prompt = oracle_model(directory)
    dense = np.load(directory / "hf_deqmix_dense.npz")["logits"][:-1]
    for job in jobs:
        topk = job.removeprefix("ours").removeprefix("native")
        engine = {"dtype": dtype, "max_model_len": 512, "max_num_batched_tokens": tokens}
        if topk == "2048":
            engine["hf_overrides"] = {"index_topk": 2048}
        found = run(place, job, model, job.startswith("ours"), {"teacher": prompt}, **engine)
        if found is None or not found["kept"]:
            verdict.say(f"{job}: an engine with quantised weights came up", False)
            continue
        reference = dense if topk == "2048" else np.load(directory / "hf_deq_mix.npz")["logits"][:-1]
        most, least, apart = GATES[topk]
        divergence, agreement = kl(reference, found["teacher"]), argmax_agreement(reference, found["teacher"])
        verdict.say(f"{job} {dtype}: KL {divergence:.4f} (limit {most})", divergence < most)
        verdict.say(f"{job} {dtype}: argmax {agreement:.3f} (limit {least})", agreement > least)
        if apart:
            distance = kl(dense, found["teacher"])
            verdict.say(f"{job} {dtype}: KL {distance:.3f} from dense (within {apart})", apart[0] < distance < apart[1])


def mtp(place: Path, dtype: str, ours: bool, verdict: Verdict) -> None:
    """Up to the top-k of 64 tokens, so that all are attended to; one request at a time."""
    from mtp_model import SHAPE, predictable

    from shim.gguf.tiny import tiny_metadata, write_gguf

    model = write_gguf(place / "predictable", "mtp", tiny_metadata(SHAPE, "mtp"), predictable())
    rng = np.random.default_rng(3)
    prompts = [rng.integers(5, 900, n).tolist() for n in (8, 14, 21, 24)]
    engine = {"dtype": dtype, "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 1}
    more = {"prompts": prompts, "greedy": 40}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, place, "plain", model, ours, more, **engine)
        drafted = run(place, "mtp", model, ours, more, speculative_config=MTP, **engine)
        plain = first.result()
    if plain is None or drafted is None:
        verdict.say("both engines came up", False)
        return
    rate = drafted["accepted"] / max(drafted["drafted"], 1)
    verdict.say(f"accepted {drafted['accepted']} of {drafted['drafted']} drafted tokens ({rate:.2f})", rate > 0)
    same = (plain["tokens"] == drafted["tokens"]).mean()
    verdict.say(f"greedy tokens equal with and without MTP: {same:.3f}", same == 1)


def oracle_model(directory: Path) -> tuple[Path, list[int]]:
    (model,) = directory.glob("*-00001-of-*.gguf")
    read = json.loads((directory / "tokens300.json").read_text())
    return model, read["tokens"] if isinstance(read, dict) else read


def big(place: Path, gigabytes: float, tp: int, whole: bool, ours: bool, verdict: Verdict) -> None:
    """GLM-5's own sizes, in as many layers as fit into `gigabytes`, with random weights."""
    from gguf_real_size import write

    began = time.monotonic()
    model, size = write(place / "big", gigabytes)
    print(f"wrote {size / 1e9:.1f} GB in {time.monotonic() - began:.0f} s", flush=True)
    engine = {"max_model_len": 1024, "max_num_batched_tokens": 512, "tensor_parallel_size": tp, "enforce_eager": True}
    engine["enable_expert_parallel"] = whole
    prompts = [list(range(100, 140))]
    found = run(place, "big", model, ours, {"prompts": prompts, "greedy": 8}, **engine)
    if found is None:
        verdict.say("the engine came up", False)
        return
    for said in re.findall(r"weights loaded in ([\d.]+) s", found["log"]):
        print(f"     {size / 1e9:.1f} GB in {said} s: {size / 1e9 / float(said):.2f} GB/s")
    print(f"     engine ready after {float(found['ready_s']):.0f} s")
    peak = float(found["anonymous_gib"])
    verdict.say(f"peak anonymous memory of one process {peak:.2f} GiB, Python and CUDA included (limit 8)", peak < 8)
    verdict.say(f"the weights are quantised: {found['kept']}", found["kept"])
    print(f"     largest resident size of a child, mapped files included: {peak_children_gib():.2f} GiB")


def peak_children_gib() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--oracle", type=Path)
    parser.add_argument("--jobs", default=",".join(JOBS), help="some of " + ",".join(JOBS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens in a batch")
    parser.add_argument("--mtp", action="store_true")
    parser.add_argument("--native", action="store_true", help="with --mtp or --big: the card's own backend")
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="with --big and --tp 2: experts whole")
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "tests" / "e2e")]
    verdict = Verdict()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(os.environ.get("OUT_DIR", scratch))
        if arguments.mtp:
            mtp(place, arguments.dtype, not arguments.native, verdict)
        elif arguments.big:
            whole = arguments.expert_parallel
            big(Path(scratch), arguments.gigabytes, arguments.tp, whole, not arguments.native, verdict)
        else:
            jobs = arguments.jobs.split(",")
            oracle(place, arguments.oracle, jobs, arguments.dtype, arguments.tokens, verdict)
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
