"""Models: Hugging Face modules loaded for training or decoding, our attention functions, and what is read off a forward pass."""
