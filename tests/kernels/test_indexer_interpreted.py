"""`test_indexer_kernel.py` without a GPU. It is a separate file, so that two of these run at a time."""

import interpreted


@interpreted.without_gpu
def test_kernel_under_the_interpreter():
    interpreted.run("test_indexer_kernel.py")
