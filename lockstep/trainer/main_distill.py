"""The program of `lockstep distill key=value ...`: learn from a teacher."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.config.distill import DistillConfig
from lockstep.trainer.run.program import opened_stage, read_tokenizer, stage_program
from lockstep.trainer.run.setup import check_stage_engine, fitted_to_models, sampled_answers

if TYPE_CHECKING:
    from lockstep.trainer.distill.distill_trainer import DistillTrainer


@contextmanager
def opened(config: DistillConfig) -> Iterator[DistillTrainer]:
    """The trainer, before its workers are started; closed at the end."""
    # After the configuration has been checked: these imports bring torch.
    import dataclasses

    from lockstep.config.stage import STAGE_KEYS
    from lockstep.trainer.distill.distill_trainer import DistillTrainer
    from lockstep.utils.tokenizer import check_same_tokenizer
    from lockstep.workers.distill import DistillWorker
    from lockstep.workers.losses import make_distill_loss

    config = fitted_to_models(config)
    teacher = config.policy().reference_model
    check_stage_engine(config, config.longest, "data.max_length + distill.max_response_length")
    as_teacher = dataclasses.replace(config, model=teacher)
    check_stage_engine(as_teacher, config.longest, "data.max_length + distill.max_response_length")
    tokenizer = read_tokenizer(config.model)
    check_same_tokenizer(tokenizer, str(teacher.path), teacher.trust_remote_code, "teacher.path")
    make_loss = functools.partial(make_distill_loss, STAGE_KEYS.name)
    with (
        sampled_answers(config, tokenizer) as sampled,
        opened_stage(
            config, lambda groups: DistillTrainer(config, tokenizer, DistillWorker, groups, make_loss, sampled)
        ) as trainer,
    ):
        yield trainer


load, main = stage_program(DistillConfig, opened)

if __name__ == "__main__":
    sys.exit(main())
