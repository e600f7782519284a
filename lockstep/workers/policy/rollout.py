"""The rollout: what generates, and where its weights come from.

```text
in this process (native, hf), with an actor     SharedWeights: the actor's own tensors
in this process, alone                          its own module, which receives weights from the actor's workers
in a process of its own (vllm, sglang)          SentWeights from the actor here, or received from the actor's workers
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.weight_sync import choose_weight_sync
from lockstep.errors import NumericalError
from lockstep.models.load import Head, load_model, share_structure
from lockstep.protocol import DataProto, Ragged
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.policy.actor import ActorPart
from lockstep.workers.rollout.base import Completion, DecodeText, ModuleRollout, Request, RolloutEngine
from lockstep.workers.rollout.registry import check_installed, get_rollout, make_rollout, start_rollout
from lockstep.workers.weight_sync.base import WeightSource
from lockstep.workers.weight_sync.sent import SentWeights, make_sender
from lockstep.workers.weight_sync.shared import SharedWeights


@dataclass(frozen=True, slots=True)
class RolloutPart:
    """An engine and its weights, which are there inside `weights.borrowed()`."""

    engine: RolloutEngine
    weights: WeightSource

    def weights_changed(self) -> None:
        """The actor of this worker has other weights now."""
        self.engine.version += 1
        self.weights.changed()


@dataclass(frozen=True, slots=True)
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
    """Load or start what was chosen. Raises as `make_rollout` and `start_rollout` do."""
    decode_text = _decode_text(config.model) if config.rollout.stop else None
    if choice.attention is None:
        process = start_rollout(config.model, config.rollout, pad_token_id, device, dtype, decode_text)
        return RolloutPart(process, _sent_weights(process, choice, config.rollout, actor, device))
    weights = WeightSource()
    if actor is not None:
        weights = shared = SharedWeights(actor.engine, dtype)
        module, own_weights = shared.decoder, shared.keeps_copy
    else:
        model = load_model(config.model, Head.LANGUAGE_MODEL, seed)
        module, own_weights = share_structure(model, choice.attention).to(device, dtype), True  # type: ignore[arg-type]
    with weights.borrowed():
        engine = make_rollout(module, config.rollout, pad_token_id, decode_text)
    engine.own_weights = own_weights
    return RolloutPart(engine, weights)


def _sent_weights(
    engine: RolloutEngine, choice: RolloutChoice, config: RolloutConfig, actor: ActorPart | None, device: torch.device
) -> WeightSource:
    method = choice.weight_sync
    if actor is None or method is None:
        return WeightSource()
    return SentWeights(
        actor.cast_weights,
        lambda version: make_sender(method, config, version, 1, device, same_device=True),
        lambda offer: engine.receive(offer, device),
    )


def _decode_text(model: ModelConfig) -> DecodeText:
    """What looks for stop strings; the tokenizer is loaded only for them."""
    tokenizer = hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def requests_of(prompts: DataProto, step: int) -> list[Request]:
    """A request for each row, from its columns prompts, index, sample."""
    ids, columns = prompts.ragged("prompts").rows(), prompts.non_tensor_batch
    return [
        Request(prompt_ids, (step, int(index), int(sample)))
        for prompt_ids, index, sample in zip(ids, columns["index"], columns["sample"], strict=True)
    ]


def response_columns(completions: Sequence[Completion]) -> DataProto:
    """The columns responses, rollout_log_probs, response_mask, finish_reason; a request that failed has an empty response, and a line on
    standard output says so. Raises NumericalError when all of them failed."""
    failures = [completion.error for completion in completions if completion.error]
    if failures:
        print(f"{len(failures)} of {len(completions)} requests have no response; the first: {failures[0]}", flush=True)
    if len(failures) == len(completions) > 0:
        raise NumericalError(f"no request of the batch has a response; the first: {failures[0]}")
    responses = Ragged.from_rows([c.ids for c in completions], dtype=torch.int64)
    columns = {
        "responses": responses,
        "rollout_log_probs": Ragged.from_rows([c.log_probs for c in completions], dtype=torch.float32),
        "response_mask": responses.like(torch.ones_like(responses.values)),
    }
    return DataProto.from_dict(columns, {"finish_reason": [c.finish_reason for c in completions]})
