"""The plan of the house: which rooms there are, which way imports run between them, and how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SHIM = Path(__file__).parents[2] / "shim"
ROOMS = {"commands", "patches", "attention", "indexer", "quantization", "kernels", "gguf"}
ENGINE_ROOM = {"activate", "process", "patch", "engine", "ledger", "latch", "upstream", "env"}
LEAVES = {"process", "patch", "ledger", "latch", "upstream", "env"}
# what the files of a room may import besides their own room and the leaves
ARROWS = {
    "commands": {"activate", "engine", "patches", "attention", "indexer", "quantization", "kernels", "gguf"},
    "activate": {"engine", "patches", "gguf"},
    "engine": set(),
    "patches": {"attention", "indexer", "quantization", "kernels", "gguf"},
    "attention": {"kernels", "gguf"},
    "indexer": {"attention", "kernels", "gguf"},  # its reference on the CPU is a backend of vLLM's too
    "quantization": {"kernels", "gguf"},
    "kernels": set(),
    "gguf": set(),
    **{leaf: set() for leaf in LEAVES},
}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 80


def sources() -> dict[str, str]:
    """Module name -> source, of every file in shim/."""
    found = {}
    for path in SHIM.rglob("*.py"):
        parts = path.relative_to(SHIM.parent).with_suffix("").parts
        if "_bootstrap" not in parts:
            found[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def imports(source: str, modules: set[str]) -> Iterator[str]:
    """The modules among `modules` that a file imports: at its top, in functions, and for type checkers alike."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in inner if name in modules)
            if node.module in modules and not all(name in modules for name in inner):
                yield node.module


def graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Each file's imports. A package's list of its own files (`patches/__init__.py`) is no arrow back from them."""
    return {name: set(imports(source, set(files))) - {name, "shim"} for name, source in files.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def wrong_arrows(arrows: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in arrows.items()
        for other in sorted(others)
        if room(name) and room(other) != room(name) and room(other) not in ARROWS[room(name)] | LEAVES
    ]


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The files of one circle of imports, in order; [] if there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(arrows[name]):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(arrows) if (found := walk(name, []))), [])


def test_the_rooms_are_those_of_the_plan():
    entries = {path.name for path in SHIM.iterdir() if path.name not in ("__pycache__", "_bootstrap")}
    assert entries == ROOMS | {f"{name}.py" for name in ENGINE_ROOM} | {"__init__.py", "CHANGES.md"}


def test_arrows_run_one_way_and_in_no_circle():
    arrows = graph(sources())
    assert wrong_arrows(arrows) == []
    assert circle(arrows) == []


TYPES_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shim.engine import Engine"


@pytest.mark.parametrize(
    ("name", "line", "arrow"),
    [
        ("shim.patches.closing_gate", "def f():\n    from shim import activate", "shim.activate"),
        ("shim.process", TYPES_ONLY, "shim.engine"),
        ("shim.gguf.names", "import shim.kernels.host", "shim.kernels.host"),
        ("shim.attention.impl", "from shim.indexer.choice import Choice", "shim.indexer.choice"),
    ],
)
def test_an_arrow_that_runs_upward_is_found(name, line, arrow):
    files = sources()
    files[name] += f"\n{line}\n"
    assert wrong_arrows(graph(files)) == [f"{name} imports {arrow}"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("shim.kernels.stopwatch", "from shim.kernels import bench"),
        ("shim.gguf.files", "from shim.gguf.names import hf_name"),
    ],
)
def test_a_circle_inside_a_room_is_found(name, line):
    files = sources()
    files[name] += f"\n{line}\n"
    assert name in circle(graph(files))


def test_the_pure_rooms_know_nothing_of_vllm():
    """A bench may load vLLM's native kernels to compare with."""
    for name, source in sources().items():
        if room(name) in ("gguf", "kernels") and not name.endswith(("bench", "native")):
            for node in ast.walk(ast.parse(source)):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert not any(module.split(".")[0] == "vllm" for module in modules), name


def test_nothing_is_too_long_to_fit_in_a_head():
    long = []
    for name, source in sources().items():
        length = source.count("\n")
        long += [f"{name}: {length} lines"] if length > MOST_LINES else []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_kernel(node):
                length = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{name}.{node.name}: {length} lines"] if length > MOST_LINES_OF_A_FUNCTION else []
    assert long == []


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
