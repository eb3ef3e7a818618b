"""What vLLM's Ray executors do up to a loaded model, on CPU workers: `ray_driver.py RayWorkerWrapper|RayWorkerProc
GGUF`, under `glm5-shim wrap`. Prints, as JSON, what two workers say of themselves before and after.

RayWorkerProc ends at its constructor, which has the config: what comes after needs the executor's message queues.
"""

from __future__ import annotations

import inspect
import json
import os
import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def state(worker: object = None) -> dict[str, object]:
    import os
    import sys

    shim = sys.modules.get("shim.process")
    engine = shim.engine() if shim else None
    return {
        "pid": os.getpid(),
        "shim": engine is not None,
        "environment": {k: v for k, v in os.environ.items() if k.startswith("GLM5_SHIM")},
        "applied": [n for n, r in engine.records.items() if r.state.value == "applied"] if engine else [],
    }


def main(kind: str, model: str) -> None:
    import cloudpickle
    import ray
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port

    config = EngineArgs(
        model=model, max_model_len=64, tensor_parallel_size=1, enforce_eager=True
    ).create_engine_config()
    ray.init(address=os.environ["RAY_ADDRESS"], logging_level="error", log_to_driver=False)
    if kind == "RayWorkerWrapper":
        from vllm.ray.ray_env import get_env_vars_to_copy
        from vllm.v1.executor.ray_utils import RayWorkerWrapper

        workers = [ray.remote(num_cpus=1)(RayWorkerWrapper).remote(rpc_rank=0) for _ in range(2)]

        def every(method: object, arguments: list[tuple[object, ...]]) -> list[dict[str, object]]:
            sent = method if isinstance(method, str) else cloudpickle.dumps(method)
            return ray.get([w.execute_method.remote(sent, *a) for w, a in zip(workers, arguments, strict=True)])

        before = every(state, [(), ()])
        # PYTHONPATH names the shim's directory here; vLLM never copies it
        copied = {name: os.environ[name] for name in get_env_vars_to_copy() if name in os.environ}
        assert "PYTHONPATH" not in copied
        every("update_environment_variables", [([copied],)] * 2)
        alone = [{"local_rank": 0, "rank": 0, "is_driver_worker": True, "vllm_config": config} for _ in workers]
        for one in alone:  # two engines of one worker each
            one["distributed_init_method"] = get_distributed_init_method("127.0.0.1", get_open_port())
        every("init_worker", [([one],) for one in alone])
        every("init_device", [(), ()])
        every("load_model", [(), ()])
        after = every(state, [(), ()])
    else:
        from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

        class Probe(RayWorkerProc):
            def state(self) -> dict[str, object]:
                return state()

        # the driver's variables come later, with initialize_worker
        before = ray.get([ray.remote(num_cpus=1)(state).remote() for _ in range(2)])
        accepted = inspect.signature(RayWorkerProc.__init__).parameters
        arguments = {name: None for name in accepted if name not in ("self", "vllm_config")}
        probe = ray.remote(num_cpus=1)(Probe)
        workers = [probe.remote(vllm_config=config, **arguments) for _ in range(2)]
        after = ray.get([w.state.remote() for w in workers])
    ray.shutdown()
    print(json.dumps([before, after]))


if __name__ == "__main__":
    main(*sys.argv[1:])
