"""What all tests share: which of them this Python can run, and that two run at a time on two cores."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONG = ("e2e", "kernels", "contract", "test_explain.py", "process")
# what these tests need besides the shim's own dependencies; a Python without it leaves them out
NEEDS = {
    "vllm": (
        "e2e",
        "contract",
        "unit/commands/test_explain.py",
        "process/test_children.py",
        "process/test_compile_cache.py",
        "process/test_demo.py",
    ),
    "torch": (
        "kernels",
        "unit/attention",
        "unit/indexer",
        "unit/kernels",
        "unit/patches",
        "unit/quantization",
        "unit/test_torch_compile.py",
        "unit/commands/test_selftest.py",
        "unit/gguf/test_gguf_tensors.py",
        "unit/gguf/test_gguf_quantised_layers.py",
    ),
    "transformers": ("unit/gguf/test_gguf_tokenizer.py",),
    "tokenizers": ("unit/gguf/test_gguf_hf_directory.py", "unit/commands/test_gguf.py"),
}
collect_ignore = [str(HERE / path) for module, paths in NEEDS.items() if find_spec(module) is None for path in paths]

# before torch is imported: threads that wait for each other, with too few cores for all, do so by spinning
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(module, ...): skipped in a Python without one of these modules")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: what one process still has to do when the other is done is short."""
    for item in items:
        for marker in item.iter_markers("needs"):
            missing = [name for name in marker.args if find_spec(name) is None]
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))
    items.sort(key=lambda item: next((n for n, name in enumerate(LONG) if name in item.path.parts), len(LONG)))
