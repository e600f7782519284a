"""Which keys would make a configuration faster, or make it fit, each with its reason. The plan is asked; nothing is guessed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.config.check import AUTO
from lockstep.config.load import with_changes
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError, ResourceError
from lockstep.planner import LEAST_SEQUENCES, Prediction

_BUDGETS = (8192, 16384, 24576, 32768)
_SEATS = (256, 512, 1024)
_FEW_SEATS = (48, 32, 24, 16, 8, 4, 2, 1)
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_DIVISIONS = (2, 4, 8)
_WORTH = 0.02
"""A change is proposed where it saves this share of a step."""
Predict = Callable[[PPOConfig], Prediction]


@dataclass(frozen=True)
class Proposal:
    """Keys to set, and why."""

    changes: dict[str, Any]
    reason: str


def proposals(config: PPOConfig, found: Prediction, predict: Predict) -> list[Proposal]:
    """What makes a step that fits faster, each change on top of those before it."""
    chosen: list[Proposal] = []
    for candidates, reason in _moves(config, found):
        best = None
        for changes in candidates:
            trial = _try(config, changes, predict)
            if trial is not None and trial.step_s < (best[1] if best else found).step_s * (1 - _WORTH):
                best = (changes, trial)
        if best:
            changes, trial = best
            chosen.append(Proposal(changes, f"{reason}: {found.step_s:.1f} -> {trial.step_s:.1f} s a step, {_peak(trial)}"))
            config = with_changes(config, changes)
            found = trial
    return chosen


def what_fits(config: PPOConfig, predict: Predict) -> list[Proposal]:
    """Ways to make a configuration fit that does not: a smaller micro-batch, fewer sequences at once, GPUs that divide rows, more GPUs,
    adapters."""
    policy = "actor_rollout_ref"
    trainer = config.trainer
    longest = config.data.max_prompt_length + config.data.max_response_length
    rollout = config.actor_rollout_ref.rollout
    seats = 1 if rollout.max_num_seqs == AUTO else min(LEAST_SEQUENCES, rollout.seats)  # auto has tried fewer
    per_node = trainer.n_gpus_per_node
    present = trainer.n_gpus_per_node * trainer.nnodes
    tries: list[tuple[str, list[dict[str, Any]]]] = [
        ("fewer tokens at once", [_budget(config, size) for size in (*reversed(_BUDGETS), longest) if size >= longest]),
        (
            "fewer sequences are generated at once",
            [{f"{policy}.rollout.max_num_seqs": size} for size in _FEW_SEATS if size < seats],
        ),
        ("GPUs divide the tokens of a row (Ulysses)", [_divided(config, size) for size in _DIVISIONS]),
        ("more GPUs share the models", [_gpus(count, per_node) for count in _COUNTS if count > present]),
        ("adapters learn instead of the model", [{f"{policy}.model.lora_rank": 32}]),
    ]
    found = []
    for reason, candidates in tries:
        for changes in candidates:
            trial = _try(config, changes, predict)
            if trial is not None:
                found.append(Proposal(changes, f"{reason}: {trial.step_s:.1f} s a step, {_peak(trial)}"))
                break
    return found


def _moves(config: PPOConfig, found: Prediction) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Candidates of one kind, and why they may help."""
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    rows = -(-config.data.train_batch_size * rollout.n // (trainer.n_gpus_per_node * trainer.nnodes))
    key = "actor_rollout_ref.rollout"
    seats = [] if rollout.max_num_seqs == AUTO else [size for size in _SEATS if rollout.seats < size < 2 * rows]
    yield [{f"{key}.max_num_seqs": size} for size in seats], f"{rows} responses per GPU, generated more at once"
    if rollout.gpu_memory_utilization != AUTO and found.seats < min(rollout.seats, rows):
        yield [{f"{key}.gpu_memory_utilization": 0.8}], f"the key-value cache holds {found.seats} sequences only"
    longest = config.data.max_prompt_length + config.data.max_response_length
    if config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu != AUTO:
        yield [_budget(config, size) for size in _BUDGETS if size >= longest], "micro-batches of another size"
    if trainer.nnodes > 1:
        section = "actor_rollout_ref.actor.fsdp_config"
        yield (
            [{f"{section}.fsdp_size": trainer.n_gpus_per_node}],
            "a copy on each machine: layers are not gathered between machines",
        )


def _budget(config: PPOConfig, size: int) -> dict[str, Any]:
    keys = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] + ["critic.ppo_max_token_len_per_gpu"] * config.use_critic
    return dict.fromkeys(keys, size)


def _divided(config: PPOConfig, size: int) -> dict[str, Any]:
    """`size` GPUs of a machine have a part of each row, of which a micro-batch is one; as many GPUs as that takes."""
    trainer = config.trainer
    longest = config.data.max_prompt_length + config.data.max_response_length
    present = trainer.n_gpus_per_node * trainer.nnodes
    models = ["actor_rollout_ref.actor"] + ["critic"] * config.use_critic
    division = dict.fromkeys([f"{model}.fsdp_config.ulysses_sequence_parallel_size" for model in models], size)
    return division | _budget(config, -(-longest // size)) | (_gpus(size, 1) if present % size else {})


def _gpus(count: int, per_node: int) -> dict[str, Any]:
    each = min(count, max(8, per_node))
    return {"trainer.n_gpus_per_node": each, "trainer.nnodes": count // each}


def _try(config: PPOConfig, changes: dict[str, Any], predict: Predict) -> Prediction | None:
    """What the configuration would come to with these changes; None where it does not fit or is not valid."""
    try:
        return predict(with_changes(config, changes))
    except (ResourceError, ConfigError):
        return None


def _peak(found: Prediction) -> str:
    return f"{found.peak / 2**30:.0f} GiB at the fullest"
