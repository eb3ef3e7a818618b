"""glm5-shim: patches an unmodified vLLM wheel, as it loads, so that it serves GLM-5 from a GGUF."""

__version__ = "0.1.0"
