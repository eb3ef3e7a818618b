from gguf_fixtures import make, small_metadata, small_shape, small_tensors, tiny_model  # noqa: F401
