"""What kernels leave for each other within a launch, shared by all layers of an engine whose kernels run one after the
other. Two engines of a process, and two streams of an engine, have one each."""

from __future__ import annotations

import torch

Workspace = tuple[torch.Tensor, torch.Tensor]  # fp32 sums; int32 counters, zero before and after each launch


class Workspaces:
    def __init__(self) -> None:
        self._needs: dict[tuple[str, torch.device], tuple[int, int]] = {}
        self._held: dict[tuple[str, torch.device], Workspace] = {}

    def need(self, stream: str, device: torch.device, sums: int, tiles: int) -> None:
        """Called for every layer before the first `get`, so that one size serves all."""
        most = self._needs.get((stream, device), (0, 0))
        self._needs[stream, device] = (max(most[0], sums), max(most[1], tiles))

    def get(self, stream: str, device: torch.device) -> Workspace:
        """Large enough for all that was needed so far. What it gave before stays as it is, for captured graphs."""
        sums, tiles = self._needs[stream, device]
        held = self._held.get((stream, device))
        if held is None or held[0].numel() < sums or held[1].numel() < tiles:
            held = (
                torch.empty(sums, dtype=torch.float32, device=device),
                torch.zeros(tiles, dtype=torch.int32, device=device),
            )
            self._held[stream, device] = held
        return held
