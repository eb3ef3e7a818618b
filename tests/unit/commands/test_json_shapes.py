"""What scripts read of the command line stays: keys and types of each --json answer, names, options, exit codes.

`shapes.json` is made from what an earlier version printed. With tests/unit on PYTHONPATH:

    python tests/unit/commands/test_json_shapes.py --write DIR

DIR/codes has a line "EXIT_CODE WORDS" for each command that was run with --json. DIR/<words>.json has its answer. The
file's name has at most 40 characters, and `_` for all but letters and digits. DIR also has help_<command>___help.txt.
A later version may add keys, checks, patches and options. It may not rename or remove them.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command_line import invoke

from shim import env, ledger, process, upstream
from shim.commands import cli, demo, explain, selftest
from shim.engine import Engine
from shim.patches import PATCHES

SHAPES = Path(__file__).with_name("shapes.json")
BEFORE = json.loads(SHAPES.read_text())
ANY_KEY = ("states", "quant_types")  # objects whose keys are data
TYPES = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


def shape(value: Any, key: str = "") -> Any:
    """Objects with the shape of each value, lists with the one shape that fits all elements, and names of types."""
    if isinstance(value, list):
        return [reduce(both, map(shape, value))] if value else []
    if isinstance(value, dict):
        return (
            {"*": reduce(both, map(shape, value.values()))}
            if key in ANY_KEY
            else {k: shape(value[k], k) for k in value}
        )
    return TYPES[type(value)]


def both(one: Any, other: Any) -> Any:
    """The shape of a value that has either of two shapes."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: both(one.get(key, "absent"), other.get(key, "absent")) for key in one | other}
    if isinstance(one, list) and isinstance(other, list):
        return [both(one[0], other[0])] if one and other else one or other
    return one if one == other else "|".join(sorted({*one.split("|"), *other.split("|")}))


def differences(before: Any, now: Any, where: str = "answer") -> list[str]:
    """What the shape `now` lacks of `before`, or has with another type."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(f"{where}.{key}", before[key], now.get(key, "absent")) for key in before]
        return [line for place, old, new in pairs for line in differences(old, new, place)]
    if isinstance(before, list) and isinstance(now, list) and (now or not before):
        return differences(before[0], now[0], f"{where}[]") if before else []
    if isinstance(before, str) and isinstance(now, str) and {*now.split("|")} <= {*before.split("|")}:
        return []
    return [f"{where} was {before}, and is {now}"]


def write(directory: Path) -> None:
    answers: dict[str, Any] = {}
    for line in (directory / "codes").read_text().splitlines():
        code, _, words = line.partition(" ")
        text = (directory / (re.sub(r"\W", "_", words)[:40] + ".json")).read_text()
        if text.startswith("{"):
            answers[re.sub(r"\S+\.gguf", "MODEL", words)] = {"exit_code": int(code), "found": json.loads(text)}
    shapes = {
        "answers": {words: {"exit_code": a["exit_code"], "shape": shape(a["found"])} for words, a in answers.items()},
        "checks": [check["name"] for check in answers["doctor"]["found"]["checks"]],
        "patches": [[p["name"], p["target"], p["required"]] for p in answers["patches"]["found"]["patches"]],
        "options": {
            path.stem.removeprefix("help_").removesuffix("___help"): options(path.read_text())
            for path in sorted(directory.glob("help_?*___help.txt"))
        },
    }
    SHAPES.write_text(json.dumps(shapes, indent=1) + "\n")


def options(help_text: str) -> list[str]:
    return re.findall(r"^  (--[a-z-]+)", help_text, re.MULTILINE)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without a GPU that has vLLM; nothing of the shim's is set."""
    for name in [variable.name for variable in env.VARIABLES if variable.name != "GLM5_SHIM_STATE_DIR"]:
        monkeypatch.delenv(name, raising=False)
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(upstream, "installed", lambda: "0.32.0")
    monkeypatch.setattr(cli, "find_spec", lambda name: object())
    monkeypatch.setattr(explain, "_cache_dtypes", lambda: ())
    if "torch" in sys.modules:
        monkeypatch.setattr(sys.modules["torch"].cuda, "is_available", lambda: False)


def write_ledger(monkeypatch, state_dir: Path) -> None:
    """What a process of vLLM's leaves: the real engine's records, each patch applied, the closing gate used."""
    Engine(PATCHES)
    with monkeypatch.context() as changed:
        changed.setenv("GLM5_SHIM_STATE_DIR", str(state_dir))
        for patch in PATCHES:
            ledger.record(patch.name, "applied", "")
        ledger.used("closing_gate")


@pytest.fixture
def children(monkeypatch):
    """Each child of the shim's answers at once, from the same code or with the same keys."""

    def answer(module, question, variables):
        if module == "shim.commands.patches":  # importing vLLM takes half a minute
            write_ledger(monkeypatch, Path(variables["GLM5_SHIM_STATE_DIR"]))
            return {}
        if module == "shim.commands.explain":  # the same
            backends = {"TRITON_MLA": {"accepted": False, "reasons": ["sparse not supported"]}}
            selected = None if variables["GLM5_SHIM_OFF"] else "TRITON_MLA_SPARSE"
            if selected:
                backends[selected] = {"accepted": True, "reasons": []}
            rest = {"vllm": "0.32.0", "capability": "12.0", "gpu": False}
            return rest | {"selected": selected, "backends": backends}
        return selftest.run()

    monkeypatch.setattr(process, "ask_child", answer)


@pytest.fixture
def server(monkeypatch, tiny):
    """The demo's server, which needs a minute to start: what it answers, and a ledger of its one process."""

    @contextmanager
    def serve(vllm, model, root, timeout_s, *options, **env):
        write_ledger(monkeypatch, root / "state")
        yield "http://nowhere", 1.0

    def ask(url, **body):
        choice = {"text": " one", "message": {"content": " one"}}
        return {"data": [{"id": "tiny"}], "usage": {"completion_tokens": 1}, "choices": [choice]}

    monkeypatch.setattr("shim.gguf.tiny.write_tiny", lambda root: tiny)
    monkeypatch.setattr(demo, "server", serve)
    monkeypatch.setattr(demo, "ask", ask)
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)  # the test's own handlers stay


@pytest.fixture
def quick_kernels(monkeypatch):
    torch = pytest.importorskip("torch")

    def cases(device, large):
        ones = torch.ones(2)
        yield selftest.Case("sparse_mla", "two", 1e-2, lambda: ones, lambda got: [(ones, got)])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(selftest, "cases", cases)


def ask(words: str, tiny: Path) -> tuple[int, dict[str, Any]]:
    command = [str(tiny) if word == "MODEL" else word for word in words.split()]
    done = invoke([*command, "--json"])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("words", BEFORE["answers"])
def test_keys_types_and_exit_code(words, tiny, children, server, monkeypatch, request):
    if words == "selftest":
        request.getfixturevalue("quick_kernels")
    if "--ledgers" in words:
        write_ledger(monkeypatch, env.state_dir())
    code, found = ask(words, tiny)
    assert differences(BEFORE["answers"][words]["shape"], shape(found)) == []
    assert code == BEFORE["answers"][words]["exit_code"]


def test_names(tiny, children):
    checks = [check["name"] for check in ask("doctor", tiny)[1]["checks"]]
    assert [name for name in checks if name in BEFORE["checks"]] == BEFORE["checks"]
    rows = [[p["name"], p["target"], p["required"]] for p in ask("patches", tiny)[1]["patches"]]
    assert [row for row in BEFORE["patches"] if row not in rows] == []


@pytest.mark.parametrize("command", BEFORE["options"])
def test_options(command):
    text = invoke([command, "--help"]).stdout
    assert [option for option in BEFORE["options"][command] if option not in options(text)] == []


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({"ok": True, "checks": [{"title": "vllm"}]}, "answer.checks[].name was string, and is absent"),
        ({"ok": 1, "checks": [{"name": "vllm"}]}, "answer.ok was boolean, and is number"),
        ({"ok": True, "checks": [{"name": "vllm"}, {}]}, "answer.checks[].name was string, and is absent|string"),
        ({"ok": True, "checks": []}, "answer.checks was [{'name': 'string'}], and is []"),
    ],
)
def test_what_is_renamed_retyped_or_missing_is_seen(now, line):
    before = shape({"ok": True, "checks": [{"name": "vllm"}]})
    assert differences(before, shape({"ok": False, "checks": [{"name": "vllm", "new": 1}], "new": None})) == []
    assert differences(before, shape(now)) == [line]


if __name__ == "__main__":
    write(Path(sys.argv[sys.argv.index("--write") + 1]))
