"""transformers.generate: the slow reference."""
