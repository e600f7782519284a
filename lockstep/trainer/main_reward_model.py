"""The program of `lockstep reward-model key=value ...`: train a reward model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.config.reward_train import RewardTrainConfig
from lockstep.trainer.run.program import opened_stage, read_tokenizer, stage_program
from lockstep.trainer.run.setup import check_stage_engine, fitted_to_models

if TYPE_CHECKING:
    from lockstep.trainer.reward_model.reward_model_trainer import RewardModelTrainer


@contextmanager
def opened(config: RewardTrainConfig) -> Iterator[RewardModelTrainer]:
    """The trainer, before its workers are started; closed at the end."""
    # After the configuration has been checked: these imports bring torch.
    from lockstep.config.stage import STAGE_KEYS
    from lockstep.trainer.reward_model.reward_model_trainer import RewardModelTrainer
    from lockstep.utils.tokenizer import separate_padding
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.response_losses import make_reward_loss

    config = fitted_to_models(config)
    check_stage_engine(config, config.data.max_length, scores=True)
    tokenizer = read_tokenizer(config.model)
    separate_padding(tokenizer)
    make_loss = functools.partial(make_reward_loss, STAGE_KEYS.name, config.loss.center_rewards_coefficient)
    with opened_stage(
        config, lambda groups: RewardModelTrainer(config, tokenizer, ActorRolloutRefWorker, groups, make_loss)
    ) as trainer:
        yield trainer


load, main = stage_program(RewardTrainConfig, opened)

if __name__ == "__main__":
    sys.exit(main())
