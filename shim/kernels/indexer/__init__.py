"""Scores of the DSA indexer: which tokens a query should attend to."""
