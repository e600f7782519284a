"""The program of `lockstep sft key=value ...`: supervised fine-tuning."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.config.sft import SFTConfig
from lockstep.trainer.run.program import opened_stage, read_tokenizer, stage_program
from lockstep.trainer.run.setup import check_stage_engine, fitted_to_models, sampled_answers

if TYPE_CHECKING:
    from lockstep.trainer.sft.sft_trainer import SFTTrainer


@contextmanager
def opened(config: SFTConfig) -> Iterator[SFTTrainer]:
    """The trainer, before its workers are started; closed at the end."""
    # After the configuration has been checked: these imports bring torch.
    from lockstep.config.stage import STAGE_KEYS
    from lockstep.trainer.sft.sft_trainer import SFTTrainer
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.losses import make_sft_loss

    config = fitted_to_models(config)
    check_stage_engine(config, config.data.max_length)
    tokenizer = read_tokenizer(config.model)
    make_loss = functools.partial(make_sft_loss, STAGE_KEYS.name)
    with (
        sampled_answers(config, tokenizer) as sampled,
        opened_stage(
            config, lambda groups: SFTTrainer(config, tokenizer, ActorRolloutRefWorker, groups, make_loss, sampled)
        ) as trainer,
    ):
        yield trainer


load, main = stage_program(SFTConfig, opened)

if __name__ == "__main__":
    sys.exit(main())
