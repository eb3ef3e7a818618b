"""Sparse MLA backends that vLLM loads by path. Each module of this package imports vLLM."""

MEMBER = "TRITON_MLA_SPARSE"  # the name of our backend in vLLM's registry, on its command line and in its logs
