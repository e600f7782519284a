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
from lockstep.data.token_rows import ScoredText
from lockstep.models.load import Head
from lockstep.models.packing import Budget, cut_into_micro_batches, pack_sequences
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
from lockstep.workers.engine.base import LazySequence, LossFn, OptimResult, TrainEngine, join_rows
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec, compute_dtype
from lockstep.workers.losses import make_fresh_value_loss, make_value_loss
from lockstep.workers.model_worker import ModelWorker, update_metrics, update_or_skip

_CRITIC_KEY = "critic.ppo_max_token_len_per_gpu"


class TrainingWorker(ModelWorker):
    """The critic (role "critic") or the reward model (role "rm").

    Subclass it for a reward model of another layout. A subclass that does not load `config.model` also replaces `memory_needs` (None: it is
    left out of the memory plan).
    """

    engine: TrainEngine
    """From `init_model` on."""
    tokenizer: Any
    """The reward model's, from `init_model` on."""

    def __init__(self, config: CriticConfig | RewardModelConfig, role: str, *, seed: int, total_updates: int = 0) -> None:
        super().__init__()
        if role not in ("critic", "rm"):
            raise ValueError(f"role={role!r} is not known; choose critic or rm")
        self.config = config
        self.role = role
        self.seed = seed
        self.total_updates = total_updates
        if isinstance(config, CriticConfig):
            self._value_loss = make_value_loss(config)
            self._fresh_loss = make_fresh_value_loss(self._value_loss)

    @property
    def budget(self) -> Budget:
        """The size of micro-batches."""
        config = self.config
        rows = config.ppo_micro_batch_size_per_gpu if isinstance(config, CriticConfig) else config.micro_batch_size_per_gpu
        return Budget(config.max_tokens, rows)

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """See `ModelWorker.count`."""
        element = compute_dtype(self.config.engine.dtype, self.device).itemsize
        return [training_needs(self.config, load=load, world_size=self.world_size, element=element)], None

    @register(Dispatch.ONE_TO_ALL)
    def place_models(self, plans: Mapping[str, MemoryPlan]) -> None:
        """Let `init_model` follow the plan for the model that `memory_needs` named."""
        (plan,) = plans.values()
        self.config = place_training(self.config, plan)

    @register(Dispatch.ONE_TO_ALL)
    def settle(self, load: Load, numbers: RolloutNumbers) -> Numbers:
        """Choose numbers for the keys that are auto. Return the chosen numbers."""
        self.config, chosen = settle_training(self.config, load)
        return chosen

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model (token classification, one label) or the reward model (sequence classification) with its tokenizer."""
        config = self.config
        budget = self.budget
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
        """Compile what the critic will compute. No result changes."""
        from lockstep.workers.warm_up import WARMED, warm_update

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
        """Make one optimizer step on this rank's share of a mini-batch; `denominators` count the whole mini-batch. Return its metrics."""
        return self._update_critic(mini_batch, self._value_loss.of(denominators))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def learn_values(self, batch: DataProto, denominators: Denominators, discounts: tuple[float, float]) -> DataProto:
        """`update_critic` for a batch with token_level_rewards, but without values and returns: the update's own forward pass gives both.

        Writes values, as they were before the step; the metrics are in meta_info.
        """
        assert self.engine.model_group is None, "the rows of other ranks would be among the values"
        seen: list[Tensor] = []
        metrics = self._update_critic(batch, functools.partial(self._fresh_loss, seen, discounts, denominators=denominators))
        values = torch.cat(seen).cpu() if seen else torch.empty(0)
        return DataProto.from_dict({"values": batch.ragged("responses").like(values)}, meta_info={"metrics": metrics})

    def _update_critic(self, mini_batch: DataProto, loss: LossFn) -> dict[str, Metric]:
        stage = self.memory.stage("update_critic", mini_batch.token_counts().tolist(), self.budget, _CRITIC_KEY)
        started = time.perf_counter()
        result: OptimResult | None
        with stage, self.engine.on_device():
            if self.skips_nonfinite:
                metrics, result = update_or_skip(self.engine, "critic", mini_batch, loss, self.budget, 1.0, False)
            else:
                metrics = self.engine.forward_backward(mini_batch, loss, self.budget)
                result = self.engine.optim_step()
        metrics |= update_metrics("critic", self.engine, mini_batch, result, started)
        return metrics | self.memory.take_peaks()

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
        """Return the token ids that the reward model judges, as `lockstep reward-model` trains it on them."""
        return self._text.ids(prompt, response)

    @property
    def trained(self) -> TrainEngine:
        return self.engine

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read the model from a folder that `save_checkpoint` wrote."""
        self.engine.load(Path(local_path))


def on_last_token(scores: Tensor, responses: Ragged) -> Ragged:
    """Return a column like `responses` that has `scores` [rows] on each row's last token and 0 elsewhere."""
    column = torch.zeros(len(responses.values), dtype=torch.float32)
    filled = responses.lengths > 0
    last = torch.cumsum(responses.lengths, 0) - 1
    column[last[filled]] = scores.float()[filled]
    return responses.like(column)


@torch.no_grad()
def score_rows(engine: TrainEngine, rows: Ragged, budget: Budget, pad_token_id: int) -> Tensor:
    """Return one score for each row of token ids, [rows], read where transformers reads it."""
    engine.module.eval()
    data, own = join_rows(DataProto.from_dict({"rows": rows}), engine.model_group)
    rows = data.ragged("rows")
    batches = engine.equal_counts(cut_into_micro_batches(rows.lengths.tolist(), budget.times(engine.token_ranks)))
    packs = LazySequence(
        len(batches),
        lambda n: pack_sequences(rows.select(torch.tensor(batches[n], dtype=torch.int64)), pad_token_id, engine.device),
    )
    with engine.on_device():
        found = zip(packs, engine.columns(packs, 1.0), strict=True)
        scores = [out["scores"] for packed, out in found if not packed.is_placeholder]
    return torch.cat(scores).cpu()[list(own)] if scores else torch.empty(0)
