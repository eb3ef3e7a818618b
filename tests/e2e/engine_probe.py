"""Run in a child process: one vLLM engine, in-process, answers a list of jobs given as JSON; results go to an npz.

A job is {"name", "prompts": [[token ids]], "max_tokens", "teacher": bool, "fresh": bool}. With `teacher` the
log-probabilities of the whole vocabulary at every prompt position are kept ([T-1, vocab], of the tokens 1 to T-1), else
those of the generated tokens ([max_tokens, vocab]).
"""

from __future__ import annotations

import json
import sys

import numpy as np

for _name in ("torchvision", "torchaudio", "torchcodec"):  # as the shim does: the stock wheel cannot start otherwise
    sys.modules.setdefault(_name, None)


def rows(entries, vocab: int) -> np.ndarray:
    table = np.full((len(entries), vocab), -np.inf, dtype=np.float32)
    for position, entry in enumerate(entries):
        for token, value in entry.items():
            table[position, token] = value.logprob
    return table


def main() -> None:
    request = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        max_logprobs=-1,
        max_model_len=512,
        disable_log_stats=False,
        seed=0,
        **request["engine"],
    )
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    found: dict[str, np.ndarray] = {}
    for job in request["jobs"]:
        if job.get("fresh", True):
            llm.reset_prefix_cache()
        teacher = job.get("teacher", False)
        parameters = SamplingParams(
            temperature=0,
            max_tokens=job.get("max_tokens", 1),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=vocab if teacher else None,
            logprobs=None if teacher else vocab,
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
        hits = cache_hits(llm)
        for number, output in enumerate(llm.generate(prompts, parameters, use_tqdm=False)):
            answer = output.outputs[0]
            entries = output.prompt_logprobs[1:] if teacher else answer.logprobs
            found[f"{job['name']}/{number}"] = rows(entries, vocab)
            found[f"{job['name']}/{number}/tokens"] = np.array(answer.token_ids)
        found[f"{job['name']}/cache_hits"] = np.array(cache_hits(llm) - hits)
    np.savez(request["out"], **found)


def cache_hits(llm) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")


if __name__ == "__main__":
    main()
