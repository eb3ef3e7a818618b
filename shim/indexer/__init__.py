"""The DSA indexer as vLLM calls it: whose kernels run (`choice`, `probe`); adapters to ours (`triton`, `cpu`).

Importing `triton` or `cpu` imports torch, and `cpu` imports vLLM.
"""
