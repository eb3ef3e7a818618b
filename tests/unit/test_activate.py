"""What Ray's workers meet: the seal of an engine config, in processes that were started without the shim."""

from __future__ import annotations

import os
import pickle
import sys
from types import SimpleNamespace

import pytest

from shim import activate, process
from shim.patch import ShimError


@pytest.fixture
def started_without(monkeypatch):
    """This process as one that the shim is not on in; what `activate` was called for is noted."""
    calls = []
    monkeypatch.setattr(process, "_engine", None)
    monkeypatch.setattr(process, "_seal", "")
    monkeypatch.setattr(activate, "activate", lambda: calls.append(dict(os.environ)))
    return calls


def ray(initialized: bool, mode: int, asked: list[str]) -> SimpleNamespace:
    def get_runtime_context():
        asked.append("context")  # starts a cluster where none runs
        return SimpleNamespace(worker=SimpleNamespace(mode=mode))

    return SimpleNamespace(is_initialized=lambda: initialized, get_runtime_context=get_runtime_context, WORKER_MODE=1)


def test_a_process_that_only_imported_ray_starts_no_cluster(started_without, monkeypatch):
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "ray", ray(False, 0, asked))
    with pytest.raises(ShimError, match="started without the shim"):
        activate.unseal("a seal", {})
    assert asked == [] and started_without == []


def test_a_driver_of_ray_is_no_worker(started_without, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ray(True, 0, []))
    with pytest.raises(ShimError, match="started without the shim"):
        activate.unseal("a seal", {})
    assert started_without == []


def test_a_worker_of_ray_is_switched_on_with_the_drivers_variables(started_without, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ray(True, 1, []))
    monkeypatch.setenv("GLM5_SHIM_SKIP", "own")
    monkeypatch.delenv("GLM5_SHIM_INDEXER", raising=False)
    with pytest.raises(ShimError):  # the stand-in for `activate` does not switch on
        activate.unseal("a seal", {"GLM5_SHIM_SKIP": "drivers", "GLM5_SHIM_INDEXER": "triton"})
    monkeypatch.delenv("GLM5_SHIM_INDEXER", raising=False)
    (seen,) = started_without
    assert (seen["GLM5_SHIM_SKIP"], seen["GLM5_SHIM_INDEXER"]) == ("own", "triton")


def test_the_seal_takes_no_interpreter_along(monkeypatch):
    monkeypatch.setattr(process, "_engine", SimpleNamespace())
    monkeypatch.setattr(process, "_seal", "a seal")
    monkeypatch.setenv("GLM5_SHIM_PYTHON", "/one/machine:3.11")
    monkeypatch.setenv("GLM5_SHIM_SKIP", "a")
    _, (value, variables) = activate.Seal("a seal").__reduce__()
    assert (value, variables["GLM5_SHIM_SKIP"]) == ("a seal", "a") and "GLM5_SHIM_PYTHON" not in variables
    assert pickle.loads(pickle.dumps(activate.Seal("a seal"))) == "a seal"
