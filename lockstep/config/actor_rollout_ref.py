"""`actor_rollout_ref.*`: the policy that is trained, how it generates, and its frozen reference."""

import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from lockstep.config.check import (
    CACHE_SHARE,
    PASS_TOKENS,
    SEATS,
    TOKENS,
    above,
    absolute_reference,
    at_home,
    at_least,
    auto_or,
    auto_or_at_least,
    auto_or_bool,
    auto_or_in_range,
    in_range,
    one_of,
)
from lockstep.config.data import EMBEDDED
from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig, check_learner
from lockstep.config.sampling import SamplingConfig, check_line_breaks, check_stop
from lockstep.errors import ConfigError

ROLLOUTS = ("native", "hf", "vllm", "sglang")
"""Generation engines that can be named in rollout.name."""
WEIGHT_SYNCS = ("auto", "shared", "ipc", "broadcast", "disk")
"""Names that rollout.weight_sync accepts."""
_KEY = "actor_rollout_ref.rollout.weight_sync"


@dataclass(frozen=True)
class Parts:
    """The parts of the policy that one worker holds."""

    actor: bool = False
    rollout: bool = False
    reference: bool = False


POLICY_ROLES = {
    "actor": Parts(actor=True),
    "rollout": Parts(rollout=True),
    "actor_rollout": Parts(actor=True, rollout=True),
    "ref": Parts(reference=True),
    "actor_ref": Parts(actor=True, reference=True),
    "actor_rollout_ref": Parts(actor=True, rollout=True, reference=True),
}
"""Role of an ActorRolloutRefWorker -> its parts."""


@dataclass(frozen=True)
class PolicyKeys:
    """What messages and metrics call a policy and its keys."""

    name: str = "actor"
    engine: str = "actor_rollout_ref.actor"
    tokens: str = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    model: str = "actor_rollout_ref.model"
    reference_tokens: str = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
    reference_offload: str = "actor_rollout_ref.ref.param_offload"
    length: str = "data.max_prompt_length or data.max_response_length"
    rollout: str | None = "actor_rollout_ref.rollout"
    """None where a recipe has no keys of its rollout."""


PPO_KEYS = PolicyKeys()


@dataclass
class PolicyLossConfig:
    """Which policy loss, and its numbers."""

    loss_mode: str = "vanilla"
    """The policy loss: vanilla (PPO's clipped loss with dual clip), gspo, cispo, gpg, geo_mean, sapo, dro, dppo_tv, dppo_kl, clip_cov,
    kl_cov, or path.py:function of your own; see docs/algorithms/."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: the share of tokens that are left out of an update."""
    clip_cov_lb: float = 1.0
    """clip_cov: they are drawn among tokens with a covariance above this..."""
    clip_cov_ub: float = 5.0
    """...and below this."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: the share of tokens, those of the highest covariance, that are penalised."""
    ppo_kl_coef: float = 0.1
    """kl_cov: the weight of their penalty."""
    dro_beta: float = 0.1
    """dro: the weight of the pull back to the old policy."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of a policy loss of your own, by name."""

    def __post_init__(self) -> None:
        self.loss_mode = absolute_reference(self.loss_mode)
        prefix = "actor_rollout_ref.actor.policy_loss"
        above(self, prefix, 0.0, "clip_cov_ratio", "kl_cov_ratio", "dro_beta")
        in_range(self, prefix, 0.0, 1.0, "clip_cov_ratio", "kl_cov_ratio")
        at_least(self, prefix, 0.0, "ppo_kl_coef")
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ConfigError(
                f"{prefix}.clip_cov_lb={self.clip_cov_lb} must be below {prefix}.clip_cov_ub={self.clip_cov_ub}",
                key=f"{prefix}.clip_cov_lb",
            )


@dataclass
class ActorConfig(EngineChoice):
    """Training of the policy: batches, clipping, loss."""

    ppo_mini_batch_size: int | None = None
    """Prompts an optimizer step (their n samples go with them); null means data.train_batch_size: one step a batch."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows computed at once on one device; null cuts by ppo_max_token_len_per_gpu. It never changes the result."""
    ppo_max_token_len_per_gpu: int | str = "auto"
    """Tokens computed at once on one device; auto: as many as help, while nothing more is offloaded or recomputed for them. It never
    changes the result."""
    ppo_epochs: int = 1
    """Passes over each batch."""
    shuffle: bool = False
    """Cut each pass into mini-batches in a new order."""
    clip_ratio: float = 0.2
    """PPO's clip range."""
    clip_ratio_low: float | None = None
    """The clip range below 1; null means clip_ratio."""
    clip_ratio_high: float | None = None
    """The clip range above 1; null means clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual clip: the loss of a token with negative advantage is at most this times the advantage. dppo: the largest weight."""
    tau_pos: float = 1.0
    """sapo: how fast the gate of a token with positive advantage closes."""
    tau_neg: float = 1.05
    """sapo: the same with negative advantage."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm."""
    loss_scale_factor: float | None = None
    """The divisor of seq-mean-token-sum-norm; null means data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = 0.001
    """Its weight."""
    kl_loss_type: str = "low_var_kl"
    """Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3); with a final + the value keeps and the gradient is that of mse."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        prefix = "actor_rollout_ref.actor"
        self.check(prefix)
        self.optim.check(f"{prefix}.optim")
        at_least(self, prefix, 1, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs")
        auto_or_at_least(self, prefix, 1, "ppo_max_token_len_per_gpu")
        at_least(self, prefix, 1.0, "clip_ratio_c")
        at_least(self, prefix, 0.0, "clip_ratio", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef")
        above(self, prefix, 0.0, "tau_pos", "tau_neg", "loss_scale_factor")

    @property
    def max_tokens(self) -> int:
        """Tokens computed at once, as they are where no plan has chosen them."""
        return int(auto_or(self.ppo_max_token_len_per_gpu, TOKENS))

    @property
    def clip_low(self) -> float:
        """The clip range below 1."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The clip range above 1."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def loss_parameters(self) -> dict[str, Any]:
        """The numbers that a policy loss may ask for, by the names of its arguments."""
        own = self.policy_loss
        return {
            "clip_ratio_low": self.clip_low,
            "clip_ratio_high": self.clip_high,
            "clip_ratio_c": self.clip_ratio_c,
            "tau_pos": self.tau_pos,
            "tau_neg": self.tau_neg,
            "clip_cov_ratio": own.clip_cov_ratio,
            "clip_cov_lb": own.clip_cov_lb,
            "clip_cov_ub": own.clip_cov_ub,
            "kl_cov_ratio": own.kl_cov_ratio,
            "ppo_kl_coef": own.ppo_kl_coef,
            "dro_beta": own.dro_beta,
        } | own.loss_kwargs


@dataclass
class RefModelConfig:
    """A reference of its own."""

    path: str | None = None
    """A model of its own as the reference, a teacher, with the actor's tokenizer; null means what the actor starts from."""

    def __post_init__(self) -> None:
        at_home(self, "path")


@dataclass
class RefConfig:
    """The frozen policy that a KL term measures against."""

    model: RefModelConfig = field(default_factory=RefModelConfig)
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Rows computed at once; null cuts by log_prob_max_token_len_per_gpu."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Tokens computed at once; null means the actor's budget."""
    param_offload: bool | str = "auto"
    """Keep the reference's weights in host memory while it is idle (fsdp, fsdp2). auto: when the models on a GPU do not fit otherwise."""

    def __post_init__(self) -> None:
        prefix = "actor_rollout_ref.ref"
        at_least(self, prefix, 1, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
        auto_or_bool(self, prefix, "param_offload")


@dataclass
class ValidationSampling(SamplingConfig):
    """How tokens are drawn in validation."""

    prefix: ClassVar[str] = "actor_rollout_ref.rollout.val_kwargs"


@dataclass
class RolloutConfig(SamplingConfig):
    """Generation: engine, sampling, memory."""

    prefix: ClassVar[str] = "actor_rollout_ref.rollout"

    name: str = "native"
    """Generation engine: native (decodes from the trainer's own weights), hf (transformers.generate, slow reference), vllm, or sglang."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in training alike."""
    repetition_penalty: float = 1.0
    """Makes tokens that the prompt or the response already has less likely (above 1). Log-probs stay those without it."""
    stop: list[str] = field(default_factory=list)
    """A response ends after the token that completes one of these strings; its tokens stay in the response."""
    max_num_seqs: int | str = "auto"
    """Sequences decoded at once on one device; auto: on a GPU those of a step, as far as there is memory, on a CPU 256."""
    max_num_batched_tokens: int | str = "auto"
    """Tokens computed at once on one device; longer prompts are computed in several passes. auto: 8,192, on a GPU up to 32,768."""
    gpu_memory_utilization: int | float | str = "auto"
    """Of the GPU memory that is free when generation starts, how much the key-value cache may take (vllm and sglang: of what is free when
    the engine starts, how much it takes for weights and cache). auto: what kernels, logits and prompts leave; vllm and sglang 0.5."""
    free_cache_engine: bool = True
    """Give the key-value cache's memory back after each generation, for the update."""
    kv_cache_dtype: str = "auto"
    """Type of keys and values in the cache: auto (the model's), or fp8, which takes half the bytes of bfloat16 and is less exact.
    fp8 needs a GPU; the native engine has it in bfloat16 for Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE
    (docs/generation_gpu.md), vllm as vLLM has it."""
    batch_invariant: bool = False
    """native: compute in shapes that round alike in any batch: tokens and log-probs are the same bit for bit, and generation is slower."""
    router_replay: bool = False
    """Mixtures of experts: keep which experts the sampler chose for each token, and use them in the actor's log-probs and updates (native,
    on a GPU for Mixtral and Qwen3-MoE; fsdp and fsdp2); see docs/training.md."""
    enforce_eager: bool = False
    """vllm and sglang: no compilation and no CUDA graphs. Starts sooner, generates slower."""
    weight_sync: str = "auto"
    """How weights reach the engine after an update: shared (zero bytes), ipc (shared memory), broadcast (gloo or nccl) or disk; auto
    chooses, see docs/rollouts.md."""
    weight_sync_dir: str | None = None
    """disk: a folder that both sides see; null means /dev/shm, or the folder for temporary files."""
    weight_sync_timeout_s: float = 300.0
    """broadcast: longest time that one side waits for the other, to meet and for each tensor."""
    start_timeout_s: float = 900.0
    """vllm and sglang: longest time that the engine's process may take to start."""
    silence_timeout_s: float = 600.0
    """vllm and sglang: longest time that it may work without a sign of life."""
    fallback_to_hf: bool = False
    """Generate with transformers (slow) from a model that the native engine cannot compute; otherwise such a model is an error."""
    exactness_bound: float = 1e-4
    """While the sampler's log-probs are this close to the trainer's, they serve as old log-probs and that pass is skipped; 0: never.
    A batch's one update computes its own."""
    val_kwargs: ValidationSampling = field(default_factory=ValidationSampling)

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = self.prefix
        at_home(self, "weight_sync_dir")
        one_of(f"{prefix}.name", self.name, ROLLOUTS)
        auto_or_at_least(self, prefix, 1, "max_num_seqs", "max_num_batched_tokens")
        check_stop(prefix, self.stop)
        check_line_breaks(f"{prefix}.stop", self.stop)
        auto_or_in_range(self, prefix, 0.01, 1.0, "gpu_memory_utilization")
        at_least(self, prefix, 0.0, "exactness_bound")
        at_least(self, prefix, 0.001, "weight_sync_timeout_s", "start_timeout_s", "silence_timeout_s")
        one_of(f"{prefix}.weight_sync", self.weight_sync, WEIGHT_SYNCS)
        one_of(f"{prefix}.kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8"))
        if self.has_small_cache and self.name not in ("native", "vllm"):
            raise ConfigError(
                f"{prefix}.kv_cache_dtype={self.kv_cache_dtype} is of rollout.name=native or vllm, not {self.name}; set it to auto",
                key=f"{prefix}.kv_cache_dtype",
            )
        if self.batch_invariant and self.name != "native":
            raise ConfigError(
                f"actor_rollout_ref.rollout.batch_invariant=true is of rollout.name=native; {self.name} computes in shapes of its own",
                key="actor_rollout_ref.rollout.batch_invariant",
            )

        if self.router_replay and self.name != "native":
            raise ConfigError(
                f"{prefix}.router_replay=true is of rollout.name=native; {self.name} does not say which experts it chose",
                key=f"{prefix}.router_replay",
            )

    def gives_log_probs(self, temperature: float, filtered: bool, penalised: bool) -> bool:
        """Whether the engine can give the log-probs that the trainer computes: of the whole distribution at `temperature` (at 1 when it is
        0), whatever top-k, top-p or min-p (`filtered`) and a repetition penalty (`penalised`) made of it.

        vllm gives them either before the temperature, or after everything, by a choice made when it starts; sglang after temperature and
        penalty.
        """
        if self.name == "vllm":
            plain = temperature in (0.0, 1.0)
            return plain if self.log_probs_are_raw else not (filtered or penalised)
        return not (self.name == "sglang" and penalised)

    @property
    def has_small_cache(self) -> bool:
        """Whether keys and values are kept in fewer bits than the model's."""
        return self.kv_cache_dtype != "auto"

    @property
    def seats(self) -> int:
        """Sequences at once, as they are where no plan has chosen them; the two below likewise."""
        return int(auto_or(self.max_num_seqs, SEATS))

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass."""
        return int(auto_or(self.max_num_batched_tokens, PASS_TOKENS))

    @property
    def cache_share(self) -> float:
        """Of the free memory, what the cache may take."""
        return auto_or(self.gpu_memory_utilization, CACHE_SHARE)

    @property
    def log_probs_are_raw(self) -> bool:
        """vllm: whether its log-probs are those before the temperature (right where it is 1), or those of what is drawn from."""
        return self.temperature in (0.0, 1.0)

    @property
    def has_log_probs(self) -> bool:
        """Whether the log-probs of the training samples are those that the trainer computes; otherwise they are missing (NaN)."""
        filtered = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return self.gives_log_probs(self.temperature, filtered, self.repetition_penalty != 1.0)


@dataclass
class ActorRolloutRefConfig:
    """The policy: its model, training, generation and reference."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=EMBEDDED))
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        self.model.check("actor_rollout_ref.model")
        check_learner(self.model, self.actor, "actor_rollout_ref.actor", "actor_rollout_ref.model")
        if self.rollout.router_replay:
            self._check_replay()
        if self.ref.param_offload is True and self.actor.strategy not in ("fsdp", "fsdp2"):
            raise ConfigError(
                "actor_rollout_ref.ref.param_offload=true needs actor_rollout_ref.actor.strategy=fsdp2 or fsdp, not "
                f"{self.actor.strategy}; set it to auto",
                key="actor_rollout_ref.ref.param_offload",
            )

    def _check_replay(self) -> None:
        """Raise ConfigError where the actor cannot use what the sampler's routers chose."""
        actor = self.actor
        asked = "actor_rollout_ref.rollout.router_replay=true"
        if actor.strategy not in ("fsdp", "fsdp2"):
            raise ConfigError(
                f"{asked} needs actor_rollout_ref.actor.strategy=fsdp2 or fsdp, not {actor.strategy}",
                key="actor_rollout_ref.rollout.router_replay",
            )
        size = actor.fsdp_config.ulysses_sequence_parallel_size
        if size > 1:
            raise ConfigError(
                f"{asked} needs whole rows on each rank: set actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={size} "
                "to 1",
                key="actor_rollout_ref.rollout.router_replay",
            )

    @property
    def reference_engine(self) -> EngineChoice:
        """The reference's engine: the actor's, with what is its own."""
        return replace(self.actor, fsdp_config=replace(self.actor.fsdp_config, param_offload=self.ref.param_offload))

    @property
    def reference_model(self) -> ModelConfig:
        """The reference's model: what the actor starts from, or one of its own."""
        path = self.ref.model.path
        return self.model if path is None else ModelConfig(path=path, trust_remote_code=self.model.trust_remote_code)

    def loads_reference(self, parts: Parts) -> bool:
        """Whether a worker with these parts loads a reference; an actor with adapters is one without them, unless another is named."""
        return parts.reference and (self.ref.model.path is not None or not (parts.actor and self.model.adapts))


def choose_weight_sync(
    asked: str, engine: str, *, hybrid: bool, same_process: bool, same_machine: bool, cuda: bool, linux: bool | None = None
) -> str:
    """shared, ipc, broadcast or disk.

    `hybrid`: the actor's worker generates itself. Otherwise `same_process` and `same_machine` say where the rollout's workers are, seen
    from the actor's. Raises ConfigError when what was asked for cannot work.
    """
    possible = _possible(engine, hybrid, same_process, same_machine, cuda, hasattr(os, "memfd_create") if linux is None else linux)
    if asked == "auto":
        return possible[0]
    if asked not in possible:
        where = "in the actor's worker" if hybrid else "in workers of its own"
        raise ConfigError(
            f"{_KEY}={asked} cannot serve rollout.name={engine} {where}; choose one of: auto, {', '.join(possible)}", key=_KEY
        )
    return asked


def _possible(engine: str, hybrid: bool, same_process: bool, same_machine: bool, cuda: bool, linux: bool) -> list[str]:
    """The methods that work, the best one first."""
    if engine == "sglang":  # its server reads files only
        return ["disk"]
    if hybrid and engine != "vllm":
        return ["shared"]
    ipc = ["ipc"] if linux and same_machine else []
    if hybrid or same_process:  # one process cannot be two members of a broadcast
        return [*ipc, "disk"]
    return ["broadcast", *ipc, "disk"] if cuda or not ipc else [*ipc, "broadcast", "disk"]
