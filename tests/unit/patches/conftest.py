from indexer_fixtures import chosen, kernels, library_of_ops, nothing_chosen, real_ops  # noqa: F401
