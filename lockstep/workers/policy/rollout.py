"""The rollout: what generates, and where its weights come from.

```text
in this process (native, hf), with an actor     SharedWeights: the actor's own tensors
in this process, alone                          its own module, which receives weights from the actor's workers
in a process of its own (vllm, sglang)          SentWeights from the actor here, or received from the actor's workers
```
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.weight_sync import choose_weight_sync
from lockstep.models.load import Head, load_model, share_structure
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.policy.actor import ActorPart
from lockstep.workers.rollout.base import ModuleRollout, RolloutEngine
from lockstep.workers.rollout.registry import check_installed, get_rollout, make_rollout, process_rollout
from lockstep.workers.rollout.request import DecodeText
from lockstep.workers.weight_sync.source import SentWeights, SharedWeights, make_sender


@dataclass(frozen=True)
class RolloutPart:
    """An engine and where its weights come from: they are its own unless it borrows those of the actor in the same worker."""

    engine: RolloutEngine
    borrowed: Callable[[], AbstractContextManager[int]] = lambda: nullcontext(0)
    """Inside it the engine has its present weights; gives the number of bytes that were copied for it."""


@dataclass(frozen=True)
class RolloutChoice:
    """How a worker generates, decided before anything is loaded."""

    attention: str | None
    """The attention function of a module in this process; None for an engine in a process of its own."""
    weight_sync: str | None
    """How the weights of an actor in this worker reach the engine; None without one."""


def choose_rollout(config: RolloutConfig, *, hybrid: bool, cuda: bool) -> RolloutChoice:
    """`hybrid`: the worker has the actor too. Raises ConfigError for an engine that is not installed, and for a `config.weight_sync`
    that cannot work."""
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
    """Load or start what was chosen. Raises as `make_rollout` and ProcessRollout do."""
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
    """What looks for stop strings; the tokenizer is loaded only for them."""
    tokenizer = hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
