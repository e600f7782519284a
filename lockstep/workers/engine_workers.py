"""The two worker classes of the tutorial. They compose engines, a rollout and losses.

`ActorRolloutRefWorker` is, by its role, an actor, a rollout, both (a hybrid engine), all three with the reference, or the reference alone.
`TrainingWorker` (training_worker.py) is the critic or the reward model. Both are plain classes: a worker group decides in which process
they live.
"""

import functools
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.config.actor_rollout_ref import POLICY_ROLES, PPO_KEYS, ActorRolloutRefConfig, PolicyKeys
from lockstep.config.sampling import SamplingParams
from lockstep.models.load import Head
from lockstep.observability.metrics import Metric
from lockstep.planner import Load, MemoryPlan, Model, Numbers, Rollout, RolloutNumbers, place_policy, policy_needs, settle_policy
from lockstep.protocol import DataProto
from lockstep.single_controller.base import Dispatch, register
from lockstep.workers.engine.base import OptimResult, TrainEngine
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec, compute_dtype
from lockstep.workers.losses import Loss, make_policy_loss
from lockstep.workers.model_worker import ModelWorker, update_metrics, update_or_skip
from lockstep.workers.policy import (
    ActorPart,
    ReferencePart,
    RolloutPart,
    actor_budget,
    choose_rollout,
    make_rollout_part,
    reference_budget,
)
from lockstep.workers.rollout.base import requests_of, response_columns
from lockstep.workers.rollout.request import Completion
from lockstep.workers.training_worker import TrainingWorker
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, checksum

__all__ = ["ActorRolloutRefWorker", "TrainingWorker"]

_GENERATION_KEY = "actor_rollout_ref.rollout.gpu_memory_utilization"


class ActorRolloutRefWorker(ModelWorker):
    """The policy, in the parts that `role` names: actor, rollout, actor_rollout, ref, actor_ref or actor_rollout_ref.

    From `init_model` on, each part of the role is an attribute. `make_loss` makes the actor's loss (None: PPO's); `keys` are the names in
    messages and metrics; `head` names the model's head (models/load.py).
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
        self.config = config
        self.role = role
        self.parts = POLICY_ROLES[role]
        self.seed = seed
        self.pad_token_id = pad_token_id
        self.total_updates = total_updates
        self.max_response_length = max_response_length
        self.make_loss = make_loss
        self.keys = keys
        self.head = Head[head.upper()]

    # -- before the first step ----------------------------------------------------------------------------------------------

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """See `ModelWorker.count`."""
        options: Any = {"load": load, "world_size": self.world_size, "element": self._dtype.itemsize, "head": self.head}
        return policy_needs(self.config, self.parts, self.keys, **options)

    @register(Dispatch.ONE_TO_ALL)
    def place_models(self, plans: Mapping[str, MemoryPlan]) -> None:
        """Let `init_model` follow the plans for the models that `memory_needs` named."""
        self.config = place_policy(self.config, plans)

    @register(Dispatch.ONE_TO_ALL)
    def settle(self, load: Load, numbers: RolloutNumbers) -> Numbers:
        """Choose numbers for the keys that are auto. Return the chosen numbers."""
        self.config, chosen = settle_policy(self.config, self.parts, self.keys, load, numbers)
        return chosen

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model once for each part of the role; the rollout borrows the weights of an actor in the same worker."""
        config = self.config
        parts = self.parts
        budget = actor_budget(config)
        choice = None
        if parts.rollout:
            choice = choose_rollout(config.rollout, hybrid=parts.actor, cuda=self.device.type == "cuda")
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

    @register(Dispatch.ONE_TO_ALL)
    def warm_up(self) -> None:
        """Compile what the stages will compute. No result of a stage changes."""
        from lockstep.workers.warm_up import warm_up

        with self.memory.stage("warm_up", (), None, "actor_rollout_ref.rollout.max_num_seqs"):
            warm_up(self, self.config, self.parts)

    # -- a step -------------------------------------------------------------------------------------------------------------

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, step: int, on_finished: Callable[[Any], None] | None = None
    ) -> DataProto:
        """One response for each row. Reads prompts, index, sample; writes responses, rollout_log_probs, response_mask, finish_reason.

        `on_finished` gets (row, token ids) of each response as soon as it is finished; `row` is the value of the column row.
        """
        engine = self.rollout.engine
        requests = requests_of(prompts, step)
        finished: dict[int, Completion] = {}
        counts = [len(request.prompt_ids) for request in requests]
        with self.memory.stage("gen", counts, None, _GENERATION_KEY), self.rollout.borrowed():
            for completion in engine.generate_stream(requests, sampling):
                finished[completion.index] = completion
                if on_finished is not None:
                    on_finished((int(prompts.non_tensor_batch["row"][completion.index]), completion.ids))
        if self.config.rollout.free_cache_engine:
            engine.sleep()
        return response_columns([finished[i] for i in range(len(requests))])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def run_episodes(
        self, prompts: DataProto, sampling: SamplingParams, step: int, agent: Any, on_finished: Callable[[Any], None] | None = None
    ) -> DataProto:
        """`generate_sequences` for episodes, by `lockstep.agents.play_rows`."""
        from lockstep.agents import play_rows

        counts = prompts.ragged("prompts").lengths.tolist()
        with self.memory.stage("gen", counts, None, _GENERATION_KEY), self.rollout.borrowed():
            columns = play_rows(self.rollout.engine, prompts, sampling, step, agent, on_finished)
        if self.config.rollout.free_cache_engine:
            self.rollout.engine.sleep()
        return columns

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
        """Make one optimizer step on this rank's share of a mini-batch; `denominators` count the whole mini-batch. Return its metrics."""
        name = self.keys.name
        engine = self.actor.engine
        loss = self._loss.of(denominators)
        work = (mini_batch, loss, self.actor.budget, self.config.rollout.temperature, self.config.actor.entropy_coeff != 0)
        stage = self.memory.stage("update_actor", mini_batch.token_counts().tolist(), self.actor.budget, self.keys.tokens)
        started = time.perf_counter()
        result: OptimResult | None
        with stage, engine.on_device():
            if self.skips_nonfinite:
                metrics, result = update_or_skip(engine, name, *work)
            else:
                metrics = engine.forward_backward(*work)
                result = engine.optim_step()
        metrics |= update_metrics(name, engine, mini_batch, result, started)
        self._weights_changed()
        return metrics | self.memory.take_peaks()

    @register(Dispatch.DP_COMPUTE_METRIC)
    def evaluate(self, rows: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """Return the loss's metrics on this rank's share of some rows, without an update."""
        actor = self.actor
        loss = self._loss.of(denominators)
        with self.memory.stage("evaluate", rows.token_counts().tolist(), actor.budget, self.keys.tokens):
            return actor.engine.evaluate(rows, loss, actor.budget)

    # -- weights that leave the process; trainer/ppo/weight_sync.py calls these in order ----------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    def export_weights(self) -> list[tuple[str, Tensor]] | None:
        """Return the actor's whole weights on the CPU, from rank 0 (None from the others)."""
        weights = [(name, tensor.cpu()) for name, tensor in self.actor.engine.export_weights()]
        return weights if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> list[tuple[str, int]]:
        """Return name and checksum of each of the actor's weights."""
        return [(name, checksum(tensor)) for name, tensor in self.actor.engine.export_weights()]

    @register(Dispatch.ONE_TO_ALL)
    def machine(self) -> str:
        """Return the name of this process's machine."""
        return socket.gethostname()

    @register(Dispatch.ONE_TO_ALL)
    def offer_weights(self, method: str, version: int, num_receivers: int) -> WeightOffer | None:
        """Begin a sync of the actor's weights to a rollout in other workers. Return the offer for them, from rank 0 (None from the others).

        An offer without a manifest is a stream: `send_weights` here and `receive_weights` there then run at the same time.
        """
        return self.actor.offer(method, version, num_receivers, self.rank)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self) -> Manifest | None:
        """Send the stream that `offer_weights` began. Return the manifest of the sent weights, from rank 0 (None from the others)."""
        return self.actor.send()

    @register(Dispatch.ONE_TO_ALL)
    def withdraw_weights(self) -> None:
        """End the sync and free its memory."""
        self.actor.withdraw()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, offer: WeightOffer) -> Manifest:
        """Replace the weights of a rollout in separate workers. Return the manifest of its new weights."""
        assert not self.parts.actor, f"the rollout of a worker of role {self.role} has the actor's weights"
        return self.rollout.engine.receive(offer, self.device, self.rank)

    # -- checkpoints and the end ----------------------------------------------------------------------------------------------

    @property
    def trained(self) -> TrainEngine:
        return self.actor.engine

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read the actor from a folder that `save_checkpoint` wrote."""
        self.actor.engine.load(Path(local_path))
        self._weights_changed()

    def close(self) -> None:
        """End the sync and the rollout, if they were started."""
        if hasattr(self, "actor"):
            self.actor.withdraw()
        if hasattr(self, "rollout"):
            self.rollout.engine.close()

    def _weights_changed(self) -> None:
        if self.parts.rollout:
            self.rollout.engine.version += 1

    @property
    def _dtype(self) -> torch.dtype:
        """The type in which actor and rollout compute."""
        return compute_dtype(self.config.actor.engine.dtype, self.device)
