"""Reading a GLM-5 GGUF: pure, testable without vLLM. Start at `files.open_model`."""
