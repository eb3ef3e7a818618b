"""What tests of GGUF files share: a smaller GLM-5 than the demo's, that a test can spoil."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shim.gguf.files import Model, open_model
from shim.gguf.tiny import Shape, Tensors, tiny_metadata, tiny_tensors, write_gguf

for _extra in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(_extra, None)  # type: ignore[arg-type]  # built for another torch, they break transformers

SMALL = Shape(layers=2, vocab=512, heads=2, kv_lora=256, experts=2, index_heads=4)


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> Model:
    return open_model(tiny)


@pytest.fixture(scope="session")
def small_shape() -> Shape:
    return SMALL


@pytest.fixture(scope="session")
def small_metadata() -> dict:
    return tiny_metadata(SMALL, "small")


@pytest.fixture(scope="session")
def small_tensors() -> Tensors:
    return tiny_tensors(SMALL, seed=3)


@pytest.fixture
def make(tmp_path: Path, small_metadata: dict, small_tensors: Tensors) -> Callable[..., Path]:
    """make(metadata={key: value}, tensors={name: (values, type)}, parts=, ...) -> path. The value None drops one."""

    def write(
        *, metadata: dict | None = None, tensors: dict | None = None, parts: int = 1, name: str = "small", at: str = ""
    ) -> Path:
        keys = {k: v for k, v in {**small_metadata, **(metadata or {})}.items() if v is not None}
        values = {k: v for k, v in {**small_tensors, **(tensors or {})}.items() if v is not None}
        return write_gguf(tmp_path / at, name, keys, values, parts)

    return write
