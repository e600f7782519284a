"""FSDP (version 1) and FSDP2, on CPU with gloo or on GPUs with NCCL."""
