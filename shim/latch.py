"""The error that stops a vLLM process, and the latch that keeps it stopped. Standard library only."""

from __future__ import annotations

import sys
from typing import Any


class ShimError(RuntimeError):
    """A required patch is not in force. Not an ImportError: vLLM swallows those at many places."""


class Latch:
    """A finder that refuses the modules in `refused`, so that the retry of a failed import fails like the first one."""

    def __init__(self) -> None:
        self.refused: dict[str, ShimError] = {}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.refused:
            raise self.refused[name]
