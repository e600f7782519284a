"""How the weights that are trained reach the weights that generate: shared, ipc, broadcast or disk."""
