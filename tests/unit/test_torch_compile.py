"""A replaced symbol inside a compiled function: the compiled answer is the eager one, and it is ours."""

from __future__ import annotations

import importlib

import pytest
import torch

from shim.engine import Engine
from shim.patch import Patch, Verdict

SOURCE = """
def scale(x):
    return x * 2

class Layer:
    def forward(self, x):
        return scale(x) + 1
"""


@pytest.mark.parametrize("symbol", ["scale", "Layer.forward"])
def test_compiled_code_runs_the_replacement(write_module, symbol):
    name = write_module(f"stub_compiled_{symbol.replace('.', '_')}", SOURCE)
    replacement = {"scale": lambda x: x * 10, "Layer.forward": lambda self, x: x * 100}[symbol]
    patch = Patch(
        name="one",
        target=name,
        why="",
        delete="",
        tested="",
        replaces=(symbol,),
        probe=lambda module: Verdict.apply(),
        apply=lambda module: {symbol: replacement},
    )
    Engine([patch]).arm()
    module = importlib.import_module(name)
    layer = module.Layer()
    x = torch.ones(3)
    eager = layer.forward(x)
    compiled = torch.compile(lambda v: layer.forward(v), backend="eager", fullgraph=True)(x)
    assert torch.equal(compiled, eager)
    assert eager[0] == {"scale": 11, "Layer.forward": 100}[symbol]
