"""Every patch on the installed CPU wheel: applied, and off again by its own switch."""

from __future__ import annotations

import pytest

from shim.patches import PATCHES

CPU = (
    "cpu_backend",
    "cpu_indexer",
    "cpu_indexer_op",
    "cpu_rotary",
    "gguf_engine_args",
    "gguf_loader",
    "worker_seal",
    "closing_gate",
)

STATES = """
for target in dict.fromkeys(r.patch.target for r in activate.engine().records.values()):
    if not target.endswith("platforms.cuda"):  # needs a CUDA build
        importlib.import_module(target)
first = states()
activate.activate()
activate.check()
say([first, states()])
"""


def test_every_patch_stands(child):
    first, second = child(STATES)
    assert first == second
    assert {n for n in CPU if first[n] != "applied"} == set()
    assert set(first.values()) <= {"applied", "unneeded", "upstream", "waiting"}


ORIGINALS = """
from shim import upstream
record = activate.engine().records[NAME]
module = importlib.import_module(record.patch.target)
found = {s: upstream.raw(module, s) for s in record.patch.replaces}
found = {s: getattr(getattr(f, "__func__", f), "__module__", "?") for s, f in found.items()}
say([record.state.value, found])
"""


@pytest.mark.parametrize("name", [p.name for p in PATCHES if p.replaces and p.target != "vllm.platforms.cuda"])
def test_its_own_switch_leaves_vllms_functions(child, name):
    state, owners = child(f"NAME = {name!r}\n{ORIGINALS}", GLM5_SHIM_SKIP=name)
    assert state == "off"
    assert all(owner.startswith("vllm.") for owner in owners.values()), owners
    state, owners = child(f"NAME = {name!r}\n{ORIGINALS}")
    if state == "applied":
        assert all(owner.startswith("shim.") for owner in owners.values()), owners


def test_a_symbol_renamed_upstream_stops_the_import(child, tmp_path):
    found = child(
        """
import vllm.v1.worker.worker_base as real
source = open(real.__file__).read().replace("def initialize_from_config(", "def initialize_from_configs(")
from importlib.util import module_from_spec, spec_from_loader
from shim.engine import Engine
from shim.patches.closing_gate import PATCH
module = module_from_spec(spec_from_loader(real.__name__, None))
exec(compile(source, real.__file__, "exec"), vars(module))
sys.modules[real.__name__] = module
try:
    Engine([PATCH]).arm()
except RuntimeError as problem:
    say(str(problem))
"""
    )
    assert "WorkerWrapperBase.initialize_from_config does not exist" in found
    assert "GLM5_SHIM_SKIP=closing_gate" in found
