"""The parts of a policy's worker: the actor, the reference and the rollout.

Where the rollout's weights come from:

```text
in this process (native, hf), with an actor     SharedWeights: the actor's own tensors
in this process, alone                          its own module, which receives weights from the actor's workers
in a separate process (vllm, sglang)            SentWeights from the actor here, or received from the actor's workers
```
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, RolloutConfig, choose_weight_sync
from lockstep.config.engine import ModelConfig
from lockstep.models.load import Head, load_model, share_structure
from lockstep.models.packing import Budget
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.rollout.base import ModuleRollout, RolloutEngine
from lockstep.workers.rollout.registry import check_installed, get_rollout, make_rollout, process_rollout
from lockstep.workers.rollout.request import DecodeText
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, WeightSender
from lockstep.workers.weight_sync.source import SentWeights, SharedWeights, make_sender


class ActorPart:
    """The policy that learns, and how its weights reach a rollout in other workers. The rollout computes in `dtype`."""

    def __init__(self, engine: TrainEngine, config: ActorRolloutRefConfig, dtype: torch.dtype) -> None:
        self.engine = engine
        self.budget = actor_budget(config)
        self._rollout_config = config.rollout
        self._dtype = dtype
        self._sender: WeightSender | None = None
        """The sender of the running sync; on rank 0 only."""

    def cast_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) in the type of the rollout. A collective."""
        for name, tensor in self.engine.export_weights():
            yield name, tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor

    def offer(self, method: str, version: int, num_receivers: int, rank: int) -> WeightOffer | None:
        """Begin a sync, after ending a running one. Return the offer for the receivers, from rank 0 (None from the others)."""
        self.withdraw()
        if rank == 0:
            self._sender = make_sender(method, self._rollout_config, version, num_receivers, self.engine.device)
        if method != "broadcast":
            self.send()
        return self._sender.offer() if self._sender is not None else None

    def send(self) -> Manifest | None:
        """Send the weights. Return their manifest, from rank 0 (None from the others)."""
        if self._sender is not None:
            return self._sender.send(self.cast_weights())
        for _ in self.cast_weights():
            pass
        return None

    def withdraw(self) -> None:
        """End the sync and free its memory. May be called again."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def actor_budget(config: ActorRolloutRefConfig) -> Budget:
    """Return the size of the actor's micro-batches."""
    return Budget(config.actor.max_tokens, config.actor.ppo_micro_batch_size_per_gpu)


@dataclass(frozen=True)
class ReferencePart:
    """The policy that training started from: a separate engine, or the actor's engine without its adapters."""

    engine: TrainEngine
    budget: Budget
    active: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the engine is the reference."""


def reference_budget(config: ActorRolloutRefConfig) -> Budget:
    """Return the size of the reference's micro-batches."""
    ref = config.ref
    tokens = ref.log_prob_max_token_len_per_gpu or config.actor.max_tokens
    return Budget(tokens, ref.log_prob_micro_batch_size_per_gpu)


@dataclass(frozen=True)
class RolloutPart:
    """An engine that generates, with its own weights or those of the actor in the same worker."""

    engine: RolloutEngine
    borrowed: Callable[[], AbstractContextManager[int]] = lambda: nullcontext(0)
    """Context in which the engine has its present weights; gives the number of bytes that were copied for it."""


@dataclass(frozen=True)
class RolloutChoice:
    """How a worker generates, chosen before any model is loaded."""

    attention: str | None
    """The attention function of a module in this process; None for an engine in a separate process."""
    weight_sync: str | None
    """How the weights of an actor in this worker reach the engine; None without an actor."""


def choose_rollout(config: RolloutConfig, *, hybrid: bool, cuda: bool) -> RolloutChoice:
    """Return how the worker generates; `hybrid` if it has the actor too.

    Raise ConfigError if the engine is not installed or `config.weight_sync` cannot work.
    """
    check_installed(config.name)
    kind = get_rollout(config.name)
    method = None
    if hybrid:
        method = choose_weight_sync(config.weight_sync, config.name, hybrid=True, same_process=False, same_machine=True, cuda=cuda)
    return RolloutChoice(kind.attention if issubclass(kind, ModuleRollout) else None, method)


def make_rollout_part(
    choice: RolloutChoice,
    config: ActorRolloutRefConfig,
    actor: ActorPart | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    pad_token_id: int,
) -> RolloutPart:
    """Load or start the chosen engine. Raises what `make_rollout` and ProcessRollout raise."""
    decode_text = _decode_text(config.model) if config.rollout.stop else None
    if choice.attention is None:
        process = process_rollout(config.rollout.name)(config.model, config.rollout, pad_token_id, device, dtype, decode_text)
        method = choice.weight_sync
        if actor is None or method is None:
            return RolloutPart(process)
        sender = functools.partial(make_sender, method, config.rollout, num_receivers=1, device=device, same_device=True)
        return RolloutPart(process, SentWeights(process, actor.cast_weights, sender, device).borrowed)
    if actor is None:
        model = load_model(config.model, Head.LANGUAGE_MODEL, seed)
        module = share_structure(model, choice.attention).to(device, dtype)  # type: ignore[arg-type]
        return RolloutPart(make_rollout(module, config.rollout, pad_token_id, decode_text))
    weights = SharedWeights(actor.engine, dtype)
    with weights.borrowed():
        engine = make_rollout(weights.decoder, config.rollout, pad_token_id, decode_text)
    engine.own_weights = weights.keeps_copy
    return RolloutPart(engine, weights.borrowed)


def _decode_text(model: ModelConfig) -> DecodeText:
    """Return the decoder for stop strings; the tokenizer is loaded only for them."""
    tokenizer = hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
