"""Index sets of neighbouring tokens that share positions, as those of a real indexer do: inputs for benchmarks.

The model: each next token keeps the share `keep` of the previous token's set, chosen at random, and draws the rest
anew. Half of these draws come from the `WINDOW` (times k) latest positions that it sees, half from all of them. So
tokens at a distance of d share keep^d of a set, and a little more by chance. That half is recent is an assumption.

`keep` of GLM-5 at long context is not known. Two measurements are public, and they are far apart:
- 0.35 to 0.5 between consecutive decode steps, layers 20 to 60 (the first two: less) of DeepSeek-V3.2 on a prompt of
  68,665 tokens: TensorRT-LLM, tech blog 21, figure 2 (arXiv:2604.22312);
- about 0.99 in GLM-5.1's prefill, from the union of 4 neighbours, 1.03 times one token's set: sgl-project/sglang#32779
  (its table has the prompt lengths; if a prompt is not much longer than k, all sets are alike).
`KEEP` spans both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

KEEP = (0.5, 0.8, 0.9, 0.95, 0.99)
WINDOW = 4  # times k


def overlapping_indices(
    tokens: int, topk: int, keys: int, keep: float, generator: torch.Generator, *, causal: bool = True
) -> torch.Tensor:
    """int32 [tokens, topk] on the generator's device: distinct positions in random order, -1 behind the last.

    keep:   the exact share of a token's set that the next one has too (rounded to whole positions), if enough other
            positions are left to draw
    causal: token t stands at position keys - tokens + t and sees that one and all before it; else every token sees all
            `keys`

    A token that sees at most `topk` positions has them all. ValueError names an argument that does not fit.
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"keep is {keep}, expected 0 to 1")
    if tokens < 0 or topk < 1 or keys < 1 or (causal and keys < tokens):
        raise ValueError(
            f"tokens {tokens}, topk {topk}, keys {keys}: expected at least 0, 1, 1; causal: keys >= tokens"
        )
    device = generator.device
    rows = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
    taken = torch.zeros(keys, dtype=torch.bool, device=device)
    held = torch.empty(0, dtype=torch.int64, device=device)  # in random order, so its beginning is a random part
    for t in range(tokens):
        sees = keys - tokens + t + 1 if causal else keys
        if sees <= topk:
            held = torch.arange(sees, device=device)
            taken[:sees] = True
        else:
            lost = min(len(held) - round(keep * len(held)), sees - topk)
            fresh = _draw(topk - len(held) + lost, sees, WINDOW * topk, taken, generator)
            taken[held[:lost]] = False
            held = torch.cat((held[lost:], fresh))
        held = held[torch.randperm(len(held), generator=generator, device=device)]
        rows[t, : len(held)] = held.int()
    return rows


def _draw(count: int, sees: int, window: int, taken: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws `count` positions that are not taken, and marks them as taken."""
    given: dict[str, Any] = {"generator": generator, "device": generator.device}
    if sees <= window:  # all positions are recent. A permutation needs no second try if few are left
        free = (~taken[:sees]).nonzero().flatten()
        drawn = free[torch.randperm(len(free), **given)[:count]]
        taken[drawn] = True
        return drawn
    parts: list[torch.Tensor] = []
    while count > 0:
        recent = torch.rand(count, **given) < 0.5
        span = torch.where(recent, window, sees)
        position = (sees - 1 - torch.rand(count, dtype=torch.float64, **given) * span).ceil().long()
        position = torch.unique(position[~taken[position]])
        taken[position] = True
        parts.append(position)
        count -= len(position)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=generator.device)


def distinct_rows(tokens: int, topk: int, keys: int, keep: float | None) -> float:
    """How many of `keys` rows the sets of all tokens hold together, on average, in the model above.

    keep None: for uniformly random sets. Valid if keys > WINDOW * topk and the tokens are few beside the keys."""
    if keep is None:
        return float(keys * (1 - (1 - topk / keys) ** tokens))
    draws = (topk + (tokens - 1) * (topk - round(keep * topk))) / 2  # of each half
    window = WINDOW * topk + tokens  # it moves
    anywhere, recent = 1 - (1 - 1 / keys) ** draws, 1 - (1 - 1 / window) ** draws
    return float((keys - window) * anywhere + window * (1 - (1 - anywhere) * (1 - recent)))


@lru_cache(maxsize=8)
def overlapping_sets(sets: int, tokens: int, topk: int, keys: int, keep: float, seed: int) -> torch.Tensor:
    """int32 [sets, tokens, topk] on the CPU, causal. Each set is a chain of its own. Takes about 1 ms a token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([overlapping_indices(tokens, topk, keys, keep, generator) for _ in range(sets)])
