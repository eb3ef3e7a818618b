"""y = x . W^T with W in GGML blocks."""
