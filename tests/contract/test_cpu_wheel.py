"""Every patch on the installed CPU wheel: applied, and off again by its switch."""

from __future__ import annotations

import pytest

CPU = ("cpu_backend", "cpu_indexer", "cpu_indexer_op", "cpu_rotary")
ALL = (*CPU, "gguf_engine_args", "gguf_loader", "worker_seal", "closing_gate", "backend_member")

LOOK = """
from shim import upstream
def owner(record, symbol):
    found = upstream.raw(sys.modules[record.patch.target], symbol)
    return getattr(getattr(found, "__func__", found), "__module__", "?")
records = [r for r in process.engine().records.values() if not r.patch.target.endswith("platforms.cuda")]  # needs CUDA
for record in records:
    importlib.import_module(record.patch.target)
first = states()
activate.activate()
process.check()
def present(record):
    return [s for s in record.patch.replaces if upstream.has(sys.modules[record.patch.target], s)]
owners = {r.patch.name: [owner(r, s) for s in present(r)] for r in records}
say({"first": first, "second": states(), "owners": owners})
"""


@pytest.fixture(scope="module")
def on(child):
    return child(LOOK)


@pytest.fixture(scope="module")
def off(child):
    from shim.patches import PATCHES

    return child(LOOK, GLM5_SHIM_SKIP=",".join(p.name for p in PATCHES))


def test_every_patch_stands_and_a_second_activation_changes_nothing(on):
    assert on["first"] == on["second"]
    assert {name for name in ALL if on["first"][name] != "applied"} == set()
    assert set(on["first"].values()) <= {"applied", "unneeded", "upstream", "waiting"}


def test_what_was_replaced_is_ours(on):
    for name in ALL:
        assert all(owner.startswith("shim.") for owner in on["owners"][name]), name


def test_the_switches_leave_vllms_functions(off):
    assert set(off["first"].values()) == {"off"}
    assert all(owner.startswith("vllm.") for owners in off["owners"].values() for owner in owners)


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
