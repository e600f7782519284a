"""The programs of the recipes that learn from files: `lockstep sft|reward-model|dpo|distill key=value ...`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.distill import DistillConfig
from lockstep.config.dpo import DPOConfig
from lockstep.config.reward_train import RewardTrainConfig
from lockstep.config.sft import SFTConfig
from lockstep.config.stage import STAGE_KEYS, StageConfig
from lockstep.trainer.run.program import opened_stage, read_run, read_tokenizer, run_program, summarise_stage
from lockstep.trainer.run.setup import check_stage_engine, fitted_to_models, sampled_answers
from lockstep.utils.terminal import say

if TYPE_CHECKING:
    from lockstep.trainer.stage_run import StageRun


@dataclass(frozen=True)
class Recipe:
    """A recipe that learns from files, as a program."""

    config: type[StageConfig]
    opened: Callable[[Any], AbstractContextManager[StageRun]]
    """Yields the trainer of a configuration before its workers are started, and closes it."""

    def load(self, overrides: Sequence[str], config_file: Path | None = None) -> Any:
        """Return the configuration that the command line describes."""
        return read_run(self.config, overrides, config_file)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Train as the command line says. Return the exit status."""
        return run_program(arguments, self.config, self.load, self._train)

    def _train(self, config: Any) -> None:
        with self.opened(config) as trainer:
            trainer.init_workers()
            result = trainer.fit()
        say(summarise_stage(result, trainer.view.validation))


# The functions import their trainers when they are called, after the configuration has been checked: these imports bring torch.


@contextmanager
def _opened_sft(config: SFTConfig) -> Iterator[StageRun]:
    from lockstep.trainer.sft import SFTTrainer
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.losses import make_sft_loss

    config = fitted_to_models(config)
    check_stage_engine(config, config.data.max_length)
    tokenizer = read_tokenizer(config.model)
    make_loss = functools.partial(make_sft_loss, STAGE_KEYS.name)
    with sampled_answers(config, tokenizer) as sampled:

        def make_trainer(group_cls: Any) -> SFTTrainer:
            return SFTTrainer(config, tokenizer, ActorRolloutRefWorker, group_cls, make_loss, sampled)

        with opened_stage(config, make_trainer) as trainer:
            yield trainer


@contextmanager
def _opened_reward_model(config: RewardTrainConfig) -> Iterator[StageRun]:
    from lockstep.trainer.reward_model import RewardModelTrainer
    from lockstep.utils.tokenizer import separate_padding
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.response_losses import make_reward_loss

    config = fitted_to_models(config)
    check_stage_engine(config, config.data.max_length, scores=True)
    tokenizer = read_tokenizer(config.model)
    separate_padding(tokenizer)
    make_loss = functools.partial(make_reward_loss, STAGE_KEYS.name, config.loss.center_rewards_coefficient)

    def make_trainer(group_cls: Any) -> RewardModelTrainer:
        return RewardModelTrainer(config, tokenizer, ActorRolloutRefWorker, group_cls, make_loss)

    with opened_stage(config, make_trainer) as trainer:
        yield trainer


@contextmanager
def _opened_dpo(config: DPOConfig) -> Iterator[StageRun]:
    from lockstep.trainer.dpo import DPOTrainer
    from lockstep.workers.engine_workers import ActorRolloutRefWorker
    from lockstep.workers.response_losses import make_preference_loss

    config = fitted_to_models(config)
    check_stage_engine(config, config.data.max_length)
    loss = config.loss
    make_loss = functools.partial(make_preference_loss, STAGE_KEYS.name, loss.loss_mode, loss.parameters, loss.nll_coef)
    tokenizer = read_tokenizer(config.model)

    def make_trainer(group_cls: Any) -> DPOTrainer:
        return DPOTrainer(config, tokenizer, ActorRolloutRefWorker, group_cls, make_loss)

    with opened_stage(config, make_trainer) as trainer:
        yield trainer


@contextmanager
def _opened_distill(config: DistillConfig) -> Iterator[StageRun]:
    from lockstep.trainer.distill import DistillTrainer
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
    with sampled_answers(config, tokenizer) as sampled:

        def make_trainer(group_cls: Any) -> DistillTrainer:
            return DistillTrainer(config, tokenizer, DistillWorker, group_cls, make_loss, sampled)

        with opened_stage(config, make_trainer) as trainer:
            yield trainer


SFT = Recipe(SFTConfig, _opened_sft)
REWARD_MODEL = Recipe(RewardTrainConfig, _opened_reward_model)
DPO = Recipe(DPOConfig, _opened_dpo)
DISTILL = Recipe(DistillConfig, _opened_distill)
