"""The environment in which tests start vLLM: nothing of the user's shim, and no two engines bound to the same core."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def server_env(**more: str) -> dict[str, str]:
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("GLM5_SHIM") and k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    }
    return env | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines at a time would be bound to the same core
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


def ledgers(state: Path) -> list[dict[str, Any]]:
    """What the engine's processes wrote. vLLM looks at the model class in a further child, once per machine."""
    found = [json.loads(path.read_text()) for path in state.glob("*.json")]
    return [ledger for ledger in found if ledger["role"] != "model inspection"]
