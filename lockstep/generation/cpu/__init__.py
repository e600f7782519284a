"""A decoder layer in C, compiled where it runs. Without a compiler PyTorch does the work, more slowly."""
