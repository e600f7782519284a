"""The program of `lockstep sft key=value ...`: supervised fine-tuning."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.config.load import load_recipe
from lockstep.config.sft import SFTConfig
from lockstep.observability.spans import progress
from lockstep.trainer.program import opened_stage, run_program, run_stage
from lockstep.trainer.setup import check_stage_engine, sampled_answers

if TYPE_CHECKING:
    from lockstep.trainer.sft.sft_trainer import SFTTrainer


load = functools.partial(load_recipe, SFTConfig)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    return run_program(arguments, SFTConfig, load, run)


def run(config: SFTConfig) -> None:
    """Train, and say what came of it."""
    run_stage(opened(config))


@contextmanager
def opened(config: SFTConfig) -> Iterator[SFTTrainer]:
    """The trainer, before its workers are started; closed at the end."""
    # After the configuration has been checked: these imports bring torch.
    from lockstep.config.stage import STAGE_KEYS
    from lockstep.trainer.sft.sft_trainer import SFTTrainer
    from lockstep.utils.tokenizer import hf_tokenizer
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.sft_loss import make_sft_loss

    check_stage_engine(config, config.data.max_length)
    with progress("reading the tokenizer"):
        tokenizer = hf_tokenizer(str(config.model.path), trust_remote_code=config.model.trust_remote_code)
    make_loss = functools.partial(make_sft_loss, STAGE_KEYS.name)
    with (
        sampled_answers(config, tokenizer) as sampled,
        opened_stage(
            config, lambda groups: SFTTrainer(config, tokenizer, ActorRolloutRefWorker, groups, make_loss, sampled)
        ) as trainer,
    ):
        yield trainer


if __name__ == "__main__":
    sys.exit(main())
