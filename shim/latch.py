"""Keeps a module refused after its import failed. Standard library only."""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from shim.patch import ShimError


class Latch:
    """A finder for the modules in `refused`: each can be found, and every import of it raises its error.

    The import system forgets a failed import and a hook that ran, so a second import would go through unpatched.
    """

    def __init__(self) -> None:
        self.refused: dict[str, ShimError] = {}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        error = self.refused.get(name)
        if error is None:
            return None
        spec = PathFinder.find_spec(name, path) or ModuleSpec(name, None)
        spec.loader = _Refusal(error)
        return spec


class _Refusal(Loader):
    """A loader that loads nothing. It raises when a module is imported, not when somebody asks whether it is there."""

    def __init__(self, error: ShimError) -> None:
        self._error = error

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise self._error

    def exec_module(self, module: ModuleType) -> None:
        raise self._error
