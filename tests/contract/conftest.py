"""Children on real wheels, see wheels.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import wheels


@pytest.fixture(scope="session")
def child(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """`child(code, wheel=None, **env)`: `wheels.child` on the installed vLLM, or on the sources of vllm==wheel."""

    def run(code: str, wheel: str | None = None, **env: str) -> object:
        return wheels.child(code, tmp_path_factory.mktemp("child"), wheels.sources(wheel) if wheel else None, **env)

    return run
