"""`test_sparse_mla_*kernel.py` without a GPU. It is a separate file, so that two of these run at a time."""

import interpreted


@interpreted.without_gpu
def test_kernel_under_the_interpreter():
    interpreted.run("test_sparse_mla_kernel.py")


@interpreted.without_gpu
def test_shared_gathers_under_the_interpreter():
    interpreted.run("test_sparse_mla_shared_kernel.py", least=25)
