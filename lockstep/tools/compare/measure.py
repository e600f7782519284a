"""One recorded batch, several algorithms: what each would do with it, by the path that a training step takes.

The policy is loaded once. For each algorithm the trainer's own stages give the advantages, the workers' own loss is called by the engine on
its micro-batches, and the gradients are read where the optimizer would. The whole batch is one mini-batch.

A *push* is -d loss / d log_prob of a token: how much a small step down the loss raises its log-prob, were it free to move alone. It is the
advantage times everything the loss does with it: ratio, clip, weight, aggregation.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from lockstep.tools.compare.algorithms import Algorithm, own_changes
from lockstep.tools.compare.report import AlgorithmResult, Comparison, Excerpt, TokenPush
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
_NEUTRAL = {"critic.enable": True, "trainer.critic_warmup": 0, "trainer.device": "auto", "trainer.worker_group": "auto"}
"""Keys in place of the recorded run's, which concern only its machine and its schedule."""
_MAX_LOG_RATIO = 20.0
_CONTEXT = 8
"""Tokens of text on each side of a token."""
_EXCERPT = 28
"""Tokens of a response in an excerpt."""
_PROMPT = 60
"""Characters of the end of a prompt."""

Gradient = Mapping[str, Tensor]
"""Parameter -> its gradient."""


@dataclass(frozen=True)
class Measurement:
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

    Algorithms for which the batch lacks a column are listed in `not_comparable`. Raises DataError if the policy does not know the batch's
    tokens, ConfigError if fewer than two algorithms can be compared.
    """
    everywhere = dict(changes or {})
    batch = recording.batch
    shared = with_changes(recording.config, _NEUTRAL | everywhere)
    policy = model or recording.model
    _check_tokens(batch, shared, policy)
    configs: list[tuple[Algorithm, PPOConfig]] = []
    not_comparable: list[tuple[str, str]] = []
    for algorithm in algorithms:
        try:
            own = own_changes(algorithm, recording.config)
            configs.append((algorithm, _configure(shared, own | everywhere, batch)))
        except LockstepError as error:
            not_comparable.append((algorithm.name, str(error)))
    _check_number(len(configs), len(algorithms), not_comparable)  # before minutes of computing
    measurements: list[tuple[Algorithm, Measurement]] = []
    with progress("comparing"), loaded_policy(shared, policy, drift or 0.0) as engine:
        drifted = _drift(engine, batch, configs) if drift is not None else None
        for number, (algorithm, config) in enumerate(configs, start=1):
            try:
                with progress(f"computing {algorithm.name} ({number} of {len(configs)})"):
                    measurements.append((algorithm, measure(engine, batch, config)))
            except LockstepError as error:
                not_comparable.append((algorithm.name, str(error)))
    _check_number(len(measurements), len(algorithms), not_comparable)
    tokenizer = hf_tokenizer(str(recording.model), shared.actor_rollout_ref.model.trust_remote_code)
    products = dots([measurement.gradient for _, measurement in measurements])
    results = []
    for number, (algorithm, measurement) in enumerate(measurements):
        grad_norm = products[number][number] ** 0.5
        results.append(_result(algorithm, measurement, grad_norm, batch, tokenizer, num_tokens))
    largest = max(measurement.metrics["actor/log_ratio_max"] for _, measurement in measurements)
    return Comparison(
        source=_source(recording, policy) | {"drift": drift, "drift_algorithm": drifted, "largest_log_ratio": largest},
        results=results,
        cosines=cosines(products),
        row_prompts=[str(uid) for uid in batch.non_tensor_batch["uid"]],
        row_scores=row_sums(batch, "token_level_scores").tolist(),
        excerpts=excerpts(batch, [measurement.pushes for _, measurement in measurements], tokenizer, num_excerpts),
        not_comparable=not_comparable,
    )


def _drift(engine: TrainEngine, batch: DataProto, configs: Sequence[tuple[Algorithm, PPOConfig]]) -> str | None:
    """Take an optimizer step with the first algorithm that works; return its name, None if none works."""
    for algorithm, config in configs:
        try:
            with progress(f"computing the drift with {algorithm.name}"):
                measure(engine, batch, config)
        except LockstepError:
            continue
        engine.optim_step()
        return algorithm.name
    return None


def _check_number(left: int, given: int, not_comparable: Sequence[tuple[str, str]]) -> None:
    if left < 2:
        listed = "".join(f"\n  {name}: {reason}" for name, reason in not_comparable)
        raise ConfigError(f"{left} of {given} algorithms can be computed, and a comparison needs two{listed}")


def _source(recording: Recording, policy: Path) -> dict[str, Any]:
    """Return where the numbers come from."""
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
    """Yield the policy in the training engine, on one rank in this process; an optimizer step has the rate `lr`."""
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


def measure(engine: TrainEngine, batch: DataProto, config: PPOConfig) -> Measurement:
    """Return the gradient and the pushes of one algorithm. The batch does not change; the gradient stays in the engine.

    Raises what the stages and the loss raise, and DataError if no token is left to learn from.
    """
    actor = config.actor_rollout_ref.actor
    kl = config.algorithm.kl_ctrl
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
    pushes = mask.like(torch.zeros(len(mask.values)))
    log_probs = torch.zeros(len(mask.values))
    num_seen = 0

    def watched(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
        nonlocal num_seen
        assert outputs.log_probs is not None
        here = slice(num_seen, num_seen + tokens.rows.num_tokens)  # rows come in their order
        num_seen = here.stop

        def keep(gradient: Tensor) -> None:
            pushes.values[here] = -gradient.cpu().float()

        log_probs[here] = outputs.log_probs.detach().cpu().float()
        outputs.log_probs.register_hook(keep)
        return loss_fn(outputs, tokens)

    budget = Budget(actor.max_tokens, actor.ppo_micro_batch_size_per_gpu)
    temperature = config.actor_rollout_ref.rollout.temperature
    with engine.on_device():
        engine.module.zero_grad()
        metrics = engine.forward_backward(rows, watched, budget, temperature, entropy_grad=actor.entropy_coeff != 0)
        gradient = {name: tensor.float().cpu().clone() for name, tensor in own_gradients(engine.module)}
    return Measurement(gradient, values(metrics), pushes, log_probs, rows)


def _with_baselines(data: DataProto, config: PPOConfig) -> DataProto:
    """Leave out the rows whose baseline is missing (NaN) if the estimator reads baselines, as a run does; return the batch."""
    estimator = config.algorithm.adv_estimator
    if "reward_baselines" in data and "reward_baselines" in required_inputs(load_reference(estimator) or estimator):
        baselines = data.batch["reward_baselines"]
        leave_out(data, baselines.isnan())
        data.set("reward_baselines", baselines.nan_to_num())
    return data


def _result(
    algorithm: Algorithm, measurement: Measurement, grad_norm: float, batch: DataProto, tokenizer: Any, num_tokens: int
) -> AlgorithmResult:
    rows = measurement.rows
    metrics = measurement.metrics
    pushes = measurement.pushes
    mask = rows.ragged("response_mask").values.bool()
    weights = rows.ragged("rollout_is_weights").values[mask] if "rollout_is_weights" in rows else 1.0
    log_ratio = measurement.log_probs - rows.ragged("old_log_probs").values
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    numbers = {"push": pushes, "advantage": rows.ragged("advantages"), "ratio": pushes.like(ratio)}
    up, down = strongest(pushes, num_tokens)
    return AlgorithmResult(
        name=algorithm.name,
        settings=dict(algorithm.changes),
        loss=metrics["actor/loss"],
        grad_norm=grad_norm,
        clip_fraction=metrics.get("actor/pg_clipfrac"),
        dual_clip_fraction=metrics.get("actor/pg_clipfrac_lower"),
        masked_fraction=(~mask).double().mean().item(),
        silent_fraction=(pushes.values == 0).double().mean().item(),
        ratio_effective=effective_share(ratio[mask] * weights),
        push_effective=effective_share(pushes.values[mask].abs()),
        largest_push=float(pushes.values.abs().max()),
        pushed_up=[token_push(batch, tokenizer, numbers, row, position) for row, position in up],
        pushed_down=[token_push(batch, tokenizer, numbers, row, position) for row, position in down],
        row_pushes=Rows(pushes.lengths).sum(pushes.values.double()).tolist(),
    )


def _configure(shared: PPOConfig, changes: Mapping[str, Any], batch: DataProto) -> PPOConfig:
    """Return the configuration of one algorithm. Raises ConfigError if it cannot work, or the batch lacks a column that it reads."""
    config = with_changes(shared, changes)
    checks.check_algorithm(config)
    estimator = config.algorithm.adv_estimator
    needed = [name for name in required_inputs(load_reference(estimator) or estimator) if name in _HOW_TO_RECORD]
    if config.use_reference:
        needed.append("ref_log_prob")
    for name in needed:
        if name not in batch:
            raise ConfigError(
                f"it reads the column {name}, which the recorded batch does not have; record one with {_HOW_TO_RECORD[name]}"
            )
    return config


def _check_tokens(batch: DataProto, config: PPOConfig, policy: Path) -> None:
    """Raise DataError unless the policy's vocabulary has every token of the batch."""
    model = config.actor_rollout_ref.model
    vocabulary = read_model_config(str(policy), model.trust_remote_code, **model.override_config).get_text_config().vocab_size
    ids = torch.cat([batch.ragged(name).values for name in ("prompts", "responses")])
    largest = int(ids.max()) if len(ids) else 0
    if largest >= vocabulary:
        raise DataError(
            f"the batch has the token {largest}, but {policy} knows only 0 to {vocabulary - 1}: it is not a model of the recorded "
            "run's family; leave out --model, or name a checkpoint of that run"
        )


# -- tensors in, numbers out -------------------------------------------------------------------------------------------------------------


def dot(a: Gradient, b: Gradient) -> float:
    """Return the inner product of two gradients, added up in float64. Raises ValueError if they have different parameters."""
    if a.keys() != b.keys():
        raise ValueError(f"gradients of different parameters: {sorted(a.keys() ^ b.keys())[:4]} are in one only")
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def dots(gradients: Sequence[Gradient]) -> list[list[float]]:
    """Return the inner products of all pairs [K][K]."""
    table = [[0.0] * len(gradients) for _ in gradients]
    for i, a in enumerate(gradients):
        for j, b in enumerate(gradients[: i + 1]):
            table[i][j] = table[j][i] = dot(a, b)
    return table


def cosines(products: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Return products[i][j] / (|i| |j|) from the inner products [K][K]; None if one of the gradients is zero and has no direction."""
    norms = [math.sqrt(row[i]) for i, row in enumerate(products)]
    table: list[list[float | None]] = []
    for norm, row in zip(norms, products, strict=True):
        table.append([value / (norm * other) if norm and other else None for value, other in zip(row, norms, strict=True)])
    return table


def effective_share(weights: Tensor) -> float | None:
    """Return (sum w)^2 / (n sum w^2) of n weights of at least 0: 1 if all are equal, 1/n if one has everything, None if all are 0."""
    w = weights.double().flatten()
    squares = float(w.square().sum())
    return float(w.sum().square()) / (len(w) * squares) if squares > 0 else None


def strongest(pushes: Ragged, count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (row, position) of at most `count` tokens that are pushed up most, and of those pushed down most; strongest first.

    At most one token per row: if a whole row has one advantage, a list of tokens would be a list of neighbours. Equal pushes come in the
    order of rows and positions.
    """
    return _peaks(pushes)[:count], _peaks(pushes.like(-pushes.values))[:count]


def _peaks(column: Ragged) -> list[tuple[int, int]]:
    """Return (row, position) of the largest number of each row that has one above 0; largest first."""
    tops = []
    for number, row in enumerate(column.rows()):
        if (row > 0).any():
            tops.append((float(row.max()), number, int(row.argmax())))
    tops.sort(key=lambda top: -top[0])
    return [(number, position) for _, number, position in tops]


def windows(pushes: Sequence[Ragged], count: int) -> list[tuple[int, int]]:
    """Return (row, position) of at most `count` tokens, each in another row, that show the pushes of all algorithms.

    The algorithms take turns; each names the rows of its strongest pushes, strongest first.
    """
    chosen: dict[int, int] = {}
    for turn in itertools.zip_longest(*(_peaks(p.like(p.values.abs())) for p in pushes)):
        for row, position in filter(None, turn):
            if len(chosen) < count:
                chosen.setdefault(row, position)
    return list(chosen.items())


# -- tokens as text, where they stand in a response --------------------------------------------------------------------------------------


def token_push(batch: DataProto, tokenizer: Any, numbers: Mapping[str, Ragged], row: int, position: int) -> TokenPush:
    """Return the token at a place, with its context and its `numbers`: push, advantage and ratio."""
    prompt = batch.ragged("prompts")[row].tolist()
    response = batch.ragged("responses")[row].tolist()
    ids = prompt + response
    at = len(prompt) + position
    own = {name: float(column[row][position]) for name, column in numbers.items()}
    return TokenPush(
        row=row,
        position=position,
        token=tokenizer.decode(ids[at : at + 1]),
        before=tokenizer.decode(ids[max(at - _CONTEXT, 0) : at]),
        after=tokenizer.decode(ids[at + 1 : at + 1 + _CONTEXT]),
        share=abs(own["push"]) / float(numbers["push"].values.abs().double().sum()),
        **own,
    )


def excerpts(batch: DataProto, pushes: Sequence[Ragged], tokenizer: Any, count: int) -> list[Excerpt]:
    """Return pieces of at most `count` responses around the most pushed tokens, with the pushes of every algorithm."""
    prompts = batch.ragged("prompts")
    responses = batch.ragged("responses")
    scores = row_sums(batch, "token_level_scores")
    found = []
    for row, position in windows(pushes, count):
        ids = responses[row].tolist()
        start = max(min(position - _EXCERPT // 2, len(ids) - _EXCERPT), 0)
        end = min(start + _EXCERPT, len(ids))
        found.append(
            Excerpt(
                row=row,
                prompt=tokenizer.decode(prompts[row].tolist())[-_PROMPT:],
                score=float(scores[row]),
                start=start,
                tokens=[tokenizer.decode([token]) for token in ids[start:end]],
                pushes=[p[row][start:end].tolist() for p in pushes],
                is_cut=end < len(ids),
            )
        )
    return found
