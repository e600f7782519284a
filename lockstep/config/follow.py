"""Sizes that follow: a size that the user did not set adapts to the sizes that the user set.

`sizes_that_follow` works on the keys alone, when the configuration is read; `for_context` and `for_rows` do the same when the model and the
data are known. None of them changes a value that the user set, so what remains in conflict is between values of the user's.
"""

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

ORIGIN = "follows what you set"
"""What these values are called in `lockstep explain`."""
GROUP_ESTIMATORS = (
    "grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo", "optimal_token_baseline",
    "tir_optimal_token_baseline",
)  # fmt: skip
"""Advantage estimators that compare the samples of one prompt."""
GROUP_SIZE = 8
"""Samples per prompt for these, as in their presets."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_BATCH = "data.train_batch_size"
_PROMPT = "data.max_prompt_length"
_RESPONSE = "data.max_response_length"
_LENGTH = "data.max_length"
_ANSWER = "distill.max_response_length"
_SHORTEST = {_PROMPT: 1, _RESPONSE: 1, _LENGTH: 2, _ANSWER: 1}


class _Sizes:
    """The values of a configuration, which ones the user set, and the changes to the others."""

    def __init__(self, composed: DictConfig, given: set[str]) -> None:
        self._composed = composed
        self.given = given
        self.changes: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self.changes[key] if key in self.changes else OmegaConf.select(self._composed, key)

    def __setitem__(self, key: str, value: int) -> None:
        if self[key] != value:
            self.changes[key] = value

    def has(self, key: str) -> bool:
        """Whether the configuration has such a key."""
        section, _, name = key.rpartition(".")
        found = OmegaConf.select(self._composed, section)
        return isinstance(found, DictConfig) and name in found

    def is_free(self, key: str) -> bool:
        """Whether the key may follow."""
        return key not in self.given

    def size(self, key: str) -> int | None:
        """The value of the key if it is a size: a whole number from 1. Other values are left to the checks."""
        value = self[key] if self.has(key) else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None

    def set_size(self, key: str) -> int | None:
        """The size that the user set the key to."""
        return None if self.is_free(key) else self.size(key)


def sizes_that_follow(composed: DictConfig, given: set[str]) -> dict[str, Any]:
    """Key -> value of every size that is not among the `given` keys and has to change for their sake."""
    sizes = _Sizes(composed, given)
    if sizes.has("actor_rollout_ref.rollout.n"):
        _follow_estimator(sizes)
        most = _follow_kl_horizon(sizes)
        _follow_batch(sizes, most)
        _follow_policy_lengths(sizes)
        _raise_horizon(sizes)
        _follow_processes(sizes, "trainer", _sections_on_the_main_pool(sizes))
        for section in ("critic", "reward_model"):
            if sizes[f"{section}.enable_resource_pool"] is True:
                _follow_processes(sizes, section, [section])
    else:
        _follow_batch(sizes)
        _follow_row_lengths(sizes)
        _follow_processes(sizes, "trainer", ["engine"])
    return sizes.changes


def _uses_critic(sizes: _Sizes) -> bool:
    enable = sizes["critic.enable"]
    return sizes["algorithm.adv_estimator"] == "gae" if enable is None else bool(enable)


def _follow_estimator(sizes: _Sizes) -> None:
    """An estimator that compares samples of one prompt gets several."""
    key = f"{_ROLLOUT}.n"
    if sizes["algorithm.adv_estimator"] in GROUP_ESTIMATORS and sizes.is_free(key) and sizes[key] == 1:
        sizes[key] = GROUP_SIZE


def _follow_kl_horizon(sizes: _Sizes) -> int | None:
    """An adaptive KL weight, whose horizon was set, reacts over more than a fifth of a step: the largest batch with which it does."""
    horizon = sizes.set_size("algorithm.kl_ctrl.horizon")
    if horizon is None or sizes["algorithm.kl_ctrl.type"] != "adaptive" or not sizes["algorithm.use_kl_in_reward"]:
        return None
    most_rows = 5 * horizon - 1
    key = f"{_ROLLOUT}.n"
    samples = sizes.size(key) or 1
    if sizes.is_free(key):
        prompts = sizes.set_size(_BATCH) or math.lcm(*(size for mini in _minis(sizes) if (size := sizes.set_size(mini))))
        least = 2 if sizes["algorithm.adv_estimator"] in GROUP_ESTIMATORS else 1
        samples = max(least, min(samples, most_rows // prompts))
        sizes[key] = samples
    return max(1, most_rows // samples)


def _minis(sizes: _Sizes) -> list[str]:
    """The keys of the mini-batches that the run has."""
    minis = [f"{_ACTOR}.ppo_mini_batch_size"] if sizes.has(f"{_ACTOR}.ppo_mini_batch_size") else []
    return [*minis, "critic.ppo_mini_batch_size"] if minis and _uses_critic(sizes) else minis


def _follow_batch(sizes: _Sizes, most: int | None = None) -> None:
    """The batch is a multiple of the mini-batches that were set, at most `most` and the rows there are; other mini-batches divide it."""
    minis = _minis(sizes)
    batch = sizes.size(_BATCH)
    if batch is None:
        return
    if sizes.is_free(_BATCH):
        limits = [size for size in (most, sizes.set_size("data.train_max_samples")) if size is not None]
        batch = _multiple(batch, [size for key in minis if (size := sizes.set_size(key))], min(limits, default=None))
        sizes[_BATCH] = batch
    for key in minis:
        mini = sizes.size(key)
        if mini is not None and sizes.is_free(key):
            sizes[key] = _nearest_divisor(batch, mini)


def _multiple(batch: int, units: list[int], most: int | None) -> int:
    """The multiple of all `units` that is nearest to `batch`, and at most `most` where there is one so small."""
    unit = math.lcm(*units)
    found = max(1, round(batch / unit)) * unit
    return found if most is None else max(unit, min(found, most // unit * unit))


def _nearest_divisor(batch: int, wanted: int) -> int:
    """The divisor of `batch` whose ratio to `wanted` is nearest to 1; of two, the larger one."""
    low = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    divisors = {*low, *(batch // n for n in low)}
    return min(divisors, key=lambda n: (abs(math.log(n / wanted)), -n))


def _token_ranks(sizes: _Sizes, section: str) -> int:
    """Ranks that divide the tokens of a micro-batch (EngineChoice.token_ranks)."""
    strategy = sizes[f"{section}.strategy"]
    if strategy == "veomni":
        return sizes.size(f"{section}.veomni.ulysses_parallel_size") or 1
    is_fsdp = strategy in ("fsdp", "fsdp2")
    return (sizes.size(f"{section}.fsdp_config.ulysses_sequence_parallel_size") or 1) if is_fsdp else 1


def _follow_policy_lengths(sizes: _Sizes) -> None:
    """Prompt and response fit into every budget of tokens, and the response holds the buffer of the penalty for long ones."""
    budgets = [(f"{_ACTOR}.ppo_max_token_len_per_gpu", _ACTOR), ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", _ACTOR)]
    if _uses_critic(sizes):
        budgets.append(("critic.ppo_max_token_len_per_gpu", "critic"))
    room = min((size * _token_ranks(sizes, section) for key, section in budgets if (size := sizes.set_size(key))), default=None)
    buffer = sizes.set_size("reward.overlong_buffer.len") if sizes["reward.overlong_buffer.enable"] is True else None
    response = sizes.size(_RESPONSE)
    least = {_RESPONSE: buffer} if buffer is not None else {}
    if buffer is not None and response is not None and response < buffer and sizes.is_free(_RESPONSE):
        sizes[_RESPONSE] = 5 * buffer  # the buffer is a fifth of the response unless it is set
    if room is not None:
        _shrink(sizes, (_PROMPT, _RESPONSE), room, least)


def _follow_row_lengths(sizes: _Sizes) -> None:
    """A row, or the two rows of a pair, fits into the budget of tokens."""
    budget = sizes.set_size("engine.max_token_len_per_gpu")
    if budget is None or sizes["engine.micro_batch_size_per_gpu"] is not None:
        return
    room = budget * _token_ranks(sizes, "engine")
    if sizes.has("data.skip_identical") and sizes["loss.loss_mode"] != "kto":
        room //= 2
    _shrink(sizes, _row_keys(sizes), room)


def _row_keys(sizes: _Sizes) -> tuple[str, ...]:
    return (_LENGTH, _ANSWER) if sizes.has(_ANSWER) and sizes["distill.on_policy_share"] else (_LENGTH,)


def _shrink(sizes: _Sizes, keys: tuple[str, ...], room: int, least: dict[str, int] | None = None) -> None:
    """Make the free lengths among `keys` smaller, in proportion, until all fit into `room` together."""
    lengths = {key: size for key in keys if (size := sizes.size(key)) is not None}
    free = [key for key in lengths if sizes.is_free(key)]
    left = room - sum(size for key, size in lengths.items() if key not in free)
    total = sum(lengths[key] for key in free)
    if total <= left:
        return
    floors = {key: (least or {}).get(key, _SHORTEST[key]) for key in free}
    for key in sorted(free, key=lambda key: -floors[key]):
        share = left * lengths[key] // total if total else 0
        others = sum(floors[other] for other in free if other != key and other not in sizes.changes)
        size = max(floors[key], min(share, left - others, lengths[key]))
        left = left - size
        total = total - lengths[key]
        sizes[key] = size


def _raise_horizon(sizes: _Sizes) -> None:
    """The adaptive KL weight reacts over more rows than a fifth of a step."""
    key = "algorithm.kl_ctrl.horizon"
    rows = (sizes.size(_BATCH) or 0) * (sizes.size(f"{_ROLLOUT}.n") or 0)
    horizon = sizes.size(key)
    if horizon is not None and sizes.is_free(key) and 0.2 * rows >= horizon:
        sizes[key] = rows


def _sections_on_the_main_pool(sizes: _Sizes) -> list[str]:
    sections = [_ACTOR]
    if _uses_critic(sizes) and not sizes["critic.enable_resource_pool"]:
        sections.append("critic")
    if sizes["reward_model.enable"] is True and not sizes["reward_model.enable_resource_pool"]:
        sections.append("reward_model")
    return sections


def _follow_processes(sizes: _Sizes, pool: str, sections: list[str]) -> None:
    """A node has as many processes as the models on it are divided among. The number of nodes never follows."""
    key = f"{pool}.n_gpus_per_node"
    count = sizes.size(key)
    nodes = sizes.size(f"{pool}.nnodes")
    if count is None or nodes is None or not sizes.is_free(key):
        return
    needed = math.lcm(*(_ranks_of_a_copy(sizes, section) for section in sections))
    each = needed // math.gcd(needed, nodes)
    sizes[key] = math.lcm(count, each)


def _ranks_of_a_copy(sizes: _Sizes, section: str) -> int:
    """The number that the ranks must be a multiple of."""
    strategy = sizes[f"{section}.strategy"]

    def of(engine: str, *names: str) -> Iterator[int]:
        return (sizes.size(f"{section}.{engine}.{name}") or 1 for name in names)

    if strategy == "megatron":
        return math.prod(of("megatron", "tensor_model_parallel_size", "pipeline_model_parallel_size"))
    if strategy == "torchtitan":
        return math.prod(of("torchtitan", "tensor_parallel_size", "pipeline_parallel_size"))
    if strategy == "veomni":
        return math.lcm(*of("veomni", "ulysses_parallel_size", "fsdp_size"))
    tensor, sequence, copies = of("fsdp_config", "tensor_parallel_size", "ulysses_sequence_parallel_size", "fsdp_size")
    return math.lcm(tensor * copies, sequence)


def for_context(config: Any, context: int | None) -> dict[str, Any]:
    """Key -> value of the lengths that the user did not set, lowered until a row fits into a model's context of so many tokens."""
    given = config.data.given
    if context is None or given is None:
        return {}
    sizes = _Sizes(OmegaConf.structured(config), set(given))
    if sizes.has(_PROMPT):
        buffer = sizes.set_size("reward.overlong_buffer.len") if sizes["reward.overlong_buffer.enable"] is True else None
        _shrink(sizes, (_PROMPT, _RESPONSE), context, {} if buffer is None else {_RESPONSE: buffer})
    else:
        _shrink(sizes, _row_keys(sizes), context)
    return sizes.changes


def for_rows(config: Any, num_rows: int) -> dict[str, Any]:
    """Key -> value of the batch sizes that the user did not set, lowered until `num_rows` rows are a batch."""
    given = config.data.given
    if given is None or _BATCH in given or not 0 < num_rows < config.data.train_batch_size:
        return {}
    sizes = _Sizes(OmegaConf.structured(config), {*given, "data.train_max_samples"})
    sizes.changes["data.train_max_samples"] = num_rows
    _follow_batch(sizes)
    return {key: value for key, value in sizes.changes.items() if key != "data.train_max_samples"}


def in_words(values: dict[str, Any], why: str | None = None) -> str:
    """The line that a run prints of sizes that follow, and why they do."""
    words = " ".join(f"{key}={value}" for key, value in values.items())
    return f"{words} ({ORIGIN if why is None else why}; you did not set {'it' if len(values) == 1 else 'them'})"
