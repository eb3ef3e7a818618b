"""On a GPU: GLM-5 with real layer sizes, with and without the shim: what does a step take, and what does the host do?

    python tests/gpu/steps.py [--layers 4] [--share 8] [--kv auto,fp8] [--only ours,native] [--starts 4]

Run without PYTHONPATH to the shim. The model is a config.json and random weights, in as many layers as fit: 3 dense
ones of 0.8 GB, then MoE ones of 20 GB; with --share 8 one rank's share of tensor parallelism over 8 (no all-reduces),
0.3 and 2.6 GB. Each engine has the GPU to itself. First it is timed: decode steps of 1 and 16 requests of 8,000 tokens,
and a prefill of 8,192 tokens in one step, each the median of several. Then it is traced, which slows the host.
Some processes take 1.5 times as long for a launch as others, from start to end: --starts asks for several of each
engine, by turns, and compares the medians of their medians. Only the first of each is traced.
Exit 1 if a step of ours takes longer than 1.05 of the native one, or an engine fails. OUT_DIR keeps logs and traces.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# GLM-5's config.json, but token ids that a share of the vocabulary has too
GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
    "num_hidden_layers": 78, "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "head_dim": 64, "v_head_dim": 256,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "indexer_rope_interleave": True,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "moe_router_dtype": "float32", "ep_size": 1, "pretraining_tp": 1, "max_position_embeddings": 202752,
    "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_interleave": True,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SPLIT = ("vocab_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads")

BATCHES = (1, 16)
CONTEXT, PREFILL = 8000, 8192  # tokens
LEAD, WINDOWS, STEPS = 12, 7, 20  # decode steps: not counted, in each of so many medians, and traced
PREFILLS = 5
LIMIT = 1.05
MARK = "gpu_steps"
OURS = "TRITON_MLA_SPARSE"
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
HOST = (*LAUNCHES, "allocations", "cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaMemcpyAsync", *SYNCS)
COPIES = ("Memcpy HtoD", "Memcpy DtoH", "Memcpy DtoD", "Pageable")  # a copy of pageable memory makes the host wait
TOP = 12  # kernels
DECODES = tuple(f"decode {batch}" for batch in BATCHES)
TRACED = (*DECODES, "prefill")

Runs = dict[str, list[dict[str, Any]]]  # of "ours" and "native": what `child` found, each start
Trace = dict[str, Any]  # per step: "host", "copies", "kernels": {name: [count, µs]}; "torch ops", "gpu µs"


def model_config(layers: int, share: int) -> dict[str, Any]:
    return GLM5 | {name: GLM5[name] // share for name in SPLIT} | {"num_hidden_layers": layers}


def fill(_: Any, model: Any, __: Any) -> None:
    """Stands in for the dummy loader's `load_weights`, whose 1e-3 everywhere, norms too, would make all fp8 keys alike
    and every top-k a cut through ties. Here a projection keeps the size of what it is given."""
    import torch

    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() > 1 and parameter.is_floating_point():
                bound = math.sqrt(3 / parameter.shape[-1])
                parameter.uniform_(-bound, bound, generator=torch.Generator(parameter.device).manual_seed(seed))
            else:
                parameter.fill_(name.endswith("weight"))


class Steps:
    """Requests of random tokens for an engine in this process, a step at a time."""

    def __init__(self, engine: Any, vocab: int) -> None:
        import numpy as np

        self.engine, self.vocab = engine, vocab
        self.rng = np.random.default_rng(7)
        self.added = 0
        self.received: Counter[str] = Counter()  # tokens of each request

    def add(self, batch: int, length: int, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how: dict[str, Any] = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        parameters = SamplingParams(temperature=0, max_tokens=tokens, **how)
        self.received.clear()
        for _ in range(batch):
            prompt = {"prompt_token_ids": self.rng.integers(2, self.vocab, length).tolist()}
            self.engine.add_request(str(self.added), prompt, parameters)
            self.added += 1

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.received[output.request_id] += len(output.outputs[0].token_ids)

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def decode(self, batch: int, steps: int) -> None:
        """Until all of a new batch decode, with at least `steps` steps to come."""
        self.add(batch, CONTEXT, 2 * (LEAD + batch) + steps)
        while len(self.received) < batch or min(self.received.values()) < LEAD:
            self.step()

    def timed_decode(self, batch: int) -> dict[str, float]:
        """Windows follow on each other without a synchronisation, which would hide the work of the step in flight."""
        self.decode(batch, WINDOWS * STEPS)
        times = []
        for _ in range(WINDOWS):
            start, tokens = time.perf_counter(), self.received.total()
            self.step(STEPS)
            times.append((time.perf_counter() - start) * batch / (self.received.total() - tokens))
        self.drain()
        return summary(times)

    def prefill(self) -> float:
        """Seconds of one."""
        import torch

        self.add(1, PREFILL, 1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.drain()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def timed_prefill(self) -> dict[str, float]:
        for _ in range(2):
            self.prefill()
        return summary([self.prefill() for _ in range(PREFILLS)])

    def traced(self, path: Path, steps: int, work: Callable[[], None], names: set[str]) -> Trace:
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            before = allocations()
            with record_function(MARK):
                work()
            allocated = (allocations() - before) / steps
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            found = read_trace(json.load(file)["traceEvents"], steps, names)
        found["host"]["allocations"] = [allocated, 0.0]
        return found


def summary(times: list[float]) -> dict[str, float]:
    """Of times in seconds."""
    return {"ms": 1e3 * statistics.median(times), "least": 1e3 * min(times), "most": 1e3 * max(times)}


def allocations() -> int:
    """From torch's caching allocator, ever; few of them reach cudaMalloc."""
    import torch

    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def read_trace(events: list[dict[str, Any]], steps: int, names: set[str]) -> Trace:
    """What one of `steps` steps did, from a Chrome trace. Host: only inside MARK, the profiler synchronises too.
    `names`: of the shim's kernels, which are shown as "ours: NAME"."""
    complete = [event for event in events if event.get("ph") == "X"]
    (mark,) = (event for event in complete if event["name"] == MARK and event.get("cat") == "user_annotation")
    start, end = mark["ts"], mark["ts"] + mark["dur"]
    host: Counter[Any] = Counter()
    copies, kernels, ops = host.copy(), host.copy(), 0
    for event in complete:
        category, name, length = event.get("cat"), event["name"], event.get("dur", 0)
        inside = start <= event["ts"] < end
        if category in ("cuda_runtime", "cuda_driver") and inside:
            host.update({(name, "n"): 1, (name, "us"): length})
        elif category == "cpu_op" and inside:
            ops += 1
        elif category == "kernel":
            name = f"ours: {name}" if name in names else name
            kernels.update({(name, "n"): 1, (name, "us"): length})
        elif category == "gpu_memcpy":
            for kind in COPIES:
                if kind in name:
                    copies.update({(kind, "n"): 1, (kind, "us"): length})

    def table(counter: Counter[Any]) -> dict[str, list[float]]:
        found = {name for name, _ in counter}
        return {name: [counter[name, "n"] / steps, counter[name, "us"] / steps] for name in sorted(found)}

    tables = {"host": table(host), "copies": table(copies), "kernels": table(kernels)}
    return tables | {"torch ops": ops / steps, "gpu µs": sum(us for _, us in tables["kernels"].values())}


def kernels_of_ours() -> set[str]:
    from triton import JITFunction

    modules = [import_module(f"shim.kernels.{op}.kernel") for op in ("sparse_mla", "indexer", "topk")]
    return {name for module in modules for name, value in vars(module).items() if isinstance(value, JITFunction)}


def child(request: dict[str, Any]) -> None:
    """Measures one engine and writes what it found, twice: what is timed outlives a profiler that fails."""
    import torch
    import vllm
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = fill  # type: ignore[assignment, method-assign]
    begin = time.perf_counter()
    llm = vllm.LLM(
        model=request["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=request["max_model_len"],
        max_num_batched_tokens=PREFILL,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.8,
        kv_cache_memory_bytes=request["layers"] << 29,
        kv_cache_dtype=request["kv"],
        seed=0,
    )
    started = time.perf_counter() - begin
    steps = Steps(llm.llm_engine, request["vocab"])
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        "start_s": started,
        "times": {"prefill": steps.timed_prefill()} | {f"decode {n}": steps.timed_decode(n) for n in BATCHES},
        "traces": {},
    }
    out = Path(request["out"])
    out.write_text(json.dumps(found))
    if not request["traced"]:
        return
    names = kernels_of_ours() if request["shimmed"] else set()
    for batch, what in zip(BATCHES, DECODES, strict=True):
        steps.decode(batch, STEPS)
        path = out.with_suffix(f".decode{batch}.json.gz")
        found["traces"][what] = steps.traced(path, STEPS, lambda: steps.step(STEPS), names)
        steps.drain()
    steps.add(1, PREFILL, 1)
    found["traces"]["prefill"] = steps.traced(out.with_suffix(".prefill.json.gz"), 1, steps.drain, names)
    out.write_text(json.dumps(found))


def run(scratch: Path, request: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    """One engine in a process of its own; None if it gave no times."""
    out, shimmed = Path(request["out"]), request["shimmed"]
    out.unlink(missing_ok=True)
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT]
    env = os.environ | {
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "GLM5_SHIM_STATE_DIR": str(scratch / "state"),
        "GLM5_SHIM_CACHE_DIR": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *path] if shimmed else path),
    }
    if shimmed:
        env |= {"GLM5_SHIM_ASSUME_CAPABILITY": "12.0", "GLM5_SHIM_INDEXER": "triton"}
    else:
        env["GLM5_SHIM_OFF"] = "1"
    command = [sys.executable, __file__, "--child", json.dumps(request)]
    log, begin = out.with_suffix(".log"), time.perf_counter()
    with log.open("w") as file:
        try:
            status: Any = subprocess.run(
                command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=scratch, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"after {timeout:.0f} s"
    said = log.read_text(errors="replace")
    found = json.loads(out.read_text()) if out.exists() else None
    backends = sorted(set(re.findall(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend", said)))
    notes = re.findall(r"glm5-shim: indexer logits.*|\w+ compiled a variant.*|Asynchronous scheduling is \w+", said)
    print(f"[{out.stem}] exit {status}, {time.perf_counter() - begin:.0f} s, backends {backends}", *notes, sep="\n  ")
    if status or found is None:
        print(said[-4000:])
    sys.stdout.flush()
    return None if found is None else found | {"backends": backends, "status": status}


def show_trace(kv: str, what: str, runs: Runs) -> None:
    traces = {name: starts[0]["traces"][what] for name, starts in runs.items() if what in starts[0]["traces"]}
    if not traces:
        return

    def row(title: str, cells: list[list[float]]) -> None:
        print(f"{title[:64]:64s}" + "".join(f"{n:9.2f} {us:9.1f}" if n else f"{'-':>9s} {'-':>9s}" for n, us in cells))

    title = f"kv {kv}: {what}, of one step, traced"
    print(f"\n{title:64s}" + "".join(f"{name:>9s} {'µs':>9s}" for name in traces))
    for part, names in (("host", HOST), ("copies", COPIES)):
        for name in names:
            cells = [trace[part].get(name, [0, 0]) for trace in traces.values()]
            if any(n for n, _ in cells):
                row(name, cells)
    row("torch ops", [[trace["torch ops"], 0] for trace in traces.values()])
    row("all kernels", [[sum(n for n, _ in t["kernels"].values()), t["gpu µs"]] for t in traces.values()])
    tops = [sorted(t["kernels"], key=lambda name: -t["kernels"][name][1])[:TOP] for t in traces.values()]
    longest = {name: max(t["kernels"].get(name, [0, 0])[1] for t in traces.values()) for top in tops for name in top}
    for name in sorted(longest, key=lambda name: -longest[name]):
        row(f"  {name}", [t["kernels"].get(name, [0, 0]) for t in traces.values()])


def host_line(what: str, runs: Runs) -> str:
    hosts = {name: starts[0]["traces"][what]["host"] for name, starts in runs.items() if what in starts[0]["traces"]}
    counted = {
        f"synchronisations per {what} step": SYNCS,
        "allocations": ("allocations",),
        "cudaMalloc": ("cudaMalloc",),
    }

    def count(host: dict[str, list[float]], names: tuple[str, ...]) -> float:
        return sum(host[name][0] for name in names if name in host)

    each = {title: [f"{name} {count(host, of):.2f}" for name, host in hosts.items()] for title, of in counted.items()}
    return "host: " + "; ".join(f"{title} {', '.join(said)}" for title, said in each.items())


def judge(kv: str, runs: Runs, wanted: list[str], starts: int) -> bool:
    """The short table; may ours be called no slower?"""
    print(f"\nkv {kv}: {'ms of a step, median':28s}" + "".join(f"{name:>10s}" for name in runs))
    ok = all(len(runs.get(name, [])) == starts and runs[name][0]["traces"] for name in wanted)
    ok &= not any(found["status"] for each in runs.values() for found in each)
    for what in TRACED:
        times = {name: [found["times"][what]["ms"] for found in each] for name, each in runs.items()}
        medians = {name: statistics.median(each) for name, each in times.items()}
        line = f"{what:36s}" + "".join(f"{ms:10.3f}" for ms in medians.values())
        if {"ours", "native"} <= set(medians):
            ratio = medians["ours"] / medians["native"]
            ok &= ratio <= LIMIT
            line += f"   {ratio:.3f} {'ok' if ratio <= LIMIT else f'FAIL (limit {LIMIT})'}"
        if starts > 1:
            line += "   starts: " + "; ".join(f"{name} {' '.join(f'{ms:.3f}' for ms in times[name])}" for name in times)
        print(line)
    for what in TRACED:
        print(host_line(what, runs))
    for name, each in runs.items():
        for found in each:
            if (OURS in found["backends"]) != (name == "ours"):
                ok = False
                print(f"FAIL {name} ran on {found['backends']}")
    return ok


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--share", type=int, choices=(1, 2, 4, 8), default=1, help="of tensor parallelism over so many")
    parser.add_argument("--kv", default="auto", help="auto (bf16), fp8, or both by commas")
    parser.add_argument("--only", default="ours,native")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--starts", type=int, default=1, help="of each engine, by turns")
    parser.add_argument("--timeout", type=float, default=280, help="seconds for one engine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    kvs, wanted = arguments.kv.split(","), arguments.only.split(",")
    if min(arguments.layers, arguments.starts) < 1:
        parser.error("--layers and --starts are at least 1")
    if not {*kvs} <= {"auto", "fp8"} or not {*wanted} <= {"ours", "native"}:
        parser.error("--kv is of auto,fp8, --only of ours,native")
    config = model_config(arguments.layers, arguments.share)
    found: dict[str, Any] = {"config": config, "kv": {kv: {} for kv in kvs}}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        place = Path(os.environ.get("OUT_DIR", scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        (model := scratch / "model").mkdir()
        (model / "config.json").write_text(json.dumps(config))
        request = {"model": str(model), "vocab": config["vocab_size"], "layers": arguments.layers}
        request["max_model_len"] = arguments.max_model_len
        for kv, start, name in itertools.product(kvs, range(arguments.starts), wanted):
            more = {"kv": kv, "shimmed": name == "ours", "traced": start == 0}
            more["out"] = str(place / f"{name}-{kv}-{start}.json")
            result = run(scratch, request | more, arguments.timeout)
            if result is not None:
                found["kv"][kv].setdefault(name, []).append(result)
    for (kv, runs), what in itertools.product(found["kv"].items(), TRACED):
        show_trace(kv, what, runs)
    oks = [judge(kv, runs, wanted, arguments.starts) for kv, runs in found["kv"].items()]
    found["ok"] = all(oks)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print("OK" if found["ok"] else "NOT OK")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
