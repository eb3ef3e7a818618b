"""Without a GPU, a `test_*_kernel.py` runs under Triton's interpreter, in a process of its own: the choice must be
made before anything imports Triton, and must not be made for the rest of the tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU itself")


def run(name: str, least: int = 30) -> None:
    """All of the file's tests but those that need a GPU must pass, and there must be enough of them."""
    pytest.importorskip("triton")
    options = ["-o", "addopts=--import-mode=importlib", "--durations=5", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name(name))]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least, done.stdout
