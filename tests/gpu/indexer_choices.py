"""On a GPU: fed the same hidden states, do the shim's indexer and vLLM's own choose the same tokens, layer by layer?

    python tests/gpu/indexer_choices.py [--heads 64]

A random GLM-5 with real head sizes answers with the shim's indexer. At every call the native logits function gets the
same tensors too, and the tokens that ours chose are judged by the native logits: each must be among their k largest
(equal values aside). Prints a table, exit 1 below 99.9 %.

The last two columns say how much of a prompt token's set the next token's has too, and how many sets the union of 8
neighbours is as large as, where tokens see more than k (median of layers; `overlap.py` models it). Weights are random,
so they tell what this indexer does with text (the bytes of a module of Python's), and nothing of a trained one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "GLM5_SHIM_ASSUME_CAPABILITY": "12.0",
    "GLM5_SHIM_INDEXER": "triton",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
LENGTHS = (300, 2049, 20000)
STEPS = 24


class Judge:
    """Wraps the adapters of `shim.indexer.triton`."""

    def __init__(self) -> None:
        self.native: Any = None  # the native logits of the call whose top-k comes next
        self.clear()

    def clear(self) -> None:
        self.chosen: dict[str, list[tuple[int, int, float]]] = {"prefill": [], "decode": []}  # right, all, rel. error
        self.overlap: list[tuple[float, float]] = []  # kept by the next token, union of 8 in sets

    def install(self) -> None:
        from vllm.utils import deep_gemm

        from shim.indexer import triton as adapters

        prefill = getattr(deep_gemm, "fp8_fp4_mqa_logits", None) or deep_gemm.fp8_mqa_logits
        paged = getattr(deep_gemm, "fp8_fp4_paged_mqa_logits", None) or deep_gemm.fp8_paged_mqa_logits
        ours_prefill, ours_paged = adapters.mqa_logits, adapters.paged_mqa_logits
        choose = adapters._choose

        def mqa_logits(given: Any) -> Any:
            self.native = prefill(**given)
            return ours_prefill(given)

        def paged_mqa_logits(given: Any) -> Any:
            import torch

            sms = torch.cuda.get_device_properties(0).multi_processor_count
            schedule = deep_gemm.get_paged_mqa_logits_metadata(given["context_lens"], 64, sms)
            self.native = paged(**(dict(given) | {"schedule_metadata": schedule}))
            return ours_paged(given)

        def choose_and_judge(logits: Any, lengths: Any, indices: Any, k: int, starts: Any = None) -> bool:
            done = choose(logits, lengths, indices, k, starts)
            self.judge("decode" if starts is None else "prefill", logits, lengths, indices, k, starts)
            return done

        adapters.mqa_logits, adapters.paged_mqa_logits = mqa_logits, paged_mqa_logits
        adapters._choose = choose_and_judge

    def judge(self, what: str, logits: Any, lengths: Any, indices: Any, k: int, starts: Any) -> None:
        import torch

        native = self.native[: logits.shape[0]]
        rows = native.shape[0]
        if lengths.numel() != rows:
            next_n = rows // lengths.numel()
            lengths = lengths.reshape(-1, 1) - next_n + 1 + torch.arange(next_n, device=lengths.device)
        lengths = lengths.reshape(-1).clamp(min=0)
        first = torch.zeros_like(lengths) if starts is None else starts
        column = torch.arange(native.shape[1], device=native.device)
        inside = (column >= first[:, None]) & (column < (first + lengths)[:, None])
        seen = native.float().masked_fill(~inside, -torch.inf)
        least = seen.topk(min(k, seen.shape[1]), dim=1).values[:, -1:]  # -inf where all are chosen
        picked = indices[:, :k].long()
        real = picked >= 0
        value = seen.gather(1, (picked + first[:, None]).clamp(0, seen.shape[1] - 1))
        right = real & (value >= least) & (value > -torch.inf)
        distinct = torch.where(real, picked, -1 - torch.arange(k, device=picked.device)).sort(1).values
        if (distinct[:, 1:] == distinct[:, :-1]).any() or (real.sum(1) != lengths.clamp(max=k)).any():
            raise SystemExit("a row chose a token twice, or not as many as there are")
        error = ((logits - native).abs() * inside).nan_to_num().max() / seen.abs().masked_fill(~inside, 0).max()
        self.chosen[what].append((int(right.sum()), int(real.sum()), float(error)))
        full = picked[real.all(1) & (lengths > k)]
        if what == "prefill" and len(full) >= 8:
            sets = torch.zeros(len(full) // 8 * 8, native.shape[1], dtype=torch.bool, device=picked.device)
            sets.scatter_(1, full[: len(sets)], True)
            kept = (sets[1:] & sets[:-1]).sum(1).float().mean() / k
            union = sets.view(-1, 8, sets.shape[1]).any(1).sum(1).float().mean() / k
            self.overlap.append((float(kept), float(union)))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=64)
    arguments = parser.parse_args()

    import numpy as np

    from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf

    judge = Judge()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["GLM5_SHIM_CACHE_DIR"] = os.environ["GLM5_SHIM_STATE_DIR"] = scratch
        shape = Shape(vocab=512, hidden=1024, ffn=1024, heads=arguments.heads, q_lora=512, topk=2048, nextn=0)
        model = write_gguf(
            Path(scratch) / "model", "random", tiny_metadata(shape, "random"), tiny_tensors(shape, 0, "bf16")
        )
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=24576,
            max_num_batched_tokens=4096,
            max_num_seqs=32,
            gpu_memory_utilization=0.03,
            kv_cache_memory_bytes=2 << 30,
            enforce_eager=True,
            seed=0,
        )
        judge.install()
        rng = np.random.default_rng(5)
        parameters = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
        print("tokens  step     calls  agreement  worst call  logits' error  kept   union of 8")
        ok = True
        text = list(Path(argparse.__file__).read_bytes()[: LENGTHS[-1]])
        for prompt in [*(rng.integers(0, 400, length).tolist() for length in LENGTHS), text]:
            length = len(prompt)
            judge.clear()
            llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
            for what, calls in judge.chosen.items():
                right, every = sum(c[0] for c in calls), sum(c[1] for c in calls)
                worst = min((c[0] / c[1] for c in calls if c[1]), default=0.0)
                agreement = right / every if every else 0.0
                ok &= agreement >= 0.999
                error = max((c[2] for c in calls), default=float("nan"))
                line = f"{length:6d}  {what:8s} {len(calls):5d}  {agreement:.6f}   {worst:.6f}    {error:8.2g}"
                if what == "prefill" and judge.overlap:
                    kept, union = np.median(judge.overlap, axis=0)
                    line += f"       {kept:.3f}  {union:.2f}{'  text' if prompt is text else ''}"
                print(line)
    print("OK" if ok else "NOT OK")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
