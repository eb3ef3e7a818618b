"""The engine on stand-in modules: every state, every way to fail, every import order."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest
import wrapt

from shim.engine import Engine
from shim.patch import Patch, ShimError, State, Verdict

SOURCE = """
def answer():
    return "stock"

class Model:
    def forward(self):
        return "stock"

    @classmethod
    def make(cls):
        return "stock"
"""
_names = (f"stub_target_{n}" for n in itertools.count())


@pytest.fixture
def target(write_module) -> str:
    return write_module(next(_names), SOURCE)


def patch(target: str, **changes) -> Patch:
    """A patch that replaces `answer`; `changes` make it misbehave."""
    fields = {
        "name": "one",
        "target": target,
        "why": "a test",
        "delete": "never",
        "tested": "here",
        "replaces": ("answer",),
        "probe": lambda module: Verdict.apply(),
        "apply": lambda module: {"answer": lambda: "ours"},
    }
    return Patch(**(fields | changes))


def armed(*patches: Patch, skip: frozenset[str] = frozenset()) -> Engine:
    engine = Engine(patches, skip)
    engine.arm()
    return engine


def test_a_patch_waits_then_applies(target):
    engine = armed(patch(target))
    assert engine.records["one"].state is State.WAITING
    assert importlib.import_module(target).answer() == "ours"
    assert engine.records["one"].state is State.APPLIED
    engine.check()


def test_methods_and_classmethods_are_replaced(target):
    both = patch(
        target,
        replaces=("Model.forward", "Model.make"),
        apply=lambda module: {
            "Model.forward": lambda self: "ours",
            "Model.make": classmethod(lambda cls: cls.__name__),
        },
    )
    armed(both)
    module = importlib.import_module(target)
    assert module.Model().forward() == "ours"
    assert module.Model.make() == "Model"


@pytest.mark.parametrize("verdict", [Verdict.upstream("has it"), Verdict.unneeded("no GPU")])
def test_a_probe_can_decline(target, verdict):
    engine = armed(patch(target, probe=lambda module: verdict))
    assert importlib.import_module(target).answer() == "stock"
    record = engine.records["one"]
    assert (record.state.value, record.detail) == (verdict.action.value, verdict.because)
    engine.check()


def test_skip_leaves_the_original(target):
    engine = armed(patch(target), skip=frozenset({"one"}))
    assert importlib.import_module(target).answer() == "stock"
    assert engine.records["one"].state is State.OFF
    engine.check()


def test_an_unknown_signature_stops_the_import_and_every_retry(target):
    engine = armed(patch(target, probe=lambda module: Verdict.unknown("answer takes (x), expected ()")))
    for _ in range(3):
        with pytest.raises(
            ShimError, match=r"one could not be applied .*answer takes \(x\), expected \(\).*GLM5_SHIM_SKIP=one"
        ):
            importlib.import_module(target)
        assert target not in sys.modules
    assert engine.records["one"].state is State.FAILED
    with pytest.raises(ShimError, match="one is failed"):
        engine.check()


def raising(module):
    raise KeyError("boom")


@pytest.mark.parametrize("part", ["probe", "apply", "verify"])
def test_whatever_part_raises_the_process_stops(target, part):
    armed(patch(target, **{part: raising}))
    with pytest.raises(ShimError, match="KeyError: 'boom'"):
        importlib.import_module(target)


def test_the_gate_verifies_again_what_no_symbol_shows(target):
    """A patch that registers something replaces no symbol; only its `verify` can tell that it was undone."""

    def verify(module):
        if not hasattr(module, "registered"):
            raise RuntimeError("no longer registered")

    engine = armed(
        patch(target, replaces=(), apply=lambda module: vars(module).update(registered=1) or {}, verify=verify)
    )
    module = importlib.import_module(target)
    engine.check()
    del module.registered
    with pytest.raises(ShimError, match="one was undone: RuntimeError: no longer registered"):
        engine.check()


def test_the_error_is_no_import_error():
    assert not issubclass(ShimError, ImportError)


def test_an_optional_patch_that_fails_is_undone_and_told(target, capsys):
    engine = armed(patch(target, required=False, verify=raising))
    module = importlib.import_module(target)
    assert module.answer() == "stock"
    assert engine.records["one"].state is State.FAILED
    assert "one could not be applied" in capsys.readouterr().err
    engine.check()


def test_one_failure_does_not_undo_the_others(target, write_module):
    other = write_module(next(_names), SOURCE)
    engine = armed(patch(target, apply=raising), patch(other, name="two"))
    with pytest.raises(ShimError):
        importlib.import_module(target)
    assert importlib.import_module(other).answer() == "ours"
    assert engine.records["two"].state is State.APPLIED


def test_a_symbol_has_one_owner(target):
    with pytest.raises(ValueError, match="one and two"):
        Engine([patch(target), patch(target, name="two")])


def test_apply_must_return_what_replaces_names(target):
    armed(patch(target, apply=lambda module: {}))
    with pytest.raises(ShimError, match="apply returned"):
        importlib.import_module(target)


def test_wrapt_proxies_are_refused(target):
    armed(patch(target, apply=lambda module: {"answer": wrapt.FunctionWrapper(module.answer, lambda f, i, a, k: f())}))
    with pytest.raises(ShimError, match="wrapt proxy"):
        importlib.import_module(target)


def test_needs_must_stand_first(target):
    first = patch(target, name="first", replaces=(), apply=lambda module: {}, probe=lambda module: Verdict.apply())
    armed(patch(target, needs=("first",)), first)  # wrong order
    with pytest.raises(ShimError, match="needs first, which is waiting"):
        importlib.import_module(target)


def test_needs_in_order(target):
    first = patch(target, name="first", replaces=(), apply=lambda module: {})
    armed(first, patch(target, needs=("first",)))
    assert importlib.import_module(target).answer() == "ours"


def test_a_target_imported_before_us_is_patched_with_its_copies(target, write_module):
    importer = write_module(next(_names), f"from {target} import answer\n")
    copy = importlib.import_module(importer)
    engine = armed(patch(target, importers=(f"{importer}:answer",)))
    assert engine.records["one"].state is State.APPLIED
    assert copy.answer() == "ours"
    engine.check()


def test_a_copy_that_is_not_ours_is_found_at_the_gate(target, write_module):
    importer = write_module(next(_names), f"from {target} import answer\n")
    engine = armed(patch(target, importers=(f"{importer}:answer",)))
    copy = importlib.import_module(importer)
    engine.check()
    copy.answer = lambda: "somebody else's"
    with pytest.raises(ShimError, match=f"one was undone: {importer}.answer"):
        engine.check()


def test_a_replacement_that_was_undone_is_found_at_the_gate(target):
    engine = armed(patch(target))
    module = importlib.import_module(target)
    module.answer = lambda: "stock again"
    with pytest.raises(ShimError, match="one was undone"):
        engine.check()


def test_a_half_imported_target_is_late_and_the_gate_refuses(write_module):
    name = next(_names)
    write_module(
        name,
        f"""
        import tests_hold
        tests_hold.arm({name!r})
        def answer():
            return "stock"
        """,
    )
    held = {}

    class Hold:
        @staticmethod
        def arm(target):
            held["engine"] = armed(patch(target))

    sys.modules["tests_hold"] = Hold
    try:
        assert importlib.import_module(name).answer() == "stock"
    finally:
        del sys.modules["tests_hold"]
    assert held["engine"].records["one"].state is State.LATE
    with pytest.raises(ShimError, match="one is late: .* was half imported"):
        held["engine"].check()


def test_a_required_patch_still_waiting_on_a_loaded_target_is_refused(target):
    engine = Engine([patch(target)])  # never armed: as if the hook had been lost
    importlib.import_module(target)
    with pytest.raises(ShimError, match="one is waiting"):
        engine.check()


def test_the_seal_names_the_patch_set(target):
    both = [patch(target), patch(target, name="two", replaces=(), apply=lambda module: {})]
    assert Engine(both).seal == Engine(both).seal
    assert Engine(both).seal != Engine(both, frozenset({"two"})).seal


def test_the_ledger_file_says_it_all(target, tmp_path: Path):
    armed(
        patch(target),
        patch(target, name="two", replaces=("Model.forward",), probe=lambda module: Verdict.unneeded("why")),
    )
    importlib.import_module(target)
    (file,) = (tmp_path / "state").glob("*.json")
    stated = {p["name"]: (p["state"], p["detail"]) for p in json.loads(file.read_text())["patches"]}
    assert stated == {"one": ("applied", ""), "two": ("unneeded", "why")}


def test_an_unwritable_state_dir_costs_one_line(target, monkeypatch, capsys):
    from shim import ledger

    monkeypatch.setattr(ledger, "_told_unwritable", False)
    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", "/proc/nowhere")
    armed(patch(target))
    assert importlib.import_module(target).answer() == "ours"
    assert capsys.readouterr().err.count("cannot write") == 1


def test_only_the_engine_imports_wrapt():
    package = Path(__file__).parents[2] / "shim"
    users = {p.name for p in package.rglob("*.py") if "import wrapt" in p.read_text() or "from wrapt" in p.read_text()}
    assert users == {"engine.py"}


def test_what_a_user_leaves_out_is_said(target, caplog):
    engine = armed(patch(target), patch(target, name="two", replaces=()), skip=frozenset({"two"}))
    assert engine.left_out() == "GLM5_SHIM_SKIP leaves out two: GLM-5's answers can be wrong without it"
    engine.check()
    assert [record.message for record in caplog.records] == [f"glm5-shim: {engine.left_out()}"]
    caplog.clear()
    other = armed(patch(target), patch(target, name="two", replaces=(), required=False), skip=frozenset({"two"}))
    other.check()
    assert other.left_out() == "" and not caplog.records
