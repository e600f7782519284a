"""The two worker classes of the tutorial. They compose engines, a rollout and losses; the work itself is elsewhere.

`ActorRolloutRefWorker` is, by its role, an actor, a rollout, both (a hybrid engine), all three with the reference, or the reference alone.
`TrainingWorker` (training_worker.py) is the critic or the reward model. Both are plain classes: a worker group decides which process they
live in.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.algorithms.aggregation import Denominators
from lockstep.config.actor_rollout_ref import POLICY_ROLES, PPO_KEYS, ActorRolloutRefConfig, PolicyKeys
from lockstep.config.sampling import SamplingParams
from lockstep.models.load import Head
from lockstep.observability.metrics import Metric
from lockstep.protocol import DataProto
from lockstep.single_controller.base import Dispatch, register
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.optim import update_metrics
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.skip import update_or_skip
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.episodes import PlaysEpisodes
from lockstep.workers.losses import Loss, make_policy_loss
from lockstep.workers.policy.actor import ActorPart, actor_budget
from lockstep.workers.policy.reference import ReferencePart, reference_budget
from lockstep.workers.policy.rollout import RolloutPart, choose_rollout, make_rollout_part
from lockstep.workers.prepared_policy import PreparedPolicy
from lockstep.workers.rollout.base import requests_of, response_columns
from lockstep.workers.rollout.request import Completion
from lockstep.workers.sends_weights import SendsWeights
from lockstep.workers.training_worker import TrainingWorker

__all__ = ["ActorRolloutRefWorker", "TrainingWorker"]


class ActorRolloutRefWorker(PlaysEpisodes, SendsWeights, PreparedPolicy):
    """The policy, in the parts that `role` names: actor, rollout, actor_rollout, ref, actor_ref or actor_rollout_ref.

    A part is an attribute from `init_model` on; a part that the role does not have is no attribute. `make_loss` makes the actor's loss
    where it is not PPO's; `keys` are the names in messages and metrics; `head` is what the model has on top (models/load.py).
    """

    actor: ActorPart
    rollout: RolloutPart
    ref: ReferencePart

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        *,
        seed: int,
        pad_token_id: int,
        total_updates: int,
        max_response_length: int | None = None,
        make_loss: Callable[[], Loss] | None = None,
        keys: PolicyKeys = PPO_KEYS,
        head: str = "language_model",
    ) -> None:
        super().__init__()
        if role not in POLICY_ROLES:
            raise ValueError(f"role={role!r} is not known; choose one of {tuple(POLICY_ROLES)}")
        self.config, self.role, self.parts = config, role, POLICY_ROLES[role]
        self.seed, self.pad_token_id = seed, pad_token_id
        self.total_updates, self.max_response_length = total_updates, max_response_length
        self.make_loss, self.keys, self.head = make_loss, keys, Head[head.upper()]

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model once for each part of the role; the rollout borrows the weights of an actor in the same worker."""
        config, parts, budget = self.config, self.parts, actor_budget(self.config)
        on_gpu = self.device.type == "cuda"
        choice = choose_rollout(config.rollout, hybrid=parts.actor, cuda=on_gpu) if parts.rollout else None
        spec = functools.partial(
            EngineSpec,
            model=config.model,
            head=self.head,
            pad_token_id=self.pad_token_id if self.head is Head.SCORE else None,
            total_updates=self.total_updates,
            device=self.device,
            seed=self.seed,
            max_tokens=budget.max_tokens if budget.max_rows is None else None,
        )
        if parts.actor:
            attention = choice.attention if choice is not None else None
            engine = make_engine(config.actor, spec(optim=config.actor.optim, decoder_attention=attention))
            self.actor = ActorPart(engine, config, self._dtype)
            scale = config.actor.loss_scale_factor or float(self.max_response_length or 0)
            self._loss = make_policy_loss(config.actor, scale) if self.make_loss is None else self.make_loss()
        if config.loads_reference(parts):
            engine = make_engine(config.reference_engine, spec(model=config.reference_model, optim=None))
            self.ref = ReferencePart(engine, reference_budget(config))
        elif parts.reference:
            self.ref = ReferencePart(self.actor.engine, reference_budget(config), self.actor.engine.adapter_off)
        if choice is not None:
            actor = self.actor if parts.actor else None
            self.rollout = make_rollout_part(
                choice, config, actor, device=self.device, dtype=self._dtype, seed=self.seed, pad_token_id=self.pad_token_id
            )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, step: int, on_finished: Callable[[Any], None] | None = None
    ) -> DataProto:
        """One response for each row. Reads prompts, index, sample; writes responses, rollout_log_probs, response_mask, finish_reason.

        `on_finished` gets (row, token ids) of each response as soon as it is there; the row is that of the column of this name.
        """
        requests, engine = requests_of(prompts, step), self.rollout.engine
        finished: dict[int, Completion] = {}
        counts = [len(request.prompt_ids) for request in requests]
        key = "actor_rollout_ref.rollout.gpu_memory_utilization"
        with self.memory.stage("gen", counts, None, key), self.rollout.borrowed():
            for completion in engine.generate_stream(requests, sampling):
                finished[completion.index] = completion
                if on_finished is not None:
                    on_finished((int(prompts.non_tensor_batch["row"][completion.index]), completion.ids))
        if self.config.rollout.free_cache_engine:
            engine.sleep()
        return response_columns([finished[i] for i in range(len(requests))])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Reads prompts, responses; writes old_log_probs, entropys under the actor."""
        actor = self.actor
        with self.memory.stage("old_log_prob", data.token_counts().tolist(), actor.budget, self.keys.tokens):
            out = actor.engine.forward(data, actor.budget, self.config.rollout.temperature)
        return out.rename(["log_probs"], ["old_log_probs"])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Reads prompts, responses; writes ref_log_prob under the reference."""
        ref = self.ref
        with self.memory.stage("ref", data.token_counts().tolist(), ref.budget, self.keys.reference_tokens), ref.active():
            out = ref.engine.forward(data, ref.budget, self.config.rollout.temperature)
        return DataProto.from_dict({"ref_log_prob": out.ragged("log_probs")})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step on this rank's share of a mini-batch; `denominators` hold for the whole of it."""
        config, engine, budget = self.config.actor, self.actor.engine, self.actor.budget
        loss_fn = functools.partial(self._loss, denominators=denominators)
        temperature, entropy_grad = self.config.rollout.temperature, config.entropy_coeff != 0
        started = time.perf_counter()
        with self.memory.stage("update_actor", mini_batch.token_counts().tolist(), budget, self.keys.tokens), engine.on_device():
            work = (mini_batch, loss_fn, budget, temperature, entropy_grad)
            if self.skips_nonfinite:
                metrics, result = update_or_skip(engine, work, self.keys.name)
            else:
                metrics, result = engine.forward_backward(*work), engine.optim_step()
        metrics |= update_metrics(self.keys.name, engine, mini_batch, result, started)
        self._weights_changed()
        return metrics | self.memory.take_peaks()

    @register(Dispatch.DP_COMPUTE_METRIC)
    def evaluate(self, rows: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """The loss's metrics on this rank's share of some rows, without an update."""
        actor = self.actor
        loss_fn = functools.partial(self._loss, denominators=denominators)
        with self.memory.stage("evaluate", rows.token_counts().tolist(), actor.budget, self.keys.tokens):
            return actor.engine.evaluate(rows, loss_fn, actor.budget)

    @property
    def trained(self) -> TrainEngine:
        return self.actor.engine

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read the actor from a folder that `save_checkpoint` wrote."""
        self.actor.engine.load(Path(local_path))
        self._weights_changed()

    def close(self) -> None:
        """End what the worker has started."""
        if hasattr(self, "actor"):
            self.actor.withdraw()
        if hasattr(self, "rollout"):
            self.rollout.engine.close()

    def _weights_changed(self) -> None:
        if self.parts.rollout:
            self.rollout.engine.version += 1
