"""Checkpoints on disk: named, published whole or not at all, pruned, found again."""
