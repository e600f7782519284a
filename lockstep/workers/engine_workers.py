"""The two worker classes of the tutorial. They compose engines, a rollout and losses; the work itself is elsewhere.

`ActorRolloutRefWorker` is, by its role, an actor, a rollout, both (a hybrid engine), all three with the reference, or the reference alone.
`TrainingWorker` is the critic or the reward model. Both are plain classes: a worker group decides which process they live in.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.config.critic import CriticConfig
from lockstep.config.engine import EngineChoice, OptimConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.config.weight_sync import choose_weight_sync
from lockstep.errors import NumericalError
from lockstep.models.flops import peak_flops
from lockstep.models.load import Head, load_model, share_structure
from lockstep.models.packing import Budget
from lockstep.observability.metrics import Mean, Metric
from lockstep.planner.count import Load
from lockstep.planner.memory import Placement
from lockstep.planner.needs import Needs, place_policy, place_training, policy_needs, training_needs
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.utils.memory import available_ram, free_device_memory
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.engine.base import LossFn, TrainEngine
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.stage import Stages
from lockstep.workers.losses import make_policy_loss, make_value_loss
from lockstep.workers.rollout.base import Completion, DecodeText, ModuleRollout, Request, RolloutEngine
from lockstep.workers.rollout.registry import check_installed, get_rollout, make_rollout, start_rollout
from lockstep.workers.weight_sync.base import Manifest, Parcel, WeightSender
from lockstep.workers.weight_sync.ipc import IPCSender
from lockstep.workers.weight_sync.registry import make_sender
from lockstep.workers.weight_sync.sent import SentWeights
from lockstep.workers.weight_sync.shared import SharedWeights

_ACTOR_KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_CRITIC_KEY = "critic.ppo_max_token_len_per_gpu"

POLICY_ROLES = ("actor", "rollout", "actor_rollout", "ref", "actor_rollout_ref")


class ActorRolloutRefWorker(Worker):
    """The policy, in the parts that `role` names: actor, rollout, actor_rollout, ref or actor_rollout_ref."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        *,
        seed: int,
        pad_token_id: int,
        total_updates: int,
        max_response_length: int,
    ) -> None:
        super().__init__()
        if role not in POLICY_ROLES:
            raise ValueError(f"role={role!r} is not known; choose one of {POLICY_ROLES}")
        self.config, self.role, self.seed, self.pad_token_id = config, role, seed, pad_token_id
        self.total_updates, self.max_response_length = total_updates, max_response_length
        self.actor: TrainEngine | None = None
        self.ref: TrainEngine | None = None
        self.rollout: RolloutEngine | None = None
        self.lender: SharedWeights | SentWeights | None = None
        """How an actor that also generates gives its weights to the rollout."""
        self._sender: WeightSender | None = None
        """The sync with a rollout in other workers that is under way."""
        self.stages = Stages(self.device)

    @register(Dispatch.ONE_TO_ALL)
    def memory_needs(self, load: Load) -> Needs | None:
        """What `init_model` and the stages will take on the device, and what is free; None on a CPU, whose memory is the host's already."""
        free = free_device_memory(self.device)
        if free is None:
            return None
        element = self._dtype.itemsize
        models, rollout = policy_needs(self.config, self.role, load=load, world_size=self.world_size, element=element)
        return Needs(free, available_ram(), socket.gethostname(), models, rollout)

    @register(Dispatch.ONE_TO_ALL)
    def place_models(self, placements: Mapping[str, Placement]) -> None:
        """Make `init_model` do what was decided for the models that `memory_needs` named."""
        self.config = place_policy(self.config, placements)

    @register(Dispatch.ONE_TO_ALL)
    def take_peaks(self) -> dict[str, Metric]:
        """Peaks of GPU memory of this process that no update has reported (see Stages.take_peaks)."""
        return self.stages.take_peaks()

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model once for each part of the role; an actor that also generates shares its weights with the rollout."""
        rollout = get_rollout(self.config.rollout.name) if "rollout" in self.role else None
        if rollout is not None:
            check_installed(self.config.rollout.name)
        # Chosen before anything is loaded: what was asked for may be impossible.
        method = self._weight_sync_method() if rollout is not None and "actor" in self.role else None
        attention = rollout.attention if rollout is not None and issubclass(rollout, ModuleRollout) else None
        if "actor" in self.role:
            self.actor = self._make_engine(self.config.actor, self.config.actor.optim, attention)
        if self.config.makes_reference(self.role):
            self.ref = self._make_engine(self.config.reference_engine, None, None)
        if attention is not None:
            self._init_module_rollout(attention)
        elif rollout is not None:
            self._init_process_rollout(method)

    def _init_module_rollout(self, attention: str) -> None:
        """A rollout in this process: from the actor's own tensors, or from a module of its own."""
        if self.actor is not None:
            self.lender = SharedWeights(self.actor, self._dtype)
            decoder = self.actor.decoder
            assert decoder is not None
        else:
            model = load_model(self.config.model, Head.LANGUAGE_MODEL, self.seed)
            decoder = share_structure(model, attention).to(self.device, self._dtype)  # type: ignore[arg-type]
        with self._weights():
            engine = make_rollout(decoder, self.config.rollout, self.pad_token_id, self._decode_text())
        engine.own_weights = not isinstance(self.lender, SharedWeights) or self.lender.keeps_copy
        self.rollout = engine

    def _init_process_rollout(self, method: str | None) -> None:
        """A rollout in a process of its own, which gets the actor's weights, if there is one here, by `method`."""
        config, device = self.config.rollout, self.device
        engine = start_rollout(self.config.model, config, self.pad_token_id, device, self._dtype, self._decode_text())
        self.rollout = engine
        if method is not None:

            def sender(version: int) -> WeightSender:
                if method == "ipc":
                    return IPCSender(version, cuda=device.type == "cuda")
                return make_sender(method, config, version, 1, device)

            self.lender = SentWeights(self._cast_weights, sender, lambda parcel: engine.receive(parcel, device))

    def _weight_sync_method(self) -> str:
        config, cuda = self.config.rollout, self.device.type == "cuda"
        return choose_weight_sync(config.weight_sync, config.name, hybrid=True, same_process=False, same_machine=True, cuda=cuda)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, step: int, on_finished: Callable[[Any], None] | None = None
    ) -> DataProto:
        """One response for each row. Reads prompts, index, sample; writes responses, rollout_log_probs, response_mask, finish_reason.

        `on_finished` gets (row, token ids) of each response as soon as it is there; the row is that of the column of this name.
        """
        assert self.rollout is not None, f"a worker of role {self.role} does not generate"
        requests = [
            Request(prompt_ids, (step, int(index), int(sample)))
            for prompt_ids, index, sample in zip(
                prompts.ragged("prompts").rows(),
                prompts.non_tensor_batch["index"],
                prompts.non_tensor_batch["sample"],
                strict=True,
            )
        ]
        finished: dict[int, Completion] = {}
        counts = [len(request.prompt_ids) for request in requests]
        with self.stages.run("gen", counts, None, "actor_rollout_ref.rollout.gpu_memory_utilization"), self._weights():
            for completion in self.rollout.generate_stream(requests, sampling):
                finished[completion.index] = completion
                if on_finished is not None:
                    on_finished((int(prompts.non_tensor_batch["row"][completion.index]), completion.ids))
        if self.config.rollout.free_cache_engine:
            self.rollout.sleep()
        completions = [finished[i] for i in range(len(requests))]
        failures = [completion.error for completion in completions if completion.error]
        if failures:
            print(f"{len(failures)} of {len(requests)} requests have no response; the first: {failures[0]}", flush=True)
        if len(failures) == len(requests) > 0:
            raise NumericalError(f"no request of the batch has a response; the first: {failures[0]}")
        responses = Ragged.from_rows([c.ids for c in completions], dtype=torch.int64)
        columns = {
            "responses": responses,
            "rollout_log_probs": Ragged.from_rows([c.log_probs for c in completions], dtype=torch.float32),
            "response_mask": responses.like(torch.ones_like(responses.values)),
        }
        return DataProto.from_dict(columns, {"finish_reason": [c.finish_reason for c in completions]})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Reads prompts, responses; writes old_log_probs, entropys under the actor."""
        assert self.actor is not None, f"a worker of role {self.role} has no actor"
        with self.stages.run("old_log_prob", data.token_counts().tolist(), self._actor_budget(), _ACTOR_KEY):
            out = self.actor.forward(data, self._actor_budget(), self.config.rollout.temperature)
        return out.rename(["log_probs"], ["old_log_probs"])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Reads prompts, responses; writes ref_log_prob under the reference: an engine of its own, or the actor without its adapters."""
        assert self.role in ("ref", "actor_rollout_ref"), f"a worker of role {self.role} has no reference policy"
        ref, actor = self.config.ref, self.config.actor
        budget = Budget(
            ref.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu
        )
        with self.stages.run("ref", data.token_counts().tolist(), budget, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"):
            if self.ref is not None:
                out = self.ref.forward(data, budget, self.config.rollout.temperature)
            else:
                assert self.actor is not None
                with self.actor.adapter_off():
                    out = self.actor.forward(data, budget, self.config.rollout.temperature)
        return DataProto.from_dict({"ref_log_prob": out.ragged("log_probs")})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step on this rank's share of a mini-batch; `denominators` hold for the whole of it."""
        assert self.actor is not None, f"a worker of role {self.role} has no actor"
        config = self.config.actor
        loss_fn = make_policy_loss(config, denominators, config.loss_scale_factor or float(self.max_response_length))
        with self.stages.run("update_actor", mini_batch.token_counts().tolist(), self._actor_budget(), _ACTOR_KEY):
            metrics = _learn(
                self.actor,
                mini_batch,
                loss_fn,
                self._actor_budget(),
                "actor",
                self.config.rollout.temperature,
                config.entropy_coeff != 0,
            )
        metrics |= self.stages.take_peaks()
        self._weights_changed()
        return metrics

    @register(Dispatch.ONE_TO_ALL)
    def export_weights(self) -> list[tuple[str, Tensor]] | None:
        """The actor's whole weights on the CPU, from rank 0 (None from the others): what a rollout of its own loads."""
        assert self.actor is not None, f"a worker of role {self.role} has no actor"
        weights = [(name, tensor.cpu()) for name, tensor in self.actor.export_weights()]
        return weights if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def machine(self) -> str:
        """The machine that this process runs on."""
        return socket.gethostname()

    @register(Dispatch.ONE_TO_ALL)
    def offer_weights(self, method: str, version: int, num_receivers: int) -> Parcel | None:
        """Begin a sync of the actor's weights to a rollout in other workers: what those need, from rank 0 (None from the others).

        A parcel without a manifest is a stream: then `send_weights` here and `receive_weights` there run at the same time.
        """
        assert self.actor is not None, f"a worker of role {self.role} has no actor"
        self.withdraw_weights()
        if self.rank == 0:
            self._sender = make_sender(method, self.config.rollout, version, num_receivers, self.device)
        if method != "broadcast":
            self._send()
        return self._sender.parcel() if self._sender is not None else None

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self) -> Manifest | None:
        """Send the stream that `offer_weights` began; what was sent, from rank 0 (None from the others)."""
        return self._send()

    @register(Dispatch.ONE_TO_ALL)
    def withdraw_weights(self) -> None:
        """End the sync, and give its memory back."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, parcel: Parcel) -> Manifest:
        """Replace the weights of a rollout in workers of its own; what it has now."""
        assert self.rollout is not None, f"a worker of role {self.role} does not generate"
        assert self.lender is None, f"a worker of role {self.role} has the actor's weights"
        return self.rollout.receive(parcel, self.device, self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        """Write the actor to a folder."""
        assert self.actor is not None, f"a worker of role {self.role} has no actor"
        self.actor.save(Path(local_path))

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read the actor from a folder that `save_checkpoint` wrote."""
        assert self.actor is not None, f"a worker of role {self.role} has no actor"
        self.actor.load(Path(local_path))
        self._weights_changed()

    def close(self) -> None:
        """End what the worker has started."""
        self.withdraw_weights()
        if self.rollout is not None:
            self.rollout.close()

    @property
    def _dtype(self) -> torch.dtype:
        """The type that the actor computes in, and the rollout too."""
        return compute_dtype(self.config.actor.engine.dtype, self.device)

    def _weights_changed(self) -> None:
        if isinstance(self.lender, SentWeights):
            self.lender.changed()
        elif self.rollout is not None:
            self.rollout.version += 1

    def _cast_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The actor's whole weights in the type of the rollout."""
        assert self.actor is not None
        for name, tensor in self.actor.export_weights():
            yield name, tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor

    def _send(self) -> Manifest | None:
        if self._sender is not None:
            return self._sender.send(self._cast_weights())
        for _ in self._cast_weights():  # gathering is for all ranks
            pass
        return None

    def _make_engine(self, choice: EngineChoice, optim: OptimConfig | None, decoder_attention: str | None) -> TrainEngine:
        return make_engine(
            choice,
            model=self.config.model,
            head=Head.LANGUAGE_MODEL,
            optim=optim,
            total_updates=self.total_updates,
            device=self.device,
            seed=self.seed,
            decoder_attention=decoder_attention,
            max_tokens=_token_limit(self._actor_budget()),
        )

    def _weights(self) -> AbstractContextManager[object]:
        """Inside, the decoder has its weights."""
        return self.lender.lent() if self.lender is not None else nullcontext()

    def _decode_text(self) -> DecodeText | None:
        """What looks for stop strings; the tokenizer is loaded only for them."""
        if not self.config.rollout.stop:
            return None
        assert self.config.model.path is not None
        tokenizer = hf_tokenizer(self.config.model.path, trust_remote_code=self.config.model.trust_remote_code)
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))

    def _actor_budget(self) -> Budget:
        actor = self.config.actor
        return Budget(actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu)


class TrainingWorker(Worker):
    """The critic (role "critic") or the reward model (role "rm"). Subclass it for a reward model of another layout; one that loads
    something else than `config.model` also replaces `memory_needs` (None: it is left out of the plan)."""

    def __init__(self, config: CriticConfig | RewardModelConfig, role: str, *, seed: int, total_updates: int = 0) -> None:
        super().__init__()
        if role not in ("critic", "rm"):
            raise ValueError(f"role={role!r} is not known; choose critic or rm")
        self.config, self.role, self.seed, self.total_updates = config, role, seed, total_updates
        self.engine: TrainEngine | None = None
        self.tokenizer: Any = None
        self.stages = Stages(self.device)

    @register(Dispatch.ONE_TO_ALL)
    def memory_needs(self, load: Load) -> Needs | None:
        """What `init_model` and the stages will take on the device, and what is free; None on a CPU, whose memory is the host's already."""
        free = free_device_memory(self.device)
        if free is None:
            return None
        element = compute_dtype(self.config.engine.dtype, self.device).itemsize
        model = training_needs(self.config, load=load, world_size=self.world_size, element=element)
        return Needs(free, available_ram(), socket.gethostname(), [model])

    @register(Dispatch.ONE_TO_ALL)
    def place_models(self, placements: Mapping[str, Placement]) -> None:
        """Make `init_model` do what was decided for the model that `memory_needs` named."""
        (placement,) = placements.values()
        self.config = place_training(self.config, placement)

    @register(Dispatch.ONE_TO_ALL)
    def take_peaks(self) -> dict[str, Metric]:
        """Peaks of GPU memory of this process that no update has reported (see Stages.take_peaks)."""
        return self.stages.take_peaks()

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model (token classification, one label) or the reward model (sequence classification) with its tokenizer."""
        config, critic = self.config, isinstance(self.config, CriticConfig)
        if not critic:
            assert config.model.path is not None
            self.tokenizer = hf_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self.engine = make_engine(
            config,
            model=config.model,
            head=Head.VALUE if critic else Head.SCORE,
            optim=config.optim if isinstance(config, CriticConfig) else None,
            total_updates=self.total_updates,
            device=self.device,
            seed=self.seed,
            pad_token_id=None if critic else self.tokenizer.pad_token_id,
            max_tokens=_token_limit(self._critic_budget()) if critic else None,
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Reads prompts, responses; writes values."""
        with self.stages.run("values", data.token_counts().tolist(), self._critic_budget(), _CRITIC_KEY):
            return self._engine().forward(data, self._critic_budget())

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step on this rank's share of a mini-batch; `denominators` hold for the whole of it."""
        assert isinstance(self.config, CriticConfig)
        loss_fn = make_value_loss(self.config, denominators)
        with self.stages.run("update_critic", mini_batch.token_counts().tolist(), self._critic_budget(), _CRITIC_KEY):
            metrics = _learn(self._engine(), mini_batch, loss_fn, self._critic_budget(), "critic")
        return metrics | self.stages.take_peaks()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Reads raw_prompt, response_text, responses; writes rm_scores: the model's score on the last response token.

        The text is rendered with the reward model's own chat template and tokenizer. A row without response tokens has no place for a
        score and nothing to learn.
        """
        assert isinstance(self.config, RewardModelConfig)
        texts = zip(data.non_tensor_batch["raw_prompt"], data.non_tensor_batch["response_text"], strict=True)
        rows = Ragged.from_rows([self.render(prompt, response) for prompt, response in texts], dtype=torch.int64)
        budget = Budget(self.config.max_token_len_per_gpu, self.config.micro_batch_size_per_gpu)
        with self.stages.run("reward_model", rows.lengths.tolist(), budget, "reward_model.max_token_len_per_gpu"):
            scores = self._engine().score(rows, budget, self.tokenizer.pad_token_id)
        return DataProto.from_dict({"rm_scores": on_last_token(scores, data.ragged("responses"))})

    def render(self, prompt: str | list[dict[str, str]], response: str) -> list[int]:
        """The token ids that the reward model judges: its chat template over the conversation, or prompt and response in a row."""
        if self.tokenizer.chat_template is None:
            text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
            return self.tokenizer(text + response)["input_ids"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": response})
        return self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        """Write the model to a folder."""
        self._engine().save(Path(local_path))

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read the model from a folder that `save_checkpoint` wrote."""
        self._engine().load(Path(local_path))

    def _engine(self) -> TrainEngine:
        assert self.engine is not None, "init_model() comes first"
        return self.engine

    def _critic_budget(self) -> Budget:
        assert isinstance(self.config, CriticConfig)
        return Budget(self.config.ppo_max_token_len_per_gpu, self.config.ppo_micro_batch_size_per_gpu)


def on_last_token(scores: Tensor, responses: Ragged) -> Ragged:
    """A column like `responses` that is 0 everywhere except for `scores` [rows] on each row's last token."""
    column = torch.zeros(len(responses.values), dtype=torch.float32)
    filled = responses.lengths > 0
    last = torch.cumsum(responses.lengths, 0) - 1
    column[last[filled]] = scores.float()[filled]
    return responses.like(column)


def _token_limit(budget: Budget) -> int | None:
    """Tokens of the largest micro-batch; None where it is cut by rows."""
    return budget.max_tokens if budget.max_rows is None else None


def _learn(
    engine: TrainEngine,
    mini_batch: DataProto,
    loss_fn: LossFn,
    budget: Budget,
    prefix: str,
    temperature: float = 1.0,
    entropy_grad: bool = False,
) -> dict[str, Metric]:
    """Gradient of the mini-batch, then one optimizer step.

    Beside the losses' metrics: tokens a second of one device, and on a GPU whose peak is known the share of it that was used (MFU).
    """
    started = time.perf_counter()
    with engine.on_device():
        metrics = engine.forward_backward(mini_batch, loss_fn, budget, temperature, entropy_grad)
        result = engine.optim_step()
    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(engine.device)
    seconds = time.perf_counter() - started
    metrics |= {f"{prefix}/grad_norm": Mean(result.grad_norm), f"{prefix}/lr": Mean(result.lr)}
    counts = mini_batch.token_counts()
    metrics[f"perf/tokens_per_s/{prefix}"] = Mean(float(counts.sum()), seconds)
    peak = peak_flops(torch.cuda.get_device_name(engine.device)) if on_gpu and engine.dtype == torch.bfloat16 else None
    if peak is not None:
        flops = engine.cost.training(counts.tolist(), len(mini_batch.ragged("responses").values))
        metrics[f"perf/mfu/{prefix}"] = Mean(flops, seconds * peak)
    return metrics
