"""GGML blocks on the GPU: how they are laid there, and what of them several kernels share."""
