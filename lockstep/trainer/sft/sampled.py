"""Sampled answers: how good the model is at what it learns, measured as PPO measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset

from lockstep.config.data import DataConfig
from lockstep.config.sampling import SamplingParams
from lockstep.config.sft import SFTConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.models.hf_config import stop_token_ids
from lockstep.trainer.ppo.interfaces import Rollout
from lockstep.trainer.ppo.rewards import Judge
from lockstep.trainer.ppo.validation import validate


@dataclass(frozen=True)
class SampledAnswers:
    """Prompts, how they are answered, and who judges."""

    config: SFTConfig
    dataset: RLHFDataset
    sampling: SamplingParams
    judge: Judge

    @classmethod
    def of(cls, config: SFTConfig, tokenizer: Any, reward_fn: Any) -> SampledAnswers:
        """The prompts of sampled.files. Raises DataError where they cannot be used, ConfigError where nothing judges some of them."""
        own, section = config.sampled, config.trainer
        data = DataConfig(
            max_prompt_length=own.max_prompt_length,
            shuffle=False,
            apply_chat_template_kwargs=config.data.apply_chat_template_kwargs,
        )
        dataset = RLHFDataset(own.files, tokenizer, data, own.max_samples)
        reward_fn.check(dataset.tags(), validation=True)
        sampling = SamplingParams(
            temperature=own.temperature,
            top_k=own.top_k,
            top_p=own.top_p,
            min_p=own.min_p,
            repetition_penalty=own.repetition_penalty,
            max_tokens=own.max_response_length,
            stop_token_ids=stop_token_ids(str(config.model.path), tokenizer),
            seed=section.seed,
        )
        return cls(config, dataset, sampling, Judge(reward_fn, tokenizer, config.reward.max_failure_rate, section.run_dir))

    def validate(self, rollout: Rollout, step: int, rows: list[int], first: list[int] | None) -> dict[str, float]:
        """Answer the prompts in these rows and judge them; the samples go to the run's folder `validation`. `first` are those of the
        validation before the first step (trainer/ppo/validation.py::validate)."""
        own, folder = self.config.sampled, self.config.trainer.run_dir / "validation"
        dataset: Any = Subset(self.dataset, rows)
        options: Any = {"n": own.n, "batch_size": own.batch_size, "folder": folder, "first": first}
        return validate(dataset, rollout, self.sampling, self.judge, step, **options)
