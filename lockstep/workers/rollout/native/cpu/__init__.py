"""A small C function for attention over pages, compiled where it runs. Without a compiler PyTorch does the work, more slowly."""
