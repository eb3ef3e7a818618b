"""Run as a child process that imports vLLM once, which takes longer than all that a tiny model does, and forks for each
engine that it is asked for.

A line on stdin is a request, {"model", "engine", "jobs", "place"}: in a fork, one in-process engine answers the jobs.
Its output goes to <place>/log, its results to <place>/out.npz, its ledgers to <place>/state; on stdout comes the exit
code.

A job is {"name", "prompts": [[token ids]], "max_tokens", "keep", "fresh": bool}. keep: "prompt", the log-probabilities
of the whole vocabulary at every prompt position ([T-1, vocab], of the tokens 1 to T-1); "answer", those of the
generated tokens ([max_tokens, vocab]); "tokens", the generated tokens alone, which the others keep too. The metrics
that a job adds to are kept as <name>/cache_hits, /drafted and /accepted, numbers of tokens.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np

for _name in ("torchvision", "torchaudio", "torchcodec"):  # as the shim does: the stock wheel cannot start otherwise
    sys.modules.setdefault(_name, None)

METRICS = {
    "cache_hits": "vllm:prefix_cache_hits",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def rows(entries, vocab: int) -> np.ndarray:
    table = np.full((len(entries), vocab), -np.inf, dtype=np.float32)
    for position, entry in enumerate(entries):
        for token, value in entry.items():
            table[position, token] = value.logprob
    return table


def answer(request) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        max_logprobs=-1,
        max_model_len=512,
        num_gpu_blocks_override=64,  # 4,096 tokens: to write over a GiB of KV cache takes seconds
        disable_log_stats=False,
        seed=0,
        **request["engine"],
    )
    config = llm.llm_engine.vllm_config.model_config
    vocab = config.get_vocab_size()
    found = {"quantization": np.array(str(config.quantization))}
    for job in request["jobs"]:
        if job.get("fresh", True):
            llm.reset_prefix_cache()
        keep = job.get("keep", "answer")
        parameters = SamplingParams(
            temperature=0,
            max_tokens=job.get("max_tokens", 1),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=vocab if keep == "prompt" else None,
            logprobs=vocab if keep == "answer" else None,
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
        before = counts(llm)
        for number, output in enumerate(llm.generate(prompts, parameters, use_tqdm=False)):
            of = f"{job['name']}/{number}"
            found[f"{of}/tokens"] = np.array(output.outputs[0].token_ids)
            if keep == "prompt":
                found[of] = rows(output.prompt_logprobs[1:], vocab)
            elif keep == "answer":
                found[of] = rows(output.outputs[0].logprobs, vocab)
        found |= {f"{job['name']}/{name}": np.array(n - before[name]) for name, n in counts(llm).items()}
    np.savez("out.npz", **found)
    if request["engine"].get("tensor_parallel_size", 1) > 1:
        llm.llm_engine.engine_core.shutdown()


def counts(llm) -> dict[str, int]:
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: values.get(metric, 0) for name, metric in METRICS.items()}


def main() -> None:
    codes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm.entrypoints.llm
    import vllm.model_executor.models.deepseek_v2
    import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.collect()
    gc.freeze()  # what is loaded by now, no engine need look through
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            place = Path(request["place"])
            os.environ |= {"GLM5_SHIM_STATE_DIR": str(place / "state"), "GLM5_SHIM_CACHE_DIR": str(place / "cache")}
            os.chdir(place)
            log = os.open("log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                answer(request)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=codes, flush=True)


if __name__ == "__main__":
    main()
