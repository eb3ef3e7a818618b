"""Experts with weights in GGML blocks."""
