"""Native generation: continuous batching over the trainer's own weights."""
