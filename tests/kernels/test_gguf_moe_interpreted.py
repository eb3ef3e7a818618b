"""`test_gguf_moe_kernel.py` without a GPU; a file of its own, so that two of these run at a time."""

import interpreted


@interpreted.without_gpu
def test_kernel_under_the_interpreter():
    interpreted.run("test_gguf_moe_kernel.py", least=20)
