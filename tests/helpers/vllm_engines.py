"""vLLM engines on tiny models, for tests/vllm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import save_tiny_model, tiny_model
from lockstep.backends.vllm.engine import VLLMRollout
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.embedded.task import make_tokenizer
from lockstep.errors import ConfigError
from lockstep.workers.rollout.registry import check_installed

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 512}
"""vLLM has no CPU kernel for smaller heads."""


def _is_installed() -> bool:
    try:
        check_installed("vllm")
    except ConfigError:
        return False
    return True


needs_vllm = pytest.mark.skipif(not _is_installed(), reason="vLLM is not installed; make test-vllm installs it")


def model(seed: int = 0) -> Any:
    """A tiny model that vLLM can compute on a CPU."""
    return tiny_model(seed=seed, **SHAPE)


def save_model(folder: Path, seed: int = 0) -> str:
    """The same as a folder."""
    return save_tiny_model(folder, seed=seed, **SHAPE)


def text(ids: list[int]) -> str:
    """What vLLM's own process decodes with too."""
    return str(make_tokenizer().decode(ids, skip_special_tokens=False))


def start(path: str, dtype: torch.dtype = torch.float32, **config: Any) -> VLLMRollout:
    """An engine that starts soon."""
    section = RolloutConfig(name="vllm", enforce_eager=True, **{"max_num_seqs": 32} | config)
    return VLLMRollout(ModelConfig(path=path), section, 0, CPU, dtype, text)
