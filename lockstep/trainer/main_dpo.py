"""The program of `lockstep dpo key=value ...`: learning from preferences."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.config.dpo import DPOConfig
from lockstep.trainer.run.program import opened_stage, read_tokenizer, stage_program
from lockstep.trainer.run.setup import check_stage_engine, fitted_to_models

if TYPE_CHECKING:
    from lockstep.trainer.dpo.dpo_trainer import DPOTrainer


@contextmanager
def opened(config: DPOConfig) -> Iterator[DPOTrainer]:
    """The trainer, before its workers are started; closed at the end."""
    # After the configuration has been checked: these imports bring torch.
    from lockstep.config.stage import STAGE_KEYS
    from lockstep.trainer.dpo.dpo_trainer import DPOTrainer
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.response_losses import make_preference_loss

    config = fitted_to_models(config)
    check_stage_engine(config, config.data.max_length)
    loss = config.loss
    make_loss = functools.partial(make_preference_loss, STAGE_KEYS.name, loss.loss_mode, loss.parameters, loss.nll_coef)
    tokenizer = read_tokenizer(config.model)
    with opened_stage(config, lambda groups: DPOTrainer(config, tokenizer, ActorRolloutRefWorker, groups, make_loss)) as trainer:
        yield trainer


load, main = stage_program(DPOConfig, opened)

if __name__ == "__main__":
    sys.exit(main())
