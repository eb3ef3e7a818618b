"""The engine on stand-in modules: every state, every way to fail, every import order."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import wrapt

from shim.engine import Engine
from shim.latch import Latch
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

    monkeypatch.setattr(ledger, "_reported_unwritable", False)
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


def nothing(module):
    return {}


def test_what_needs_a_patch_that_is_off_is_off(target):
    """Also at one remove, and whatever the order; the gate tells all of them."""
    engine = armed(
        patch(target, name="third", replaces=(), apply=nothing, needs=("second",)),
        patch(target, name="first", replaces=(), apply=nothing),
        patch(target, name="second", needs=("first",)),
        patch(target, name="other", replaces=(), apply=nothing),
        skip=frozenset({"first"}),
    )
    assert importlib.import_module(target).answer() == "stock"
    found = {name: (record.state.value, record.detail) for name, record in engine.records.items()}
    assert found == {
        "first": ("off", "in GLM5_SHIM_SKIP"),
        "second": ("off", "needs first, which is off"),
        "third": ("off", "needs second, which is off"),
        "other": ("applied", ""),
    }
    assert engine.left_out().startswith("GLM5_SHIM_SKIP leaves out third, first, second:")


def test_every_patch_that_needs_one_left_out_is_off():
    from shim.patches import PATCHES

    for left_out in PATCHES:
        engine = Engine(PATCHES, frozenset({left_out.name}))
        off = {name for name, record in engine.records.items() if record.state is State.OFF}
        assert off >= {left_out.name} | {p.name for p in PATCHES if left_out.name in p.needs}
    engine = Engine(PATCHES, frozenset({"backend_member"}))
    assert {"backend_choice", "kv_cache_dtype"} <= {n for n, r in engine.records.items() if r.state is State.OFF}


@pytest.mark.parametrize("stands", [Verdict.upstream("has it"), Verdict.unneeded("not here")])
def test_what_vllm_has_itself_can_be_needed(target, stands):
    first = patch(target, name="first", replaces=(), probe=lambda module: stands)
    armed(first, patch(target, needs=("first",)))
    assert importlib.import_module(target).answer() == "ours"


def test_a_symbol_that_a_release_may_lack(target):
    """Where the module has it, the engine replaces it, and the gate looks at it as at any other."""
    fields = {"replaces": ("answer", "Model.make", "Model.absent"), "optional": ("Model.make", "Model.absent")}
    full = {"answer": lambda: "ours", "Model.make": classmethod(lambda cls: "ours")}
    engine = armed(patch(target, **fields, apply=lambda module: full))
    module = importlib.import_module(target)
    assert (module.answer(), module.Model.make()) == ("ours", "ours")
    module.Model.make = classmethod(lambda cls: "theirs")
    with pytest.raises(ShimError, match=r"one was undone: .*Model\.make is not the shim's"):
        engine.check("one")


@pytest.mark.parametrize(
    "replacements", [{"answer": 1}, {"Model.make": 1}, {"answer": 1, "Model.make": 1, "Model.absent": 1}]
)
def test_apply_must_return_each_symbol_that_the_module_has(target, replacements):
    fields = {"replaces": ("answer", "Model.make", "Model.absent"), "optional": ("Model.make", "Model.absent")}
    armed(patch(target, **fields, apply=lambda module: replacements))
    with pytest.raises(ShimError, match=r"apply returned .*, replaces calls for \['Model.make', 'answer'\]"):
        importlib.import_module(target)


class Operators:
    """As torch.ops._C: an operator is stored when it is first looked at."""

    def __getattr__(self, name):
        if name != "select":
            raise AttributeError(name)
        setattr(self, name, lambda: "stock")
        return vars(self)[name]


def test_an_operator_far_below_the_module_is_the_engines(write_module, monkeypatch):
    name = write_module(next(_names), "")
    importlib.import_module(name).ops = Operators()
    engine = armed(
        patch(
            name,
            replaces=("ops.select", "ops.absent"),
            optional=("ops.select", "ops.absent"),
            apply=lambda module: {"ops.select": lambda: "ours"},
        )
    )
    module = sys.modules[name]
    assert module.ops.select() == "ours"
    engine.check()
    module.ops.select = lambda: "theirs"
    with pytest.raises(ShimError, match=r"ops\.select is not the shim's"):
        engine.check()


def test_a_failed_patch_gives_back_every_kind_of_symbol(write_module):
    name = write_module(next(_names), SOURCE)
    module = importlib.import_module(name)
    module.ops = Operators()
    stock = module.ops.select
    ours = {"answer": lambda: 1, "Model.make": classmethod(lambda cls: 1), "ops.select": lambda: 1}
    armed(patch(name, replaces=tuple(ours), apply=lambda module: ours, verify=raising, required=False))
    assert (module.answer(), module.Model.make(), module.ops.select) == ("stock", "stock", stock)


def test_it_comes_up_with_an_old_wrapt(python_code):
    """wrapt 1.x has no BaseObjectProxy: every start died with AttributeError."""
    code = (
        "import wrapt; vars(wrapt).pop('BaseObjectProxy', None); from shim.engine import PROXY; print(PROXY.__name__)"
    )
    assert python_code(code) == "ObjectProxy\n"


def test_a_refused_module_can_be_found_but_not_imported(target):
    """`find_spec` is asked by programs that will never import the module."""
    latch = Latch()
    latch.refused[target] = ShimError("why")
    spec = importlib.util.find_spec(target)
    assert spec is not None and spec.origin.endswith(f"{target}.py")
    for _ in range(2):
        with pytest.raises(ShimError, match="why"):
            importlib.import_module(target)
    latch.refused["stub_that_is_nowhere"] = ShimError("why")
    with pytest.raises(ShimError, match="why"):
        importlib.import_module("stub_that_is_nowhere")


def test_two_commits_do_not_pass_each_others_seal(target, monkeypatch):
    from shim import process

    before = Engine([patch(target)]).seal
    monkeypatch.setattr(process, "identity", lambda: "0.1.0+another")
    assert Engine([patch(target)]).seal != before
