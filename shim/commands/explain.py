"""`glm5-shim explain`: which attention backend takes GLM-5 here, and why each of the others does not.

vLLM itself answers. One child process imports it without the shim and another one with the shim. There vLLM's own
`validate_configuration` and `get_attn_backend_cls` judge GLM-5's attention. No GPU is needed: the capability is an
argument, and nothing calls compiled code.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click

from shim import env, process
from shim.commands.wrap import environment
from shim.patches import PATCHES

# GLM-5's geometry, from its config.json, as far as backends and their selector look at it
GLM5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
}
BLOCK_SIZE = 64
DTYPES = ("bfloat16", "float16")
OTHER_PLATFORMS = ("ROCM_", "XPU_", "CPU_")
COMPILED = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C")


class ExplainProblem(Exception):
    """vLLM gave no answer. The message is one line."""


def explain(capability: str = "", kv_cache_dtype: str = "auto", dtype: str = "bfloat16") -> dict[str, Any]:
    """`{"vllm", "capability", "gpu", "kv_cache_dtype", "dtype", "selected": {"without_shim", "with_shim"}, "backends":
    [{"name", "without_shim": {"accepted", "reasons"}, "with_shim": ...}]}`; gpu: has this machine one?

    ExplainProblem if vLLM gives no answer, ValueError for a bad argument.
    """
    question = {
        "capability": env.capability("capability", capability) if capability else None,
        "kv_cache_dtype": kv_cache_dtype,
        "dtype": dtype,
    }
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    known = _cache_dtypes()
    if known and kv_cache_dtype not in known:
        raise ValueError(f"kv-cache-dtype is {kv_cache_dtype!r}, expected one of {', '.join(known)}")
    if env.off():
        process.say(
            "GLM5_SHIM_OFF is set: vLLM runs without the shim; this answer shows all the same what the shim would do"
        )
    process.say("asking vLLM, without and with the shim: about half a minute")
    stock, ours = ask(question, shim=False), ask(question, shim=True)
    if not ours["gpu"]:
        assumed = "" if capability else f"capability {ours['capability']} is assumed, and "
        process.say(f"no GPU here: {assumed}some reasons may be those of this machine or of this build of vLLM")
    absent = {"accepted": False, "reasons": ["not in this vLLM"]}
    return {
        "vllm": ours["vllm"],
        "capability": ours["capability"],
        "gpu": ours["gpu"],
        "kv_cache_dtype": kv_cache_dtype,
        "dtype": dtype,
        "selected": {"without_shim": stock["selected"], "with_shim": ours["selected"]},
        "backends": [
            {"name": name, "without_shim": stock["backends"].get(name, absent), "with_shim": found}
            for name, found in ours["backends"].items()
        ],
    }


def show(found: dict[str, Any]) -> None:
    """Prints what `explain` found, for a person."""
    options = f"KV cache {found['kv_cache_dtype']}, {found['dtype']}"
    click.echo(f"vLLM {found['vllm']}, capability {found['capability']}, {options}")
    for backend in found["backends"]:
        before, after = (_in_words(backend[side]) for side in ("without_shim", "with_shim"))
        click.echo(f"{backend['name']}: {before}" + (f"; with the shim: {after}" if after != before else ""))
    for side, chosen in found["selected"].items():
        click.echo(f"{side.replace('_', ' the ')}: {chosen or 'No valid attention backend found'}")


def _in_words(verdict: dict[str, Any]) -> str:
    return "accepted" if verdict["accepted"] else "; ".join(verdict["reasons"])


def ask(question: dict[str, Any], *, shim: bool) -> dict[str, Any]:
    """The answer of one child, see `_answer`."""
    with tempfile.TemporaryDirectory() as state:
        variables = environment(os.environ) | {"GLM5_SHIM_STATE_DIR": state, "VLLM_LOGGING_LEVEL": "ERROR"}
        variables["GLM5_SHIM_OFF"] = "" if shim else "1"
        # explain asks CUDA's platform alone, so the patches for the CPU wheel stay out
        others = [patch.name for patch in PATCHES if patch.name.startswith("cpu_")]
        variables["GLM5_SHIM_SKIP"] = ",".join([*others, variables.get("GLM5_SHIM_SKIP", "")])
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files importing vLLM takes a minute
        try:
            answer: dict[str, Any] = process.ask_child("shim.commands.explain", question, variables)
        except process.ChildProblem as problem:
            raise ExplainProblem(
                f"vLLM could not be asked {'with' if shim else 'without'} the shim: {problem}"
            ) from None
    return answer


def _cache_dtypes() -> tuple[str, ...]:
    """The values of vLLM's own CacheDType, () without a vLLM. From its source, because an import takes as long as the
    whole answer."""
    spec = find_spec("vllm")
    for place in (spec and spec.submodule_search_locations) or ():
        source = Path(place, "config", "cache.py")
        for node in ast.parse(source.read_text(encoding="utf-8")).body if source.is_file() else ():
            match node:
                case ast.Assign(targets=[ast.Name(id="CacheDType")], value=ast.Subscript(slice=names)):
                    return tuple(ast.literal_eval(names))
    return ()


# in the child


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """`{"vllm", "capability", "gpu", "selected": name or None, "backends": {name: {"accepted", "reasons"}}}`"""
    import torch

    _stand_in(torch)
    import vllm
    import vllm.config.vllm as place
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    found = question["capability"] or (torch.cuda.get_device_capability() if torch.cuda.is_available() else (12, 0))
    capability = DeviceCapability(*found)
    platform: Any = cuda.CudaPlatform
    platform.get_device_capability = classmethod(lambda cls, device_id=0: capability)
    place._current_vllm_config = _config()
    config = AttentionSelectorConfig(
        head_size=GLM5["kv_lora_rank"] + GLM5["qk_rope_head_dim"],
        dtype=getattr(torch, question["dtype"]),
        kv_cache_dtype=question["kv_cache_dtype"],
        block_size=BLOCK_SIZE,
        use_mla=True,
        has_sink=False,
        use_sparse=True,
    )
    classes: dict[str, Any] = {}
    backends: dict[str, Any] = {}
    for name, member in AttentionBackendEnum.__members__.items():
        if "MLA" not in name or name.startswith(OTHER_PLATFORMS):
            continue
        try:
            classes[name] = member.get_class()
            reasons = classes[name].validate_configuration(device_capability=capability, **config._asdict())
        except Exception as problem:  # vLLM's selector describes an ImportError in the same words
            reasons = [f"{type(problem).__name__}: {problem}"]
        backends[name] = {"accepted": not reasons, "reasons": reasons}
    return {
        "vllm": vllm.__version__,
        "capability": f"{capability.major}.{capability.minor}",
        "gpu": torch.cuda.is_available(),
        "selected": _selected(platform, config, classes),
        "backends": backends,
    }


def _selected(platform: Any, config: Any, classes: dict[str, Any]) -> str | None:
    """The name of the backend that vLLM's own selector takes; None if it takes none."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    try:
        chosen = resolve_obj_by_qualname(platform.get_attn_backend_cls(None, config))
    except ValueError:
        return None
    return next((name for name, found in classes.items() if found is chosen), chosen.get_name())


def _stand_in(torch: Any) -> None:
    """Lets vLLM's CUDA backends be imported on a machine without a GPU. With one, nothing is replaced.

    Compiled modules are empty here. Companions of torch, which may be built for another torch, cannot be imported.
    Workspaces that backends allocate as they are imported have no memory behind them.
    """
    from torch.overrides import TorchFunctionMode

    class NoMemory(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            if str(given.get("device", "")).startswith("cuda"):
                given["device"] = "meta"
            return function(*args, **given)

    if torch.cuda.is_available():
        return
    NoMemory().__enter__()  # type: ignore[no-untyped-call]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=1)
    for name in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    # The real ones are not tried first: the CPU wheel's may be built for instructions that this CPU does not have.
    sys.modules.update({name: ModuleType(name) for name in COMPILED})
    from vllm.platforms import interface

    platform: Any = interface.Platform
    platform.num_compute_units = classmethod(lambda cls, device_id=0: 1)


def _config() -> Any:
    """What backends look at in vLLM's current config: GLM-5's geometry, and one rank."""
    from vllm.config import ParallelConfig

    hf_config = SimpleNamespace(**GLM5)
    model = SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config)
    return SimpleNamespace(model_config=model, parallel_config=ParallelConfig())  # a real VllmConfig needs a device


if __name__ == "__main__":
    process.answer_parent(_answer)
