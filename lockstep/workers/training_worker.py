"""TrainingWorker: the critic or the reward model."""

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.config.critic import CriticConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.data.scored_text import ScoredText
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.observability.metrics import Metric
from lockstep.planner import (
    Load,
    MemoryPlan,
    Model,
    Numbers,
    Rollout,
    RolloutNumbers,
    place_training,
    settle_training,
    training_needs,
)
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import Dispatch, register
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.engine.base import LossFn, TrainEngine
from lockstep.workers.engine.optim import update_metrics
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.score import score_rows
from lockstep.workers.engine.skip import update_or_skip
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.engine.warm_up import WARMED, warm_update
from lockstep.workers.model_worker import ModelWorker
from lockstep.workers.value_loss import make_fresh_value_loss, make_value_loss

_CRITIC_KEY = "critic.ppo_max_token_len_per_gpu"


class TrainingWorker(ModelWorker):
    """The critic (role "critic") or the reward model (role "rm"). Subclass it for a reward model of another layout; one that loads
    something else than `config.model` also replaces `memory_needs` (None: it is left out of the plan)."""

    engine: TrainEngine
    """From `init_model` on."""
    tokenizer: Any
    """The reward model's, from `init_model` on."""

    def __init__(self, config: CriticConfig | RewardModelConfig, role: str, *, seed: int, total_updates: int = 0) -> None:
        super().__init__()
        if role not in ("critic", "rm"):
            raise ValueError(f"role={role!r} is not known; choose critic or rm")
        self.config, self.role, self.seed, self.total_updates = config, role, seed, total_updates
        if isinstance(config, CriticConfig):
            self._value_loss = make_value_loss(config)
            self._fresh_loss = make_fresh_value_loss(self._value_loss)

    @property
    def budget(self) -> Budget:
        """What is computed at once."""
        config = self.config
        rows = config.ppo_micro_batch_size_per_gpu if isinstance(config, CriticConfig) else config.micro_batch_size_per_gpu
        return Budget(config.max_tokens, rows)

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """See `ModelWorker.count`."""
        element = compute_dtype(self.config.engine.dtype, self.device).itemsize
        return [training_needs(self.config, load=load, world_size=self.world_size, element=element)], None

    @register(Dispatch.ONE_TO_ALL)
    def place_models(self, plans: Mapping[str, MemoryPlan]) -> None:
        """Make `init_model` do what was decided for the model that `memory_needs` named."""
        (plan,) = plans.values()
        self.config = place_training(self.config, plan)

    @register(Dispatch.ONE_TO_ALL)
    def settle(self, load: Load, numbers: RolloutNumbers) -> Numbers:
        """Take numbers for the keys that are auto; returns those that were taken."""
        self.config, chosen = settle_training(self.config, load)
        return chosen

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model (token classification, one label) or the reward model (sequence classification) with its tokenizer."""
        config, budget = self.config, self.budget
        spec = functools.partial(
            EngineSpec, model=config.model, total_updates=self.total_updates, device=self.device, seed=self.seed
        )
        if isinstance(config, CriticConfig):
            limit = budget.max_tokens if budget.max_rows is None else None
            asked = spec(head=Head.VALUE, optim=config.optim, max_tokens=limit)
        else:
            self.tokenizer = hf_tokenizer(str(config.model.path), trust_remote_code=config.model.trust_remote_code)
            self._text = ScoredText(self.tokenizer)
            asked = spec(head=Head.SCORE, optim=None, pad_token_id=self.tokenizer.pad_token_id)
        self.engine = make_engine(config, asked)

    @register(Dispatch.ONE_TO_ALL)
    def warm_up(self) -> None:
        """Compile what the critic will compute (engine/warm_up.py). Nothing that it computes changes."""
        if isinstance(self.config, CriticConfig) and self.config.strategy in WARMED:
            with self.memory.stage("warm_up", (), None, _CRITIC_KEY):
                warm_update(self.engine, learns=True, temperature=1.0)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Reads prompts, responses; writes values."""
        with self.memory.stage("values", data.token_counts().tolist(), self.budget, _CRITIC_KEY):
            return self.engine.forward(data, self.budget)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step on this rank's share of a mini-batch; `denominators` hold for the whole of it."""
        return self._update(mini_batch, functools.partial(self._value_loss, denominators=denominators))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def learn_values(self, batch: DataProto, denominators: Denominators, discounts: tuple[float, float]) -> DataProto:
        """`update_critic` for a batch that has token_level_rewards, but neither values nor returns: the update's own forward pass gives
        both. Writes values, as they were before the step; the metrics are in meta_info."""
        assert self.engine.model_group is None, "the rows of other ranks would be among the values"
        seen: list[Tensor] = []
        metrics = self._update(batch, functools.partial(self._fresh_loss, seen, discounts, denominators=denominators))
        values = torch.cat(seen).cpu() if seen else torch.empty(0)
        return DataProto.from_dict({"values": batch.ragged("responses").like(values)}, meta_info={"metrics": metrics})

    def _update(self, mini_batch: DataProto, loss_fn: LossFn) -> dict[str, Metric]:
        engine, budget = self.engine, self.budget
        started = time.perf_counter()
        with self.memory.stage("update_critic", mini_batch.token_counts().tolist(), budget, _CRITIC_KEY), engine.on_device():
            work = (mini_batch, loss_fn, budget)
            if self.skips_nonfinite:
                metrics, result = update_or_skip(engine, work, "critic")
            else:
                metrics, result = engine.forward_backward(*work), engine.optim_step()
        return metrics | update_metrics("critic", engine, mini_batch, result, started) | self.memory.take_peaks()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Reads raw_prompt, response_text, responses; writes rm_scores: the model's score on the last response token.

        The text is rendered with the reward model's own chat template and tokenizer. A row without response tokens has no place for a
        score and nothing to learn.
        """
        texts = zip(data.non_tensor_batch["raw_prompt"], data.non_tensor_batch["response_text"], strict=True)
        rows = Ragged.from_rows([self.render(prompt, response) for prompt, response in texts], dtype=torch.int64)
        with self.memory.stage("reward_model", rows.lengths.tolist(), self.budget, "reward_model.max_token_len_per_gpu"):
            scores = score_rows(self.engine, rows, self.budget, self.tokenizer.pad_token_id)
        return DataProto.from_dict({"rm_scores": on_last_token(scores, data.ragged("responses"))})

    def render(self, prompt: str | list[dict[str, str]], response: str) -> list[int]:
        """The token ids that the reward model judges, those that `lockstep reward-model` trains it on."""
        return self._text.ids(prompt, response)

    @property
    def trained(self) -> TrainEngine:
        return self.engine

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read the model from a folder that `save_checkpoint` wrote."""
        self.engine.load(Path(local_path))


def on_last_token(scores: Tensor, responses: Ragged) -> Ragged:
    """A column like `responses` that is 0 everywhere except for `scores` [rows] on each row's last token."""
    column = torch.zeros(len(responses.values), dtype=torch.float32)
    filled = responses.lengths > 0
    last = torch.cumsum(responses.lengths, 0) - 1
    column[last[filled]] = scores.float()[filled]
    return responses.like(column)
