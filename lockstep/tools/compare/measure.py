"""One recorded batch, several algorithms: what each would do with it, by the path that a training step takes.

The policy is loaded once. For each algorithm the trainer's own stages give the advantages, the workers' own loss is called by the engine on
its micro-batches, and the gradients are read where the optimizer would. The whole batch is one mini-batch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.advantages import required_inputs
from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.kl import make_kl_controller
from lockstep.algorithms.rows import Rows
from lockstep.config.engine import EngineChoice
from lockstep.config.load import with_changes
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.models.hf_config import read_model_config
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.observability.metrics import values
from lockstep.observability.spans import progress
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base.host import WorkerHost
from lockstep.single_controller.base.worker import WorkerEnvironment
from lockstep.tools.compare import arithmetic, tokens
from lockstep.tools.compare.named import Algorithm, own_changes
from lockstep.tools.compare.report import AlgorithmResult, Comparison
from lockstep.trainer.ppo import checks, stages
from lockstep.trainer.ppo.algorithm import Estimation, PolicyUpdate, correction_of
from lockstep.trainer.ppo.metrics import row_sums
from lockstep.trainer.ppo.recording import Recording
from lockstep.trainer.ppo.rewards import leave_out
from lockstep.utils.device import resolve_device
from lockstep.utils.files import load_reference
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.engine.base import LossOutput, TokenOutputs, TokenRows, TrainEngine
from lockstep.workers.engine.fsdp.sharding import own_gradients
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.losses import make_policy_loss

_HOW_TO_RECORD = {
    "values": "critic.enable=true",
    "ref_log_prob": "algorithm.use_kl_in_reward=true or actor_rollout_ref.actor.use_kl_loss=true",
    "reward_parts": "a reward function that returns a dict of numbers",
}
"""Column -> what a run needs so that its recorded batch has it."""
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Measured:
    """One algorithm on the batch."""

    gradient: dict[str, Tensor]
    """Parameter -> gradient, float32 on the CPU."""
    metrics: dict[str, float]
    """What the policy loss reports."""
    pushes: Ragged
    """-d loss / d log_prob."""
    log_probs: Tensor
    """[M], of the response tokens."""
    rows: DataProto
    """The mini-batch as the engine got it: with advantages, and the mask after the correction."""


def compare(
    recording: Recording,
    algorithms: Sequence[Algorithm],
    *,
    changes: Mapping[str, Any] | None = None,
    model: Path | None = None,
    drift: float | None = None,
    num_tokens: int = 10,
    num_excerpts: int = 6,
) -> Comparison:
    """Compute each algorithm's advantages, loss and gradient on the recorded batch. No weight on disk changes.

    Args:
        changes: keys of the configuration that hold for every algorithm.
        model: the policy that would be updated; None is the one that wrote the batch, where every ratio is 1.
        drift: learning rate of one optimizer step, with the first algorithm that works, taken before the comparison.
        num_tokens: most pushed tokens to keep, up and as many down.

    Raises DataError when the policy does not know the batch's tokens, ConfigError when fewer than two algorithms can be compared. An
    algorithm that the batch has not the columns for is listed in `not_comparable`.
    """
    # Without what concerns only the machine and the schedule of the recorded run.
    neutral = {"critic.enable": True, "trainer.critic_warmup": 0, "trainer.device": "auto", "trainer.worker_group": "auto"}
    everywhere = dict(changes or {})
    batch, shared = recording.batch, with_changes(recording.config, neutral | everywhere)
    policy = model or recording.model
    _check_tokens(batch, shared, policy)
    configs: list[tuple[Algorithm, PPOConfig]] = []
    not_comparable: list[tuple[str, str]] = []
    for algorithm in algorithms:
        try:
            configs.append((algorithm, _configure(shared, own_changes(algorithm, recording.config) | everywhere, batch)))
        except LockstepError as error:
            not_comparable.append((algorithm.name, str(error)))
    _check_number(len(configs), len(algorithms), not_comparable)  # before minutes of computing
    measured: list[tuple[Algorithm, Measured]] = []
    drifted: str | None = None
    with progress("comparing"), loaded_policy(shared, policy, drift or 0.0) as engine:
        for algorithm, config in configs if drift is not None else ():
            with suppress(LockstepError), progress(f"computing the drift with {algorithm.name}"):
                measure(engine, batch, config)
                drifted = algorithm.name
                break
        if drifted is not None:
            engine.optim_step()
        for number, (algorithm, config) in enumerate(configs, start=1):
            try:
                with progress(f"computing {algorithm.name} ({number} of {len(configs)})"):
                    measured.append((algorithm, measure(engine, batch, config)))
            except LockstepError as error:
                not_comparable.append((algorithm.name, str(error)))
    _check_number(len(measured), len(algorithms), not_comparable)
    tokenizer = hf_tokenizer(str(recording.model), shared.actor_rollout_ref.model.trust_remote_code)
    dots = arithmetic.dots([m.gradient for _, m in measured])
    largest = max(m.metrics["actor/log_ratio_max"] for _, m in measured)
    return Comparison(
        source=_source(recording, policy) | {"drift": drift, "drift_algorithm": drifted, "largest_log_ratio": largest},
        results=[_result(*each, dots[k][k] ** 0.5, batch, tokenizer, num_tokens) for k, each in enumerate(measured)],
        cosines=arithmetic.cosines(dots),
        row_prompts=[str(uid) for uid in batch.non_tensor_batch["uid"]],
        row_scores=row_sums(batch, "token_level_scores").tolist(),
        excerpts=tokens.excerpts(batch, [m.pushes for _, m in measured], tokenizer, num_excerpts),
        not_comparable=not_comparable,
    )


def _check_number(left: int, asked: int, not_comparable: Sequence[tuple[str, str]]) -> None:
    if left < 2:
        listed = "".join(f"\n  {name}: {reason}" for name, reason in not_comparable)
        raise ConfigError(f"{left} of {asked} algorithms can be computed, and a comparison needs two{listed}")


def _source(recording: Recording, policy: Path) -> dict[str, Any]:
    """Where the numbers come from."""
    batch = recording.batch
    return {
        "recording": str(recording.folder),
        "model": str(policy),
        "step": batch.meta_info.get("global_step"),
        "rows": len(batch),
        "prompts": len(set(batch.non_tensor_batch["uid"])),
        "tokens": int(batch.ragged("responses").lengths.sum()),
    }


@contextmanager
def loaded_policy(config: PPOConfig, path: Path, lr: float) -> Iterator[TrainEngine]:
    """The policy in the training engine, on one rank in this process; an optimizer step has the rate `lr`."""
    actor_rollout_ref = config.actor_rollout_ref
    device = resolve_device(config.trainer.device)
    environment = WorkerEnvironment(device=torch.device("cuda", 0) if device == "cuda" else torch.device(device), name="compare")
    host = WorkerHost()
    host.setup(environment, start_timeout_s=config.trainer.start_timeout_s, timeout_s=config.trainer.worker_timeout_s)
    optim = dataclasses.replace(
        actor_rollout_ref.actor.optim, lr=lr, lr_scheduler_type="constant", lr_warmup_steps=0, lr_warmup_steps_ratio=0.0
    )
    try:
        yield make_engine(
            EngineChoice("fsdp2", fsdp_config=actor_rollout_ref.actor.fsdp_config),
            EngineSpec(
                model=dataclasses.replace(actor_rollout_ref.model, path=str(path)),
                head=Head.LANGUAGE_MODEL,
                optim=optim,
                total_updates=1,
                device=environment.device,
                seed=config.trainer.seed,
            ),
        )
    finally:
        host.close()


def measure(engine: TrainEngine, batch: DataProto, config: PPOConfig) -> Measured:
    """The gradient and the pushes of one algorithm; the batch stays as it is, the gradient stays in the engine.

    Raises what the stages and the loss raise, and DataError when no token is left to learn from.
    """
    actor, kl = config.actor_rollout_ref.actor, config.algorithm.kl_ctrl
    data = _with_baselines(batch.select(), config)
    if config.algorithm.rollout_correction.bypass_mode:
        stages.use_sampler_log_probs(data)
    stages.correct(data, correction_of(config.algorithm.rollout_correction))
    estimation = Estimation.of(config.algorithm)
    stages.shape_rewards(data, estimation, make_kl_controller("fixed", kl.kl_coef, kl.target_kl, kl.horizon))
    stages.estimate(data, estimation)
    rows = stages.actor_mini_batch(data, torch.arange(len(data)), PolicyUpdate.of(actor))
    mask = rows.ragged("response_mask")
    denominators = Denominators.of(mask.values, Rows(mask.lengths))
    if not denominators.tokens:
        raise DataError("no token of the batch is in the loss: every row was left out or rejected")
    loss_fn = make_policy_loss(actor, actor.loss_scale_factor or float(config.data.max_response_length)).of(denominators)
    pushes, log_probs = (mask.like(torch.zeros(len(mask.values))) for _ in range(2))

    num_seen = 0

    def watched(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
        nonlocal num_seen
        assert outputs.log_probs is not None
        here = slice(num_seen, num_seen + tokens.rows.num_tokens)  # rows come in their order
        num_seen = here.stop

        def keep(gradient: Tensor) -> None:
            pushes.values[here] = -gradient.cpu().float()

        log_probs.values[here] = outputs.log_probs.detach().cpu().float()
        outputs.log_probs.register_hook(keep)
        return loss_fn(outputs, tokens)

    budget = Budget(actor.max_tokens, actor.ppo_micro_batch_size_per_gpu)
    temperature = config.actor_rollout_ref.rollout.temperature
    with engine.on_device():
        engine.module.zero_grad()
        metrics = engine.forward_backward(rows, watched, budget, temperature, entropy_grad=actor.entropy_coeff != 0)
        gradient = {name: tensor.float().cpu().clone() for name, tensor in own_gradients(engine.module)}
    return Measured(gradient, values(metrics), pushes, log_probs.values, rows)


def _with_baselines(data: DataProto, config: PPOConfig) -> DataProto:
    """Without the rows whose baseline is missing (NaN), where the estimator reads baselines: as a run that asks for them does it."""
    estimator = config.algorithm.adv_estimator
    if "reward_baselines" in data and "reward_baselines" in required_inputs(load_reference(estimator) or estimator):
        baselines = data.batch["reward_baselines"]
        leave_out(data, baselines.isnan())
        data.set("reward_baselines", baselines.nan_to_num())
    return data


def _result(
    algorithm: Algorithm, m: Measured, grad_norm: float, batch: DataProto, tokenizer: Any, num_tokens: int
) -> AlgorithmResult:
    rows = m.rows
    mask, pushes = rows.ragged("response_mask").values.bool(), m.pushes.values
    weights = rows.ragged("rollout_is_weights").values[mask] if "rollout_is_weights" in rows else 1.0
    up, down = arithmetic.strongest(m.pushes, num_tokens)
    ratio = (m.log_probs - rows.ragged("old_log_probs").values).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    numbers = {"push": m.pushes, "advantage": rows.ragged("advantages"), "ratio": m.pushes.like(ratio)}
    shown = partial(tokens.token_push, batch, tokenizer, numbers)
    return AlgorithmResult(
        name=algorithm.name,
        settings=dict(algorithm.changes),
        loss=m.metrics["actor/loss"],
        grad_norm=grad_norm,
        clip_fraction=m.metrics.get("actor/pg_clipfrac"),
        dual_clip_fraction=m.metrics.get("actor/pg_clipfrac_lower"),
        masked_fraction=(~mask).double().mean().item(),
        silent_fraction=(pushes == 0).double().mean().item(),
        ratio_effective=arithmetic.effective_share(ratio[mask] * weights),
        push_effective=arithmetic.effective_share(pushes[mask].abs()),
        largest_push=float(pushes.abs().max()),
        pushed_up=[shown(*place) for place in up],
        pushed_down=[shown(*place) for place in down],
        row_pushes=Rows(m.pushes.lengths).sum(pushes.double()).tolist(),
    )


def _configure(shared: PPOConfig, changes: Mapping[str, Any], batch: DataProto) -> PPOConfig:
    """The configuration of one algorithm. Raises ConfigError when it cannot work, or the batch lacks a column that it reads."""
    config = with_changes(shared, changes)
    checks.check_algorithm(config)
    estimator = config.algorithm.adv_estimator
    needed = [name for name in required_inputs(load_reference(estimator) or estimator) if name in _HOW_TO_RECORD]
    needed += ["ref_log_prob"] if config.use_reference else []
    for name in needed:
        if name not in batch:
            raise ConfigError(
                f"it reads the column {name}, which the recorded batch does not have; record one with {_HOW_TO_RECORD[name]}"
            )
    return config


def _check_tokens(batch: DataProto, config: PPOConfig, policy: Path) -> None:
    """DataError unless the policy's vocabulary has every token of the batch."""
    model = config.actor_rollout_ref.model
    vocabulary = read_model_config(str(policy), model.trust_remote_code, **model.override_config).get_text_config().vocab_size
    ids = torch.cat([batch.ragged(name).values for name in ("prompts", "responses")])
    largest = int(ids.max()) if len(ids) else 0
    if largest >= vocabulary:
        raise DataError(
            f"the batch has the token {largest}, but {policy} knows only 0 to {vocabulary - 1}: it is not a model of the recorded "
            "run's family; leave out --model, or name a checkpoint of that run"
        )
