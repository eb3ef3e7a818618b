"""A worker without the shim, or with a patch undone, refuses to serve: real engine, real child processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from child_env import ROOT, server_env

LOST = """
import os, sys
if __name__ == "__main__":
    {loss}
    from vllm import LLM
    try:
        LLM(model=sys.argv[1], dtype="float32", max_model_len=256, skip_tokenizer_init=True, {options})
    except Exception as problem:
        print("refused:", type(problem).__name__)
    else:
        print("SERVES")
"""

UNDO = """
import vllm.model_executor.layers.sparse_attn_indexer as module

class Undo:
    '''A worker extension, as users write them; it happens to put a function of vLLM's back.'''

module.SparseAttnIndexer.forward_native = lambda self, *args: self.topk_indices_buffer
module.SparseAttnIndexer.forward_cpu = module.SparseAttnIndexer.forward_native
"""


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            "os.environ['PYTHONPATH'] = os.path.join(os.path.dirname(__file__), 'elsewhere')",
            "",
            "glm5-shim: this process got a GLM-5 engine config but was started without the shim",
        ),
        (
            "os.environ['GLM5_SHIM_SKIP'] = 'cpu_rotary'",
            "",
            "Use one installation and the same GLM5_SHIM_SKIP everywhere.",
        ),
        ("pass", "worker_extension_cls='undo.Undo'", "glm5-shim: cpu_indexer_op was undone: "),
    ],
    ids=["no shim", "another patch set", "patch undone"],
)
def test_it_refuses_and_says_why(tiny, tmp_path, loss, options, message):
    (tmp_path / "undo.py").write_text(UNDO)
    elsewhere = tmp_path / "elsewhere"  # what a worker has who lost the shim, but whose torchvision fits its torch
    elsewhere.mkdir()
    (elsewhere / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torchvision', 'torchaudio', 'torchcodec'):\n    sys.modules[name] = None\n"
    )
    (tmp_path / "main.py").write_text(LOST.format(loss=loss, options=options))
    env = server_env(
        PYTHONPATH=f"{ROOT}:{tmp_path}",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        GLM5_SHIM_STATE_DIR=str(tmp_path / "state"),
        GLM5_SHIM_CACHE_DIR=str(tmp_path / "cache"),
    )
    command = [sys.executable, str(tmp_path / "main.py"), str(tiny)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert "refused: " in done.stdout and "SERVES" not in done.stdout, said[-4000:]
    assert message in said
