"""The matrix on one release of each API era and the newest; all of them by `python tests/contract/matrix.py`."""

from __future__ import annotations

import shutil

import matrix
import pytest
import wheels

from shim import upstream
from shim.patches import PATCHES

ERAS = wheels.some("0.16.0", "0.19.1", "0.23.0", "0.33.0", more=("0.26.0",))


@pytest.fixture(scope="module", params=ERAS)
def release(request):
    return request.param, matrix.examine(request.param)


def test_every_patch_stands(release):
    version, found = release
    assert found["problems"] == []
    assert set(found["cells"]) == {p.name for p in PATCHES}
    assert set(found["cells"].values()) <= set(matrix.GOOD)
    assert not upstream.unsupported(version)


def test_the_snapshots_know_what_is_replaced(release):
    version, found = release
    assert len(found["shapes"]) > 8
    assert matrix.drift(version, found["shapes"], matrix.known()) == []


def test_readme_has_the_table():
    text = matrix.README.read_text()
    for patch in PATCHES:
        assert text.count(f"| `{patch.name}` |") == 2  # what it does, and where it stood
    for version in ERAS:
        assert version in text.partition("<!-- versions -->")[2].partition("<!-- /versions -->")[0]


def test_a_symbol_renamed_upstream_is_a_problem_and_drift(tmp_path):
    """A copy of the newest release's sources, with one method renamed and the body of another changed."""
    newest = ERAS[-1]
    shutil.copytree(wheels.sources(newest) / "vllm", tmp_path / "vllm", ignore=shutil.ignore_patterns("*.pyc.*"))
    for path, old, new in (
        ("v1/worker/worker_base.py", "def initialize_from_config(", "def initialize_from_configs("),
        (
            "engine/arg_utils.py",
            "def create_engine_config(\n        self,",
            "def create_engine_config(\n        self, /,",
        ),
    ):
        file = tmp_path / "vllm" / path
        source = file.read_text()
        assert source.count(old) == 1
        file.write_text(source.replace(old, new))
    found = matrix.examine("9.9.9", tmp_path)
    assert found["cells"]["closing_gate"] == "failed"
    assert any("WorkerWrapperBase.initialize_from_config does not exist" in line for line in found["problems"])
    (line,) = matrix.drift("9.9.9", found["shapes"], matrix.known())
    assert line.startswith("vllm.engine.arg_utils.EngineArgs.create_engine_config(self, /, ")
    assert "signature is new; known: (self, " in line


SHAPES = {"m.f": ["(a)", "1"], "m.g": ["(b)", "2"]}


def test_drift_and_merge():
    snapshots = matrix.merge({}, {"0.16.0": {"shapes": SHAPES}, "0.17.0": {"shapes": SHAPES}})
    assert snapshots == {"m.f": {"(a)": {"1": ["0.16.0", "0.17.0"]}}, "m.g": {"(b)": {"2": ["0.16.0", "0.17.0"]}}}
    assert matrix.drift("0.18.0", SHAPES, snapshots) == []
    changed = {"m.f": ["(a, c)", "1"], "m.g": ["(b)", "3"]}
    assert matrix.drift("0.18.0", changed, snapshots) == [
        "m.f(a, c): signature is new; known: (a)",
        "m.g: body 3 is new; known: 2",
    ]
    later = matrix.merge(snapshots, {"0.17.0": {"shapes": changed}})
    assert later["m.f"] == {"(a)": {"1": ["0.16.0"]}, "(a, c)": {"1": ["0.17.0"]}}
    assert matrix.drift("0.17.0", {"m.g": ["(b)", "2"]}, later) == ["m.g: body 2 is new; known: 2, 3"]


def test_columns_are_runs_of_equal_releases(monkeypatch):
    monkeypatch.setattr(matrix, "NAMES", ["one", "two"])
    cells = {"0.1.0": "applied", "0.2.0": "applied", "0.10.0": "upstream"}
    found = {v: {"cells": {"one": cell, "two": "unneeded"}, "problems": []} for v, cell in cells.items()}
    assert matrix.table(found).splitlines()[:3] == [
        "| patch | 0.1.0 to 0.2.0 | 0.10.0 |",
        "|---|---|---|",
        "| `one` | applied | upstream |",
    ]
