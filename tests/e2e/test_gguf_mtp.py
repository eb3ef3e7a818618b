"""Speculative decoding by the NextN block of the same file: tokens are drafted, accepted and refused, and the answer is
that of the model without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hf_reference import greedy
from mtp_model import SHAPE, predictable

from shim.gguf.tiny import tiny_metadata, write_gguf

pytest_plugins = ("gguf_plugin",)
MTP = {"method": "mtp", "num_speculative_tokens": 1}
NEW = 32
LENGTHS = (8, 14, 21, 24)  # with NEW tokens below the top-k of 64: every token is attended to


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("mtp"), "mtp", tiny_metadata(SHAPE, "mtp"), predictable())


@pytest.fixture(scope="module")
def prompts(tokens) -> list[list[int]]:
    return [tokens[start : start + length] for start, length in zip((0, 60, 120, 180), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def answers(probe, model, prompts) -> dict[str, Any]:
    def run(**engine: Any) -> dict[str, Any]:
        common = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64}
        return {"model": str(model), "prompts": prompts, "max_tokens": NEW, "engine": {**common, **engine}}

    return probe(
        {
            "plain": run(quantization="gguf"),
            "quantised": run(quantization="gguf", speculative_config=MTP),
            "dequantised": run(speculative_config=MTP),
        }
    )


@pytest.mark.parametrize("name", ["quantised", "dequantised"])
def test_drafted_tokens_are_accepted_and_change_nothing(answers, name):
    drafted, accepted = (int(answers[f"{name}/{what}"]) for what in ("drafted", "accepted"))
    print(f"\n{name}: {accepted} of {drafted} drafted tokens accepted")
    assert 0.2 * drafted < accepted < drafted  # both ways are taken
    assert np.array_equal(answers[f"{name}/tokens"], answers["plain/tokens"])
    assert answers["plain/drafted"] == 0


def test_the_answer_is_the_references(answers, model, prompts):
    assert answers["plain/tokens"][0].tolist() == greedy(model, prompts[0], NEW)
