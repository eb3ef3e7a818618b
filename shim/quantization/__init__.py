"""GGUF quantisation as vLLM loads it. Each module of this package imports vLLM."""
