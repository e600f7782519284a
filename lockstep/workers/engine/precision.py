"""The type that an engine computes in."""

import torch


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of the computation: "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
