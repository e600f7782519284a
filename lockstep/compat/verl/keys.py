"""What becomes of a key of verl's: accepted, translated, ignored with a reason, or refused with a reason. The rows are in keys.txt."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.compat.verl.names import read_rows
from lockstep.config.actor_rollout_ref import ROLLOUTS
from lockstep.config.engine import STRATEGIES
from lockstep.config.load import check_key
from lockstep.errors import ConfigError

Kind = Literal["accepted", "translated", "ignored", "refused", "unknown", "default"]

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that switch a thing off, which needs no refusal."""

DEFAULTS: dict[str, Any] = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.save_freq": 0,
    "trainer.test_freq": 0,
}
"""What a verl command means without saying it, where Lockstep's default is another."""

_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "tir_optimal_token_baseline": "optimal_token_baseline"}
_LOGGERS = ("console", "file", "tensorboard", "wandb")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`key`, what becomes of it, why, and the Lockstep keys with their values that say the same."""

    key: str
    kind: Kind
    why: str = ""
    sets: tuple[tuple[str, Any], ...] = ()


def judge(key: str, value: Any) -> Verdict:
    """The verdict on one key of verl's with its value (None, a bool, a number, a string, a list or a dict)."""
    for pattern, target, off, why in _rows():
        found = pattern.fullmatch(key)
        if not found:
            continue
        same = _same(key, key, value)
        if target in ("-", "--"):
            return same if target == "-" and same.kind == "accepted" else Verdict(key, "ignored", why)
        if target == "!":
            is_off = value is None or (str(value).lower() in off if off[0] else value in OFF)
            if not is_off:
                return Verdict(key, "refused", why)
            return same if same.kind == "accepted" else Verdict(key, "ignored", f"{value} is what happens here")
        new_key, _, converter = target.partition(" : ")
        return _not_empty(CONVERTERS[converter](key, found.expand(new_key), value, why))
    return _not_empty(_same(key, key, value))


def _not_empty(verdict: Verdict) -> Verdict:
    """The verdict, or a refusal where a key would be set to an empty string."""
    if any(value == "" for _, value in verdict.sets):
        return Verdict(verdict.key, "refused", "its value is empty: set the variable that the script reads, or the key itself")
    return verdict


def judge_all(given: Mapping[str, Any]) -> list[Verdict]:
    """A verdict for each key, in their order, and then one of kind "default" for each of verl's defaults that has to be said here."""
    verdicts = [judge(key, value) for key, value in given.items()]
    for section, size in (("actor_rollout_ref.actor", "ppo_micro_batch_size_per_gpu"), ("critic", "ppo_micro_batch_size_per_gpu"),
                          ("actor_rollout_ref.ref", "log_prob_micro_batch_size_per_gpu")):  # fmt: skip
        dynamic = given.get(f"{section}.use_dynamic_bsz", given.get(f"{section}.log_prob_use_dynamic_bsz"))
        if dynamic is True:
            why = "use_dynamic_bsz=True cuts rows by tokens instead"
            verdicts = [Verdict(v.key, "ignored", why) if v.key == f"{section}.{size}" else v for v in verdicts]
    said = {key for verdict in verdicts for key, _ in verdict.sets}
    defaults = [(key, value) for key, value in DEFAULTS.items() if key not in said]
    return verdicts + [Verdict(key, "default", "verl's default, which is another here", ((key, value),)) for key, value in defaults]


def overrides(verdicts: Iterable[Verdict]) -> list[str]:
    """The arguments of `lockstep ppo` that say what the verdicts set."""
    return [f"{key}={_text(value)}" for key, value in dict(pair for verdict in verdicts for pair in verdict.sets).items()]


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as lines of three columns: key, verdict, why."""
    width = max((len(verdict.key) for verdict in verdicts), default=0)
    return "\n".join(f"{v.key:{width}}  {v.kind:10}  {_reason(v)}".rstrip() for v in verdicts)


def _reason(verdict: Verdict) -> str:
    if verdict.kind not in ("translated", "default"):
        return verdict.why
    said = ", ".join(f"{key}={_text(value)}" for key, value in verdict.sets)
    return f"{said}; {verdict.why}" if verdict.why else said


@functools.cache
def _rows() -> list[tuple[re.Pattern[str], str, list[str], str]]:
    """(pattern, target, the values that need no refusal, why) of each row."""
    rows = []
    for line in read_rows("keys.txt"):
        key, verdict, why = (part.strip() for part in line.split("|"))
        regex = re.escape(key)
        for mark, meaning in ((r"\*", "(.*)"), (r"\{", "("), (r"\}", ")"), (",", "|")):
            regex = regex.replace(mark, meaning)
        pattern = re.compile(regex)
        off = [word.strip().lower() for word in verdict[1:].split(",")] if verdict.startswith("!") else []
        rows.append((pattern, "!" if off else verdict.removeprefix("> "), off, why))
    return rows


def _text(value: Any) -> str:
    """A value as Hydra reads it on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_text(entry)}' for key, entry in value.items())}}}"
    text = str(value)
    plain = not isinstance(value, str) or re.fullmatch(r"[\w./@%+-]+(:[\w./@%+-]+)*", text)
    return text if plain else "'" + text.replace("'", r"\'") + "'"


def is_ours(key: str) -> bool:
    """Whether Lockstep has the key."""
    try:
        check_key(key)
    except ConfigError:
        return False
    return True


def _same(key: str, new_key: str, value: Any, why: str = "") -> Verdict:
    """The same value under `new_key`."""
    if not is_ours(new_key):
        known = key != new_key
        return Verdict(
            key, "refused" if known else "unknown", f"{new_key} is no key of Lockstep's (lockstep ppo --help lists them)"
        )
    return Verdict(key, "accepted", "", ((key, value),)) if key == new_key else Verdict(key, "translated", why, ((new_key, value),))


def _mapped(names: Mapping[Any, Any]) -> Callable[[str, str, Any, str], Verdict]:
    """A converter: values that `names` has become others, the rest stay."""

    def convert(key: str, new_key: str, value: Any, why: str) -> Verdict:
        name = value.lower() if isinstance(value, str) else value
        if not isinstance(name, Hashable) or name not in names or isinstance(value, bool):
            return _same(key, new_key, value, why)
        return Verdict(key, "translated", why, ((new_key, names[name]),))

    return convert


def _config_name(key: str, new_key: str, value: Any, why: str) -> Verdict:
    engine = re.search("megatron|torchtitan|veomni", str(value))
    if engine is None:
        return Verdict(key, "ignored", "Hydra's own: verl's tree is not read")
    return Verdict(key, "translated", why, ((new_key, engine.group()), ("critic.strategy", engine.group())))


def _engine(key: str, new_key: str, value: Any, why: str) -> Verdict:
    engine = "fsdp" if value == "dp" else value
    if engine not in STRATEGIES:
        return Verdict(key, "refused", f"no training engine {value!r}; there are: {', '.join(STRATEGIES)}")
    both = (new_key, engine), ("critic.strategy", engine)
    return Verdict(key, "translated", why, both) if key == "model_engine" else _same(key, new_key, value)


def _rollout(key: str, new_key: str, value: Any, why: str) -> Verdict:
    if value in ROLLOUTS:
        return _same(key, new_key, value)
    return Verdict(key, "refused", f"no generation engine {value!r}: {', '.join(ROLLOUTS)}")


def _schedule(key: str, new_key: str, value: Any, why: str) -> Verdict:
    if value in (None, "constant", "cosine", "linear"):
        return Verdict(key, "ignored", "null is what happens here") if value is None else _same(key, new_key, value, why)
    return Verdict(key, "refused", f"the learning rate is constant, cosine or linear, not {value}")


def _optim(key: str, new_key: str, value: Any, why: str) -> Verdict:
    """The keys of an optimizer section that Lockstep has; others are refused unless they are off."""
    same = _same(key, new_key, value)
    if value is None or (same.kind != "accepted" and value in OFF):
        return Verdict(key, "ignored", f"{_text(value)} is what happens here")
    return same if same.kind == "accepted" else Verdict(key, "refused", why)


def _loss_mode(key: str, new_key: str, value: Any, why: str) -> Verdict:
    if value == "bypass_mode":
        return Verdict(key, "refused", "set algorithm.rollout_correction.bypass_mode=true and the loss itself here")
    return _same(key, new_key, value)


def _tis(key: str, new_key: str, value: Any, why: str) -> Verdict:
    if value in OFF or value == -1:
        return Verdict(key, "ignored", f"{value} is what happens here")
    return Verdict(key, "translated", why, (("algorithm.rollout_correction.rollout_is", "token"), (new_key, value)))


def _manager(key: str, new_key: str, value: Any, why: str) -> Verdict:
    if value in (None, "naive", "dapo", "batch", "prime"):
        return Verdict(key, "ignored", why)
    return Verdict(
        key, "refused", f"no reward manager {value!r}: a reward function (reward.custom_reward_function) or reward.weights"
    )


def _greedy(key: str, new_key: str, value: Any, why: str) -> Verdict:
    return Verdict(key, "ignored", why) if value is True else Verdict(key, "translated", why, ((new_key, 0),))


def _loggers(key: str, new_key: str, value: Any, why: str) -> Verdict:
    names = [value] if isinstance(value, str) else list(value or [])
    kept = [name for name in names if name in _LOGGERS]
    if kept == value:
        return _same(key, new_key, kept)
    lost = [name for name in names if name not in _LOGGERS]
    return Verdict(key, "translated", f"without {', '.join(lost)}: {why}" if lost else why, ((new_key, kept or ["console"]),))


CONVERTERS: dict[str, Callable[[str, str, Any, str], Verdict]] = {
    "": _same,
    "config_name": _config_name,
    "engine": _engine,
    "rollout": _rollout,
    "optim": _optim,
    "schedule": _schedule,
    "loss_mode": _loss_mode,
    "tis": _tis,
    "manager": _manager,
    "greedy": _greedy,
    "loggers": _loggers,
    "estimator": _mapped(_ESTIMATORS),
    "metric": _mapped({"reward": "seq_reward", "seq_final_reward": "seq_reward"}),
    "never": _mapped({-1: 0}),
    "top_k": _mapped({0: -1}),
    "at_least_one": _mapped({0: 1}),
}
