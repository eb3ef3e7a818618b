"""Attention of a few chosen tokens over the latent (MLA) cache."""
