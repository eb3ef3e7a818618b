"""One folder per op. Nothing here knows of vLLM or of the patches."""
