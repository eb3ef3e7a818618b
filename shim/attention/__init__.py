"""Sparse MLA backends that vLLM loads by path. Importing a module of this package imports vLLM."""
