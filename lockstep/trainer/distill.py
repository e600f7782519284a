"""DistillTrainer: a student learns its teacher's distribution, on the files' answers and on its own (GKD, arXiv 2306.13649).

```text
rows of the files -> for a share of them, the student's own answers -> update (-> evaluate on the validation rows)
```
"""

import dataclasses
from typing import Any

import numpy as np
import torch

from lockstep.config.distill import DistillConfig
from lockstep.config.sampling import SamplingConfig
from lockstep.config.stage import STAGE_KEYS
from lockstep.errors import ConfigError
from lockstep.models.hf_config import read_model_config, stop_token_ids
from lockstep.models.weight_files import count_parameters
from lockstep.observability.display import View
from lockstep.protocol import DataProto
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import FROZEN, RoleSpec
from lockstep.trainer.sft import SFTTrainer

KEYS = dataclasses.replace(STAGE_KEYS, reference_offload="teacher.param_offload")
"""The names of the sections in the workers' messages."""


class DistillTrainer(SFTTrainer):
    """Trains a model on its teacher's distribution, over the examples in data.train_files and its own answers to their prompts."""

    config: DistillConfig
    role = Role.ActorRolloutRef
    view = View(
        (
            ("kl", ".4f", ("train/kl",)),
            ("agreement", ".3f", ("train/agreement",)),
            ("nll", ".4f", ("train/nll",)),
            ("length", ".1f", ("train/on_policy_length",)),
            ("tokens/s", ".0f", ("perf/throughput",)),
            ("lr", ".2e", ("train/lr",)),
            ("seconds", ".1f", ("timing_s/step",)),
        ),
        curve=("kl", "train/kl"),
        validation=("val/kl", "val/nll", "val-core/"),
    )

    def __init__(self, config: DistillConfig, tokenizer: Any, *args: Any, **options: Any) -> None:
        _check_vocabularies(config)
        super().__init__(config, tokenizer, *args, **options)
        self.longest = config.longest
        self._sampler = SamplingConfig(temperature=config.distill.sampling_temperature).params(
            max_tokens=config.distill.max_response_length,
            stop_token_ids=stop_token_ids(str(config.model.path), tokenizer),
            seed=config.trainer.seed,
        )

    def _train_batch(self) -> DataProto:
        """Return the rows of this step. The first of them (rows are shuffled) get answers of the student."""
        given = super()._train_batch()
        share = self.config.distill.on_policy_share * len(given)
        step = self.global_steps
        count = round((step + 1) * share) - round(step * share)
        rest = given.select_idxs(range(count, len(given)))
        if not count:
            return rest
        own = self._with_own_answers(given.select_idxs(range(count)))
        return DataProto.concat([own, rest]) if len(rest) else own

    def _with_own_answers(self, batch: DataProto) -> DataProto:
        """Return the rows with the student's own answers. The random numbers depend on seed, step and row alone."""
        prompts = batch.select(["prompts"], ["index"])
        prompts.non_tensor_batch["sample"] = np.zeros(len(batch), dtype=object)
        with self.timer.stage("gen"):
            answers = self.model_wg.generate_sequences(prompts, sampling=self._sampler, step=self.global_steps + 1)
        own = batch.select(["prompts"], ["num_bytes", "index"]).union(answers.select(["responses", "response_mask"], []))
        own.columns["is_given"] = torch.zeros(len(batch))
        return own

    def _prepare(self, batch: DataProto) -> DataProto:
        batch.columns["is_given"] = torch.ones(len(batch))
        return batch

    def _metrics(self, batch: DataProto, measured: dict[str, float]) -> dict[str, float]:
        is_given = batch.batch["is_given"].bool()
        lengths = batch.ragged("responses").lengths[~is_given].double()
        metrics = dict(measured)
        if not is_given.any():
            metrics.pop("train/nll", None)
            metrics.pop("train/token_accuracy", None)
        if len(lengths):
            metrics = metrics | {
                "train/on_policy_length": float(lengths.mean()),
                "train/on_policy_clip_ratio": float((lengths >= self.config.distill.max_response_length).double().mean()),
            }
        return metrics | {"train/row_length": float(batch.token_counts().double().mean())}

    def _spec(self) -> RoleSpec:
        spec, config = super()._spec(), self.config
        spec.worker.kwargs |= {"distill": config.distill, "keys": KEYS}
        return dataclasses.replace(spec, host_bytes=spec.host_bytes + (count_parameters(str(config.teacher.path)) or 0) * FROZEN)


def _check_vocabularies(config: DistillConfig) -> None:
    """Raise ConfigError if ranks divide output layers of different sizes: each rank needs the same part of both models."""
    section = config.engine.engine
    names = ("tensor_parallel_size", "tensor_model_parallel_size")
    divided = {name: getattr(section, name) for name in names if getattr(section, name, 1) > 1}
    model, teacher = config.model, config.policy().reference_model
    sizes = [read_model_config(str(m.path), m.trust_remote_code, **m.override_config).vocab_size for m in (model, teacher)]
    if divided and len(set(sizes)) > 1:
        raise ConfigError(
            f"{next(iter(divided))}={next(iter(divided.values()))} divides the output layers, whose sizes differ: model.path has "
            f"{sizes[0]} rows, teacher.path {sizes[1]}; set it to 1"
        )
