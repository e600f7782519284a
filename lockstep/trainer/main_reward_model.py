"""The program of `lockstep reward-model key=value ...`: train a reward model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.config.load import load_recipe
from lockstep.config.reward_train import RewardTrainConfig
from lockstep.observability.spans import progress
from lockstep.trainer.program import opened_stage, run_program, run_stage
from lockstep.trainer.setup import check_stage_engine

if TYPE_CHECKING:
    from lockstep.trainer.reward_model.reward_model_trainer import RewardModelTrainer


load = functools.partial(load_recipe, RewardTrainConfig)


def main(arguments: Sequence[str] | None = None) -> int:
    """See program.run_program."""
    return run_program(arguments, RewardTrainConfig, load, run)


def run(config: RewardTrainConfig) -> None:
    """Train, and say what came of it."""
    run_stage(opened(config))


@contextmanager
def opened(config: RewardTrainConfig) -> Iterator[RewardModelTrainer]:
    """The trainer, before its workers are started; closed at the end."""
    # After the configuration has been checked: these imports bring torch.
    from lockstep.config.stage import STAGE_KEYS
    from lockstep.trainer.reward_model.reward_model_trainer import RewardModelTrainer
    from lockstep.utils.tokenizer import hf_tokenizer, separate_padding
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.reward_loss import make_reward_loss

    check_stage_engine(config, config.data.max_length)
    with progress("reading the tokenizer"):
        tokenizer = hf_tokenizer(str(config.model.path), trust_remote_code=config.model.trust_remote_code)
    separate_padding(tokenizer)
    make_loss = functools.partial(make_reward_loss, STAGE_KEYS.name, config.loss.center_rewards_coefficient)
    with opened_stage(
        config, lambda groups: RewardModelTrainer(config, tokenizer, ActorRolloutRefWorker, groups, make_loss)
    ) as trainer:
        yield trainer


if __name__ == "__main__":
    sys.exit(main())
