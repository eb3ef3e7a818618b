"""A worker without the shim, or with a patch undone, refuses to serve: real engine, real child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_env import ROOT, server_env

LOST = """
import json, os, sys
if __name__ == "__main__":
    from vllm import LLM  # once: it takes longer than the rest
    for name, variables, options in json.loads(sys.argv[2]):
        if os.fork():
            os.wait()
            continue
        out = os.open(name, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(variables)
        try:
            LLM(model=sys.argv[1], dtype="float32", max_model_len=256, skip_tokenizer_init=True, **options)
        except Exception as problem:
            print("refused:", type(problem).__name__)
        else:
            print("SERVES")
        break
"""

UNDO = """
import vllm.model_executor.layers.sparse_attn_indexer as module

class Undo:
    '''A worker extension, as users write them; it happens to put a function of vLLM's back.'''

module.SparseAttnIndexer.forward_native = lambda self, *args: self.topk_indices_buffer
module.SparseAttnIndexer.forward_cpu = module.SparseAttnIndexer.forward_native
"""

MESSAGES = {
    "no shim": "glm5-shim: this process got a GLM-5 engine config but was started without the shim",
    "another patch set": "Use one installation and the same GLM5_SHIM_SKIP everywhere.",
    "patch undone": "glm5-shim: cpu_indexer_op was undone: ",
}


@pytest.fixture(scope="module")
def said(tiny, tmp_path_factory) -> dict[str, str]:
    """What an engine said whose workers lost something on the way."""
    place: Path = tmp_path_factory.mktemp("lost")
    (place / "undo.py").write_text(UNDO)
    elsewhere = place / "elsewhere"  # what a worker has who lost the shim, but whose torchvision fits its torch
    elsewhere.mkdir()
    (elsewhere / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torchvision', 'torchaudio', 'torchcodec'):\n    sys.modules[name] = None\n"
    )
    losses = [
        ("no shim", {"PYTHONPATH": str(elsewhere)}, {}),
        ("another patch set", {"GLM5_SHIM_SKIP": "cpu_rotary"}, {}),
        ("patch undone", {}, {"worker_extension_cls": "undo.Undo"}),
    ]
    (place / "main.py").write_text(LOST)
    env = server_env(
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, place))),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        GLM5_SHIM_STATE_DIR=str(place / "state"),
        GLM5_SHIM_CACHE_DIR=str(place / "cache"),
    )
    command = [sys.executable, str(place / "main.py"), str(tiny), json.dumps(losses)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=place)
    return {name: (place / name).read_text() if (place / name).exists() else done.stderr for name, *_ in losses}


@pytest.mark.parametrize("loss", MESSAGES)
def test_it_refuses_and_says_why(said, loss):
    assert "refused: " in said[loss] and "SERVES" not in said[loss], said[loss][-4000:]
    assert MESSAGES[loss] in said[loss]
