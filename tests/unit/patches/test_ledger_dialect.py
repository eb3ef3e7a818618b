"""Every file in shim/patches speaks one dialect: the header's labels, the order of PATCH's fields, light imports."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shim.patch import Patch, Verdict
from shim.patches import PATCHES

FOLDER = Path(__file__).parents[3] / "shim" / "patches"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")
LABELS = ["Target:", "Why:", "How:", "Delete:"]
FIELDS = [field.name for field in dataclasses.fields(Patch)]
HEAVY = ("torch", "vllm", "numpy", "gguf")


def header_problem(source: str) -> str:
    """What is wrong with the docstring of a patch file; "" if it has the four labelled paragraphs, and nothing else."""
    text = ast.get_docstring(ast.parse(source), clean=False) or ""
    labels = []
    for number, line in enumerate(text.rstrip().split("\n")):
        if line[:8].strip() and line[7:8] == " " and line[8:9].strip():
            labels.append(line[:8].rstrip())
        elif line.strip() and (line[:8].strip() or not line[8:9].strip()):
            return f"line {number + 1} is neither a label padded to 8 columns nor indented by 8: {line!r}"
        elif not line.strip() and number != 1:
            return f"line {number + 1} is empty; only the one after Target may be"
    return "" if labels == LABELS else f"the labels are {labels}, expected {LABELS}"


def fields_problem(source: str) -> str:
    """What is wrong with the keywords of `PATCH = Patch(...)`; "" if they are in the order of the dataclass."""
    calls = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["PATCH"]
    ]
    if len(calls) != 1 or not isinstance(calls[0], ast.Call) or ast.unparse(calls[0].func) != "Patch":
        return "no single `PATCH = Patch(...)`"
    given = [keyword.arg for keyword in calls[0].keywords]
    expected = [name for name in FIELDS if name in given]
    return "" if given == expected else f"the fields are {given}, expected {expected}"


def imports_problem(source: str) -> str:
    """The heavy modules that a file imports at its top; "" if none."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return ", ".join(sorted(names & set(HEAVY)))


def heavy_imports(*modules: str) -> list[str]:
    """The heavy modules that a fresh Python has loaded after it imported `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(FOLDER.parents[1])!r}); {code}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def owned_twice(patches: tuple[Patch, ...]) -> list[str]:
    """Symbols that two patches replace."""
    owners = Counter(f"{patch.target}.{symbol}" for patch in patches for symbol in patch.replaces)
    return [symbol for symbol, count in owners.items() if count > 1]


def field_values_problem(patch: Patch) -> str:
    """What the engine does not check in a patch's fields; "" if nothing is wrong."""
    if not set(patch.optional) <= set(patch.replaces):
        return "optional names a symbol that replaces does not"
    if not patch.delete.startswith(("when ", "never: ")):
        return f"delete does not begin with when or never: {patch.delete}"
    last_names = {symbol.rpartition(".")[2] for symbol in patch.replaces}
    if not {importer.partition(":")[2] for importer in patch.importers} <= last_names:
        return "importers name a symbol that replaces does not"
    return ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_patch_file(path):
    source = path.read_text()
    assert header_problem(source) == ""
    assert fields_problem(source) == ""
    assert imports_problem(source) == ""


def test_the_ledger_lists_every_file_under_its_name():
    assert sorted(patch.name for patch in PATCHES) == [path.stem for path in FILES]
    for patch in PATCHES:
        assert patch.probe.__module__ == patch.apply.__module__ == f"shim.patches.{patch.name}"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_fields_make_sense(patch):
    assert field_values_problem(patch) == ""


def test_a_symbol_has_one_owner():
    assert owned_twice(PATCHES) == []


def test_all_patches_together_import_nothing_heavy():
    assert heavy_imports("shim.patches") == []


# each check can fail

HEADER = '"""Target: vllm.one\n\nWhy:    it\n        breaks.\nHow:    so.\nDelete: when it works.\n"""\n'


def test_the_header_check_accepts_its_own_form():
    assert header_problem(HEADER) == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("Target: vllm", "A title.\n\nTarget: vllm"), "line 1 is neither"),
        (("How:    so.\n", ""), "the labels are"),
        (("Why:", "Symptom:"), "line 3 is neither"),
        (("How:    so.", "How:   so."), "line 5 is neither"),
        (("        breaks", "       breaks"), "line 4 is neither"),
        (("        breaks", "         breaks"), "line 4 is neither"),
        (("How:    so.\nDelete: when it works.", "Delete: when it works.\nHow:    so."), "the labels are"),
        (("works.\n", "works.\n\nMore.\n"), "line 7 is empty"),
    ],
)
def test_the_header_check_can_fail(change, problem):
    assert HEADER.count(change[0]) == 1
    assert problem in header_problem(HEADER.replace(*change))


def test_a_file_without_a_header_is_found():
    assert header_problem("NAME = 1\n") != ""


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("PATCH = Patch(name=1, target=2, replaces=3, why=4)", ""),
        ("PATCH = Patch(name=1, target=2, why=4, replaces=3)", "the fields are"),
        ("PATCH = Patch(name=1, target=2, because=4)", "the fields are"),
        ("PATCH = make()", "no single"),
        ("PATCHES = Patch(name=1)", "no single"),
    ],
)
def test_the_field_check_can_fail(source, problem):
    assert fields_problem(source).startswith(problem) and bool(fields_problem(source)) is bool(problem)


def test_the_import_checks_can_fail():
    assert imports_problem("import torch.nn\nfrom vllm.config import x\nimport numpyro") == "torch, vllm"
    assert imports_problem("def f():\n    import torch") == ""
    assert heavy_imports("shim.gguf.quantize") != []


def patch(**changes) -> Patch:
    fields = {"name": "one", "target": "vllm", "why": "", "delete": "when it works", "tested": ""}
    return Patch(**(fields | {"probe": lambda m: Verdict.apply(), "apply": lambda m: {}} | changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"replaces": ("f", "A.g"), "optional": ("f",), "importers": ("m:g",)}, ""),
        ({"replaces": ("f",), "optional": ("g",)}, "optional names"),
        ({"replaces": ("f",), "importers": ("m:g",)}, "importers name"),
        ({"delete": "none; delete when it works"}, "delete does not begin"),
    ],
)
def test_the_value_check_can_fail(changes, problem):
    found = field_values_problem(patch(**changes))
    assert found.startswith(problem) and bool(found) is bool(problem)


def test_the_owner_check_can_fail():
    assert owned_twice((patch(replaces=("f",)), patch(name="two", replaces=("g", "f")))) == ["vllm.f"]
