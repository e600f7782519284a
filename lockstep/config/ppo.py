"""The whole configuration, and the checks that need more than one section."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.config.agent import AgentConfig
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.check import tokens_in_words
from lockstep.config.critic import CriticConfig
from lockstep.config.data import EMBEDDED, DataConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.identity import default_name
from lockstep.config.reward import RewardConfig, RewardModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.config.trainer import RayConfig, TrainerConfig
from lockstep.errors import ConfigError


@dataclass
class PPOConfig:
    """Everything a run needs to know. Read-only once training has started."""

    command: ClassVar[str] = "lockstep ppo"
    flags: ClassVar[str] = " [--from-verl]"
    about: ClassVar[str] = (
        "Without data.train_files and actor_rollout_ref.model.path it trains on the embedded task, with values that suit it. "
        "On a CPU, where no key says how large the run is, a run on your own data is small (docs/recipes.md)."
    )

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_kwargs: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        self._check_model_and_data()
        self._check_batches()
        self._check_rewards()
        self._check_kl()
        self._check_placement()
        if self.trainer.experiment_name is None:
            name = default_name(self, self._algorithm, str(self.actor_rollout_ref.model.path))
            self.trainer = replace(self.trainer, experiment_name=name)

    @property
    def _algorithm(self) -> str:
        """What the run is called after: the loss where that makes the algorithm, else the estimator."""
        estimator = self.algorithm.adv_estimator
        loss = self.actor_rollout_ref.actor.policy_loss.loss_mode
        if estimator == "gae":
            return "ppo"
        if estimator == "grpo" and loss == "vanilla":
            return "dapo" if self.algorithm.filter_groups.enable else "grpo"
        return (loss if estimator == "grpo" else estimator).rpartition(":")[2]

    @property
    def use_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.algorithm.adv_estimator == "gae" if self.critic.enable is None else self.critic.enable

    @property
    def use_reference(self) -> bool:
        """Whether a reference policy is needed: when a KL term is on, or the advantages are the distance to it."""
        with_kl = self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
        return with_kl or self.algorithm.adv_estimator == "distill"

    @property
    def models(self) -> list[ModelConfig]:
        """The models that read whole rows: the policy's, the reference's and the critic's, if the run has them."""
        models = [self.actor_rollout_ref.model]
        if self.use_reference:
            models.append(self.actor_rollout_ref.reference_model)
        if self.use_critic and self.critic.model.path:
            models.append(self.critic.model)
        return models

    @property
    def actor_mini_batch_prompts(self) -> int:
        """Prompts in one optimizer step of the actor."""
        return self.actor_rollout_ref.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def critic_mini_batch_prompts(self) -> int:
        """Prompts in one optimizer step of the critic."""
        return self.critic.ppo_mini_batch_size or self.actor_mini_batch_prompts

    @property
    def critic_epochs(self) -> int:
        """Passes of the critic over each batch."""
        return self.critic.ppo_epochs or self.actor_rollout_ref.actor.ppo_epochs

    @property
    def values_in_update(self) -> bool:
        """Whether the critic's update gives the values too, which are those of its own forward pass: where a batch is one update of it,
        returns come from a row's values with one gamma and one lam (gae), and each rank computes rows of its own."""
        is_one_update = self.critic_mini_batch_prompts >= self.data.train_batch_size and self.critic_epochs == 1
        returns_by_row = self.algorithm.adv_estimator == "gae" and self.algorithm.discount_unit != "turn"
        layout = self.critic.fsdp_config
        own_rows = (
            self.critic.strategy in ("fsdp", "fsdp2") and layout.tensor_parallel_size == 1 == layout.ulysses_sequence_parallel_size
        )
        return self.use_critic and is_one_update and returns_by_row and own_rows

    def sampling(self, stop_token_ids: tuple[int, ...], validation: bool = False) -> SamplingParams:
        """How tokens are drawn in training, or in validation."""
        rollout = self.actor_rollout_ref.rollout
        source = rollout.val_kwargs if validation else rollout
        return source.params(
            max_tokens=self.data.max_response_length,
            stop_token_ids=stop_token_ids,
            stop=rollout.stop,
            seed=self.trainer.seed,
        )

    @property
    def data_seed(self) -> int:
        """Seed of the order of prompts."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    @property
    def needs_ray(self) -> bool:
        """Whether the run has more than one process, which only Ray starts."""
        split = self.reward_model.enable and self.reward_model.enable_resource_pool
        split = split or (self.use_critic and self.critic.enable_resource_pool)
        return split or self.trainer.n_gpus_per_node * self.trainer.nnodes > 1

    def _check_model_and_data(self) -> None:
        model = self.actor_rollout_ref.model.path
        files = self.data.train_files
        if not model:
            raise ConfigError(
                "actor_rollout_ref.model.path is empty; name a Hugging Face model folder", key="actor_rollout_ref.model.path"
            )
        if not files:
            raise ConfigError(
                "data.train_files is empty; name a parquet, json or jsonl file with a 'prompt' column", key="data.train_files"
            )
        if model == EMBEDDED and files != EMBEDDED:
            raise ConfigError(
                f"data.train_files={files} is set but actor_rollout_ref.model.path is not: the embedded model knows only the "
                "embedded task; set actor_rollout_ref.model.path to a Hugging Face model folder",
                key="data.train_files",
            )
        if self.reward_model.enable and not self.reward_model.model.path:
            raise ConfigError(
                "reward_model.enable=true needs reward_model.model.path: the folder of a sequence-classification model",
                key="reward_model.enable",
            )
        if (self.data.custom_cls.path is None) != (self.data.custom_cls.name is None):
            raise ConfigError(
                "data.custom_cls.path and data.custom_cls.name go together; set both or neither", key="data.custom_cls.path"
            )

    def _check_batches(self) -> None:
        batch = self.data.train_batch_size
        sizes = {"actor_rollout_ref.actor.ppo_mini_batch_size": self.actor_mini_batch_prompts}
        if self.use_critic:
            sizes["critic.ppo_mini_batch_size"] = self.critic_mini_batch_prompts
        for key, size in sizes.items():
            if batch % size:
                raise ConfigError(
                    f"data.train_batch_size={batch} prompts cannot be cut into mini-batches of {key}={size} prompts; "
                    f"make {key} a divisor of data.train_batch_size",
                    key="data.train_batch_size",
                )
        longest = self.data.max_prompt_length + self.data.max_response_length
        actor = self.actor_rollout_ref.actor
        ref = self.actor_rollout_ref.ref
        budgets = {
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": (actor.ppo_max_token_len_per_gpu, actor.token_ranks),
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": (ref.log_prob_max_token_len_per_gpu, actor.token_ranks),
        }
        if self.use_critic:
            budgets["critic.ppo_max_token_len_per_gpu"] = (self.critic.ppo_max_token_len_per_gpu, self.critic.token_ranks)
        for key, (budget, ranks) in budgets.items():
            if budget is not None and not isinstance(budget, str) and budget * ranks < longest:
                among = f" divided among {ranks} ranks" if ranks > 1 else ""
                raise ConfigError(
                    f"{key}={budget} tokens cannot hold one row of data.max_prompt_length + data.max_response_length = {longest} "
                    f"tokens{among}; raise {key} to at least {-(-longest // ranks)}",
                    key=key,
                )

    def _check_rewards(self) -> None:
        if self.actor_rollout_ref.rollout.router_replay and self.agent.is_on:
            raise ConfigError(
                "actor_rollout_ref.rollout.router_replay=true does not go with episodes (agent.*); set it to false",
                key="actor_rollout_ref.rollout.router_replay",
            )
        if self.actor_rollout_ref.rollout.name == "sglang" and self.agent.is_on:
            raise ConfigError(
                "actor_rollout_ref.rollout.name=sglang does not go with episodes (agent.*); set native, vllm or hf",
                key="actor_rollout_ref.rollout.name",
            )
        if self.algorithm.discount_unit == "turn" and not self.agent.is_on:
            raise ConfigError(
                "algorithm.discount_unit=turn is for episodes: set agent.environment or agent.tools", key="algorithm.discount_unit"
            )
        overlong = self.reward.overlong_buffer
        longest = self.data.max_response_length
        if overlong.enable and overlong.num_tokens(longest) > longest:
            raise ConfigError(
                f"reward.overlong_buffer.len={overlong.len} is more than data.max_response_length={longest}, so every response would lose "
                "reward; lower it, or set reward.overlong_buffer.enable=false",
                key="reward.overlong_buffer.len",
            )

    def _check_kl(self) -> None:
        actor = self.actor_rollout_ref.actor
        if self.algorithm.adv_estimator == "gae" and self.critic.enable is False:
            raise ConfigError(
                "algorithm.adv_estimator=gae needs a critic, but critic.enable=false; remove critic.enable or choose "
                "algorithm.adv_estimator=grpo",
                key="algorithm.adv_estimator",
            )
        if self.algorithm.use_kl_in_reward and actor.use_kl_loss:
            raise ConfigError(
                "algorithm.use_kl_in_reward=true and actor_rollout_ref.actor.use_kl_loss=true count the same KL twice; "
                "turn one of them off",
                key="algorithm.use_kl_in_reward",
            )
        if self.actor_rollout_ref.ref.model.path is not None and not self.use_reference:
            raise ConfigError(
                f"actor_rollout_ref.ref.model.path={self.actor_rollout_ref.ref.model.path} is set, but nothing reads a reference; set "
                "algorithm.adv_estimator=distill, or a KL term: algorithm.use_kl_in_reward or actor_rollout_ref.actor.use_kl_loss",
                key="actor_rollout_ref.ref.model.path",
            )
        rows = self.data.train_batch_size * self.actor_rollout_ref.rollout.n
        control = self.algorithm.kl_ctrl
        # The controller changes its weight by at most 0.2 * rows / horizon a step; at 1 the weight could reach zero.
        if self.algorithm.use_kl_in_reward and control.type == "adaptive" and 0.2 * rows >= control.horizon:
            raise ConfigError(
                f"algorithm.kl_ctrl.horizon={control.horizon} is too short for data.train_batch_size * actor_rollout_ref.rollout.n = "
                f"{rows} rows per step: one step could take the adaptive KL weight to zero; set it above {0.2 * rows:g}",
                key="algorithm.kl_ctrl.horizon",
            )
        if self.actor_rollout_ref.rollout.temperature == 0:
            raise ConfigError(
                "actor_rollout_ref.rollout.temperature=0 samples the same response every time, so there is nothing to learn; "
                "use a temperature above 0 (validation has its own: actor_rollout_ref.rollout.val_kwargs.temperature)",
                key="actor_rollout_ref.rollout.temperature",
            )
        if self.trainer.critic_warmup and not self.use_critic:
            raise ConfigError(
                f"trainer.critic_warmup={self.trainer.critic_warmup} needs a critic, but algorithm.adv_estimator="
                f"{self.algorithm.adv_estimator} runs without one; set trainer.critic_warmup=0",
                key="trainer.critic_warmup",
            )

    def _check_placement(self) -> None:
        if self.trainer.worker_group == "local" and self.needs_ray:
            raise ConfigError(
                "trainer.worker_group=local runs one process, but the run asks for more (trainer.n_gpus_per_node="
                f"{self.trainer.n_gpus_per_node}, trainer.nnodes={self.trainer.nnodes}, critic.enable_resource_pool="
                f"{self.critic.enable_resource_pool}, reward_model.enable_resource_pool={self.reward_model.enable_resource_pool}); "
                "use trainer.worker_group=ray, or one process",
                key="trainer.worker_group",
            )


def describe(config: PPOConfig, num_prompts: int, total_steps: int, device: str) -> str:
    """Lines that say what one step does, in numbers."""
    n = config.actor_rollout_ref.rollout.n
    batch = config.data.train_batch_size
    actor = config.actor_rollout_ref.actor
    trainer = config.trainer
    processes = trainer.n_gpus_per_node * trainer.nnodes
    per_epoch = num_prompts // batch
    lines = [
        f"{num_prompts} training prompts, {batch} a step: {per_epoch} steps an epoch, {total_steps} steps in all",
        f"a step: {batch} prompts x {n} samples = {batch * n} responses of up to {config.data.max_response_length} tokens",
        _updates("actor", batch, n, config.actor_mini_batch_prompts, actor.ppo_epochs),
    ]
    if config.use_critic:
        lines.append(_updates("critic", batch, n, config.critic_mini_batch_prompts, config.critic_epochs))
    if trainer.critic_warmup:
        lines.append(f"the first {trainer.critic_warmup} steps train the critic alone")
    cut = (
        f"{actor.ppo_micro_batch_size_per_gpu} responses"
        if actor.ppo_micro_batch_size_per_gpu
        else tokens_in_words(actor.ppo_max_token_len_per_gpu)
    )
    one, several = {"cuda": ("GPU", "GPUs"), "cpu": ("CPU process", "CPU processes")}[device]
    lines.append(
        f"on {processes} {several if processes > 1 else one}, at most {cut} at once on each (this bounds memory, not the result)"
    )
    lines.append(f"the run's folder: {trainer.run_dir}")
    return "\n".join(lines)


def _updates(who: str, batch: int, n: int, mini: int, epochs: int) -> str:
    count = batch // mini * epochs
    passes = f" ({epochs} passes)" if epochs > 1 else ""
    steps = f"{count} optimizer step{'s' if count > 1 else ''}"
    return f"the {who} makes {steps} a step{passes}, each on {mini} prompts x {n} = {mini * n} responses"
