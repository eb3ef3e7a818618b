"""Speculative decoding by the NextN block of the same file: tokens are drafted, accepted and refused, and the answer is
that of the model without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_reference import greedy
from mtp_model import SHAPE, predictable

from shim.gguf.tiny import tiny_metadata, write_gguf

MTP = {"method": "mtp", "num_speculative_tokens": 1}
NEW = 32
Answers = dict[str, np.ndarray]
LENGTHS = (8, 14, 21, 24)  # with NEW tokens below the top-k of 64: every token is attended to


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("mtp"), "mtp", tiny_metadata(SHAPE, "mtp"), predictable())


@pytest.fixture(scope="module")
def prompts(tokens) -> list[list[int]]:
    return [tokens[start : start + length] for start, length in zip((0, 60, 120, 180), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def answers(ask_engine, kernels, model, prompts) -> dict[str, Answers]:
    jobs = [{"name": "new", "prompts": prompts, "max_tokens": NEW, "keep": "tokens"}]

    def run(path: tuple[Path, ...], **engine: Any) -> Answers:
        return ask_engine(model, jobs, path=path, dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, **engine)

    return {
        "plain": run(kernels),
        "quantised": run(kernels, speculative_config=MTP),
        "dequantised": run((), speculative_config=MTP),
    }


@pytest.mark.parametrize("name", ["quantised", "dequantised"])
def test_drafted_tokens_are_accepted_and_change_nothing(answers, name):
    plain, found = answers["plain"], answers[name]
    drafted, accepted = int(found["new/drafted"]), int(found["new/accepted"])
    print(f"\n{name}: {accepted} of {drafted} drafted tokens accepted")
    assert 0.2 * drafted < accepted < drafted  # both ways are taken
    for number in range(len(LENGTHS)):
        assert found[f"new/{number}/tokens"].tolist() == plain[f"new/{number}/tokens"].tolist()
    assert plain["new/drafted"] == 0


def test_the_answer_is_the_references(answers, model, prompts):
    generated = answers["plain"]["new/0/tokens"].tolist()
    assert len(generated) == NEW
    assert generated == greedy(model, prompts[0], generated)
