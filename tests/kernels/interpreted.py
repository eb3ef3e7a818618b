"""Without a GPU, a `test_*_kernel.py` runs under Triton's interpreter, in a new process.

The interpreter must be switched on before anything imports Triton, and must stay off for the other tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU itself")


def run(name: str, least: int = 30) -> None:
    """All tests of the file that need no GPU must pass, and they must be at least `least`."""
    pytest.importorskip("triton")
    options = ["-o", "addopts=--import-mode=importlib", "--durations=5", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name(name))]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least, done.stdout
