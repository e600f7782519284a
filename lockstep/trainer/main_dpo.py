"""The program of `lockstep dpo key=value ...`: learning from preferences."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.config.dpo import DPOConfig
from lockstep.config.load import load_recipe
from lockstep.observability.spans import progress
from lockstep.trainer.program import opened_stage, run_program, run_stage
from lockstep.trainer.setup import check_stage_engine

if TYPE_CHECKING:
    from lockstep.trainer.dpo.dpo_trainer import DPOTrainer


load = functools.partial(load_recipe, DPOConfig)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    return run_program(arguments, DPOConfig, load, run)


def run(config: DPOConfig) -> None:
    """Train, and say what came of it."""
    run_stage(opened(config))


@contextmanager
def opened(config: DPOConfig) -> Iterator[DPOTrainer]:
    """The trainer, before its workers are started; closed at the end."""
    # After the configuration has been checked: these imports bring torch.
    from lockstep.config.stage import STAGE_KEYS
    from lockstep.trainer.dpo.dpo_trainer import DPOTrainer
    from lockstep.utils.tokenizer import hf_tokenizer
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.preference_loss import make_preference_loss

    check_stage_engine(config, config.data.max_length)
    loss = config.loss
    make_loss = functools.partial(make_preference_loss, STAGE_KEYS.name, loss.loss_mode, loss.parameters, loss.nll_coef)
    with progress("reading the tokenizer"):
        tokenizer = hf_tokenizer(str(config.model.path), trust_remote_code=config.model.trust_remote_code)
    with opened_stage(config, lambda groups: DPOTrainer(config, tokenizer, ActorRolloutRefWorker, groups, make_loss)) as trainer:
        yield trainer


if __name__ == "__main__":
    sys.exit(main())
