"""GGUF quantisation as vLLM loads it. Importing a module of this package imports vLLM."""
