"""The receiving side of a weight sync on a GPU, as functions for a process of its own."""

from __future__ import annotations

from typing import Any

import torch

from helpers.rollouts import PAD, ids_of, make_requests, sampling
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.generation.engine import NativeRollout
from lockstep.models.load import Head, load_model, share_structure
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, received

CUDA = torch.device("cuda")


def receive(offer: WeightOffer) -> tuple[Manifest, dict[str, Any]]:
    """What has arrived: its manifest, and the values."""
    weights = received(offer, CUDA)
    tensors = {name: tensor.cpu() for name, tensor in weights}
    return weights.manifest, {name: tensor.float().tolist() for name, tensor in tensors.items()}


def gpu_rollout(path: str) -> Any:
    """The native engine on the GPU, over the model in a folder."""
    model = load_model(ModelConfig(path=path), Head.LANGUAGE_MODEL, seed=0).to(CUDA)
    section = RolloutConfig(max_num_seqs=16, gpu_memory_utilization=0.1)
    return make_rollout(share_structure(model, NativeRollout.attention), section, PAD)


def receive_and_generate(path: str, offer: WeightOffer) -> tuple[Manifest, list[list[int]]]:
    """The engine's manifest after it has taken the weights, and its greedy tokens with them."""
    rollout = gpu_rollout(path)
    manifest = rollout.receive(offer, CUDA)
    return manifest, ids_of(rollout.generate(make_requests(), sampling(temperature=0.0)))


def receive_sum(offer: WeightOffer) -> float:
    """The sum of all tensors that have arrived."""
    return sum(float(tensor.sum()) for _, tensor in received(offer, CUDA))
