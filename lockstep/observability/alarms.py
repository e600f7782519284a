"""The doctor of learning: what goes wrong in a run whose every step succeeds.

A check is a pure function of the metrics of the steps so far, oldest first. It returns an Alarm, with the numbers it saw and the key to
turn, or None. `Alarms` asks all of them after each step, and each sounds once.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import Alarmed

History = Sequence[Mapping[str, float]]

FILE = "alarms.jsonl"
_FIRST, _LATEST = 20, 200
"""Steps that are kept of a long run: the first and, at least, the last."""
_FEW, _SOME, _MANY = 3, 5, 10
"""Steps in a row: for what is never right, for what noise alone could give, for what takes time to learn."""
_SHOWN = 200
"""Characters of a sample's text that are shown."""


@dataclass(frozen=True)
class Alarm:
    """Something that a user would want to know."""

    name: str
    text: str
    """What was seen, and what it means."""
    key: str
    """What to turn."""
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"alarm: {self.name}: {self.text}; turn {self.key}"


class Alarms:
    """Asks every check after each step. An alarm that sounded before, in this run or before a resume, is not sounded again."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._history: list[Mapping[str, float]] = []
        self.sounded: list[Alarm] = []
        self.ignored: Sequence[str] = ()
        """Names of alarms that are none for this run."""

    def resume(self, metrics_file: Path, step: int) -> None:
        """Take over what the run's files tell of the steps up to `step`; later alarms are dropped. 0: the run is new."""
        kept = [row for row in _rows(self._file) if row.get("step", step + 1) <= step]
        if self._file.exists():
            self._file.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.sounded = [Alarm(row["name"], row["text"], row["key"], row["numbers"]) for row in kept]
        self._history = [_read(row) for row in _rows(metrics_file) if row.get("step", step + 1) <= step] if step else []

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> list[Alarm]:
        """The new alarms after a step. Each is a line of alarms.jsonl, with `samples`."""
        self._history.append(_read(metrics))
        if len(self._history) > _FIRST + 2 * _LATEST:
            del self._history[_FIRST:-_LATEST]
        known = {alarm.name for alarm in self.sounded} | set(self.ignored)
        found = [alarm for check in CHECKS if (alarm := check(self._history)) is not None and alarm.name not in known]
        self.sounded += found
        if found:
            with suppress(OSError), self._file.open("a") as file:  # a full disk ends the save of a checkpoint, not a warning
                for alarm in found:
                    row = {"step": step, "name": alarm.name, "text": alarm.text, "numbers": alarm.numbers, "key": alarm.key}
                    file.write(json.dumps(row | {"samples": list(samples)}, default=str) + "\n")
        return found

    def stop(self, ended: Callable[[str], str]) -> NoReturn:
        """Raise Alarmed, with what `ended` makes of the reason."""
        raise Alarmed(ended(f"{', '.join(alarm.name for alarm in self.sounded)}, and trainer.on_alarm=stop"))


def shown(alarms: Sequence[Alarm], samples: Sequence[Mapping[str, Any]]) -> str:
    """The alarms, and two of the samples, in which nothing that the model wrote controls a terminal."""
    texts = [f"  {name}: {str(value)[:_SHOWN]!r}" for sample in samples[:2] for name, value in sample.items()]
    return "\n".join([*map(str, alarms), *texts])


# -- the checks ------------------------------------------------------------------------------------------------------------


def equal_rewards(history: History) -> Alarm | None:
    """Every response of a batch has the same score: nothing says which is better."""
    low, high = (_last(history, f"critic/score/{end}", _FEW) for end in ("min", "max"))
    if low is None or high is None or low != high:
        return None
    return Alarm(
        "equal_rewards",
        f"all responses of each of the last {_FEW} steps have the same score ({_listed(low)}), so nothing can be learned from them",
        "the reward (try it with `lockstep rewards check`), the prompts, or actor_rollout_ref.model.path",
        {"critic/score/mean": low[-1]},
    )


def no_gradient(history: History) -> Alarm | None:
    """The policy's gradient is 0, though rewards differ."""
    name = next((name for name in ("actor/grad_norm", "train/grad_norm") if history and name in history[-1]), "")
    norms = _last(history, name, _FEW)
    if norms is None or max(norms) > 1e-12 or equal_rewards(history) or silent_groups(history):
        return None
    seen = _numbers(history[-1], name, "actor/skipped_rows", "actor/pg_clipfrac", "critic/advantages/max", "critic/advantages/min")
    return Alarm(
        "no_gradient",
        f"the gradient was 0 in each of the last {_FEW} steps: no weight moves",
        "algorithm.adv_estimator, or actor_rollout_ref.actor.clip_ratio"
        if name == "actor/grad_norm"
        else "the trained part of the data",
        seen,
    )


def cut_responses(history: History) -> Alarm | None:
    """Most responses reach the limit of length."""
    shares = _last(history, "response_length/clip_ratio", _FEW)
    if shares is None or min(shares) <= 0.5:
        return None
    length = history[-1].get("response_length/max", math.nan)
    return Alarm(
        "cut_responses",
        f"{_percent(shares[-1])} of the responses were cut at {length:.0f} tokens, and more than half in each of the last {_FEW} steps: "
        "the model is judged on answers it did not finish, or does not know how to end them",
        "data.max_response_length (higher), or the chat template and the end token of actor_rollout_ref.model.path",
        _numbers(history[-1], "response_length/clip_ratio", "response_length/mean", "response_length/max"),
    )


def silent_groups(history: History) -> Alarm | None:
    """Hardly a prompt has samples that differ in score, and that not because most are right."""
    shares = _last(history, "training/groups_with_signal", _SOME)
    if shares is None or _mean(shares) >= 0.1 or _is_learned(history) or equal_rewards(history):
        return None
    return Alarm(
        "silent_groups",
        f"the samples of a prompt differ in score in only {_percent(_mean(shares))} of the groups of the last {_SOME} steps: the others "
        "teach nothing",
        "actor_rollout_ref.rollout.n (higher), algorithm.filter_groups.enable=true, or easier prompts",
        {"training/groups_with_signal": _mean(shares)} | _numbers(history[-1], "critic/score/mean"),
    )


def entropy_collapse(history: History) -> Alarm | None:
    """The policy has become nearly deterministic before it learned the task."""
    entropy = [row["actor/entropy"] for row in history if "actor/entropy" in row]
    if len(entropy) < 2 * _SOME or _is_learned(history):
        return None
    first = _mean(entropy[:_SOME])
    last = _mean(entropy[-_SOME:])
    if first <= 0 or last >= 0.1 * first:
        return None
    return Alarm(
        "entropy_collapse",
        f"the entropy fell from {first:.3g} to {last:.3g}: the policy hardly varies its answers any more, and has not learned the task",
        "actor_rollout_ref.actor.optim.lr (lower), actor_rollout_ref.actor.entropy_coeff, actor_rollout_ref.actor.clip_ratio_high, or a "
        "KL term",
        {"actor/entropy/first": first, "actor/entropy/last": last},
    )


def length_drift(history: History) -> Alarm | None:
    """Responses became much longer or shorter, and not better."""
    lengths = [row["response_length/mean"] for row in history if "response_length/mean" in row]
    if len(lengths) < 2 * _SOME:
        return None
    first = _mean(lengths[:_SOME])
    last = _mean(lengths[-_SOME:])
    if first <= 0 or 0.5 <= last / first <= 2 or _gain(history, "critic/score/mean") > 0.1 * _range(history):
        return None
    return Alarm(
        "length_drift",
        f"the mean response went from {first:.4g} to {last:.4g} tokens, and the score did not rise with it: the policy may be "
        "gaming length",
        "reward.overlong_buffer, actor_rollout_ref.actor.loss_agg_mode, or what the reward says of length",
        {"response_length/mean/first": first, "response_length/mean/last": last},
    )


def kl_jump(history: History) -> Alarm | None:
    """The KL, to the reference or of the update, suddenly is several times what it was."""
    for name, what in (
        ("actor/reward_kl_penalty", "reference"),
        ("actor/kl_loss", "reference"),
        ("actor/ppo_kl", "policy before the update"),
    ):
        before = [row[name] for row in history[:-1] if name in row][-_MANY:]
        if len(before) < _SOME or name not in history[-1]:
            continue
        usual = sorted(map(abs, before))[len(before) // 2]
        now = abs(history[-1][name])
        if now > max(5 * usual, 5 * max(map(abs, before[-_FEW:])) / 2, 0.3):
            return Alarm(
                "kl_jump",
                f"the KL to the {what} jumped from about {usual:.3g} to {now:.3g} per token",
                "actor_rollout_ref.actor.optim.lr (lower), actor_rollout_ref.actor.grad_clip, or the weight of the KL term",
                {name: now, f"{name}/before": usual},
            )
    return None


def useless_values(history: History) -> Alarm | None:
    """The critic explains the returns worse than their mean would."""
    explained = [row["critic/vf_explained_var"] for row in history if "critic/vf_explained_var" in row]
    if len(explained) < 2 * _MANY or _mean(explained[-_MANY:]) >= 0:
        return None
    return Alarm(
        "useless_values",
        f"the critic explains less of the returns than their mean does: explained variance {_mean(explained[-_MANY:]):.2f} over the last "
        f"{_MANY} steps, and there were {len(explained)} or more; its values add noise",
        "critic.optim.lr, trainer.critic_warmup, or algorithm.adv_estimator=grpo, which needs no critic",
        {"critic/vf_explained_var": _mean(explained[-_MANY:])},
    )


def ratio_tails(history: History) -> Alarm | None:
    """Some tokens are many times as probable as when they were sampled."""
    largest = _last(history, "actor/log_ratio_max", _FEW)
    share = _last(history, "training/rollout_ratio_ess", _FEW)
    if share is not None and max(share) < 0.7:
        return Alarm(
            "ratio_tails",
            f"sampler and trainer disagree: the effective share of the samples is {share[-1]:.2f} in each of the last {_FEW} steps",
            "algorithm.rollout_correction.rollout_is, or actor_rollout_ref.rollout.name=native, which samples from the trainer's weights",
            _numbers(history[-1], "training/rollout_ratio_ess", "training/rollout_ratio_max"),
        )
    clipped = _last(history, "actor/pg_clipfrac", _FEW)
    if largest is None or clipped is None or min(largest) < math.log(20) or min(clipped) < 0.2:
        return None
    return Alarm(
        "ratio_tails",
        f"updates go far: in each of the last {_FEW} steps some token became {math.exp(min(largest)):.0f} times as probable or improbable, "
        f"and the clip held {_percent(min(clipped))} of the tokens or more",
        "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.ppo_epochs (lower), or actor_rollout_ref.actor.ppo_mini_batch_size "
        "(higher)",
        _numbers(history[-1], "actor/log_ratio_max", "actor/pg_clipfrac", "actor/ratio_mean"),
    )


def format_only(history: History) -> Alarm | None:
    """What is rewarded for its form gains, and what is rewarded for its content does not."""
    names = dict.fromkeys(name for row in history for name in row if name.endswith("/mean") or "/mean@" in name)
    parts = [name for name in names if name.startswith(("reward/", "val-core/", "val-aux/"))]
    form = [name for name in parts if "format" in name]
    content = [name for name in parts if name not in form and (name.startswith("reward/") or "/acc/" in name)]
    gains = {name: _gain(history, name) for name in (*form, *content)}
    gained = next((name for name in form if gains[name] > 0.2), None)
    if gained is None or not content or max(gains[name] for name in content) > 0.02:
        return None
    return Alarm(
        "format_only",
        f"{gained} rose by {gains[gained]:.2f}, and {content[0]} by {gains[content[0]]:.2f}: the policy learns the form, not the answer",
        "reward.weights (less for the form), or easier prompts",
        {name: gains[name] for name in (gained, content[0])},
    )


CHECKS: tuple[Callable[[History], Alarm | None], ...] = (
    equal_rewards,
    no_gradient,
    cut_responses,
    silent_groups,
    entropy_collapse,
    length_drift,
    kl_jump,
    useless_values,
    ratio_tails,
    format_only,
)


# -- what they share -------------------------------------------------------------------------------------------------------


def _last(history: History, name: str, count: int) -> list[float] | None:
    """The metric in the last `count` steps; None where one of them does not have it."""
    rows = history[-count:]
    return [row[name] for row in rows] if len(rows) == count and all(name in row for row in rows) else None


def _gain(history: History, name: str) -> float:
    """The last values of a metric less the first ones, in means of up to five; 0 where there are too few to tell."""
    values = [row[name] for row in history if name in row]
    count = min(len(values) // 2, _SOME)
    return _mean(values[-count:]) - _mean(values[:count]) if count else 0.0


def _range(history: History) -> float:
    """From the lowest score of a response to the highest, over all steps."""
    rows = [row for row in history if "critic/score/min" in row]
    return max((row["critic/score/max"] for row in rows), default=0.0) - min((row["critic/score/min"] for row in rows), default=0.0)


def _is_learned(history: History) -> bool:
    """Whether the mean score lies in the upper half of all scores that were seen."""
    scores = [row["critic/score/mean"] for row in history if "critic/score/mean" in row]
    lowest = min((row["critic/score/min"] for row in history if "critic/score/min" in row), default=0.0)
    return bool(scores) and _range(history) > 0 and _mean(scores[-_SOME:]) > lowest + _range(history) / 2


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _numbers(metrics: Mapping[str, float], *names: str) -> dict[str, float]:
    return {name: metrics[name] for name in names if name in metrics}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in dict.fromkeys(values))


_READ = ("actor/", "critic/", "training/", "response_length/", "reward/", "train/grad_norm", "val-core/", "val-aux/")
"""How the names begin that a check may read."""


def _read(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among those."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name.startswith(_READ) and isinstance(value, int | float) and math.isfinite(value)
    }


def _rows(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, without a line that a crash cut; none where there is no file."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]
