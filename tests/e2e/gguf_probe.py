"""Run in a child process: vLLM engines, in-process, one after the other, each on another GGUF; results go to an npz.

Importing vLLM takes longer than a tiny model does. The argument is JSON: {"runs": {name: {"model", "prompts", "engine",
"max_tokens"}}, "out"}. Of each run are kept, under its name: /teacher, the log-probabilities of the whole vocabulary at
the positions of the first prompt ([T-1, vocab]), /tokens ([prompts, max_tokens], greedy), /quantization, and
/drafted and /accepted, numbers of tokens.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import numpy as np
from engine_probe import rows  # which also hides what the stock wheel cannot start with


def answers(run: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=run["model"],
        skip_tokenizer_init=True,
        max_logprobs=-1,
        max_model_len=512,
        disable_log_stats=False,
        seed=0,
        **run["engine"],
    )
    config = llm.llm_engine.vllm_config.model_config
    vocab = config.get_vocab_size()
    prompts = [{"prompt_token_ids": tokens} for tokens in run["prompts"]]
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    settings = SamplingParams(max_tokens=1, prompt_logprobs=vocab, **greedy)
    (teacher,) = llm.generate(prompts[:1], settings, use_tqdm=False)
    settings = SamplingParams(max_tokens=run.get("max_tokens", 1), **greedy)
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    llm.llm_engine.engine_core.shutdown()
    return {
        "teacher": rows(teacher.prompt_logprobs[1:], vocab),
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "quantization": str(config.quantization),
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    from vllm.distributed import cleanup_dist_env_and_memory

    found: dict[str, Any] = {}
    for name, run in request["runs"].items():
        found |= {f"{name}/{key}": np.asarray(value) for key, value in answers(run).items()}
        cleanup_dist_env_and_memory()
        gc.collect()
    np.savez(request["out"], **found)


if __name__ == "__main__":
    main()
