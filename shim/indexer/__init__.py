"""The DSA indexer. `choice` and `probe` find out whose kernels run. `triton` and `cpu` lead vLLM's calls to ours.

`triton` and `cpu` import torch, and `cpu` imports vLLM.
"""
