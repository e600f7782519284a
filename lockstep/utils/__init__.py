"""Helpers that know nothing of the rest of Lockstep: datasets, scores of strings, tokenizers, files."""
