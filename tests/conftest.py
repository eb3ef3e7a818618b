"""Two tests run at a time, on two cores."""

import os

LONG = ("e2e", "kernels", "contract", "test_explain.py", "process")

# before torch is here: threads that wait for each other, with too few cores for all, do so by spinning
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items):
    """The longest files first: what one process still has to do when the other is done is short."""
    items.sort(key=lambda item: next((n for n, name in enumerate(LONG) if name in item.path.parts), len(LONG)))
