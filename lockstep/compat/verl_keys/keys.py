"""What becomes of a key of verl's: accepted, translated, ignored with a reason, or refused with what to do instead (`table`)."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from lockstep.compat.verl_keys.table import DEFAULTS, IGNORED, REFUSED, RENAMED, UNSET, VALUES, Refusal
from lockstep.config.keys import has_key
from lockstep.config.overrides import override_text
from lockstep.observability.trackers import KNOWN_TRACKERS

Kind = Literal["accepted", "translated", "ignored", "refused", "unknown", "default"]

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that switch a thing off, which needs no refusal."""
_REASONS = {pattern: why for why, patterns in IGNORED.items() for pattern in patterns.split()}
_STRATEGIES = ("actor_rollout_ref.actor.strategy", "critic.strategy")
_SIZES = {
    "actor_rollout_ref.actor": "ppo_micro_batch_size_per_gpu",
    "critic": "ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref": "log_prob_micro_batch_size_per_gpu",
    "reward_model": "micro_batch_size_per_gpu",
}
"""Section -> its size in rows, which use_dynamic_bsz switches off."""


class Several(str):
    """Text with commas and without quotes, which stands for several values in Hydra."""

    __slots__ = ()


@dataclass(frozen=True)
class Verdict:
    """`key`, what becomes of it, why, and the Lockstep keys with their values that say the same. An unknown key is refused, too."""

    key: str
    kind: Kind
    why: str = ""
    sets: tuple[tuple[str, Any], ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether the run would be another one without the key."""
        return self.kind in ("refused", "unknown")


def judge(key: str, value: Any) -> Verdict:
    """Return the verdict on one key of verl's with its value: None, a bool, a number, a string, a list, a dict, or Several."""
    if isinstance(value, Several):
        return Verdict(
            key, "refused", "it names several values, and one command starts one run; write a list as '[a,b]', in quotes"
        )
    verdict = _SPECIAL[key](key, value) if key in _SPECIAL else _judge(key, value)
    if any(new == "" for _, new in verdict.sets):
        return Verdict(key, "refused", "its value is empty: set the variable that the script reads, or the key itself")
    return verdict


def _judge(key: str, value: Any) -> Verdict:
    if has_key(key):
        return _of_value(key, value)
    entries = [pattern for table in (RENAMED, REFUSED, _REASONS) for pattern in table if fnmatchcase(key, pattern)]
    if not entries:
        return Verdict(key, "unknown", "Lockstep has no such key: leave it out, or find its name with `lockstep ppo --help`")
    entry = max(entries, key=len)
    if entry in RENAMED:
        return _renamed(key, value, entry)
    if entry in REFUSED:
        return _refused(key, value, REFUSED[entry])
    return Verdict(key, "ignored", _REASONS[entry])


def _of_value(key: str, value: Any) -> Verdict:
    """The verdict on a key of Lockstep's."""
    entries = [pattern for pattern in VALUES if fnmatchcase(key, pattern)]
    if not entries:
        return Verdict(key, "accepted", "", ((key, value),))
    values = VALUES[max(entries, key=len)]
    text = override_text(value).lower()
    if text in values.new:
        new = values.new[text]
        if new is UNSET:
            return Verdict(key, "ignored", values.why)
        return Verdict(key, "translated", values.why, ((key, new),))
    if values.allowed and str(value) not in ("", *values.allowed):
        return Verdict(key, "refused", f"{value} is not supported: use one of {', '.join(values.allowed)}")
    if str(value) in values.refused:
        return Verdict(key, "refused", values.why)
    return Verdict(key, "accepted", "", ((key, value),))


def _renamed(key: str, value: Any, entry: str) -> Verdict:
    matched = re.fullmatch(re.escape(entry).replace(r"\*", "(.*)"), key)
    assert matched is not None
    targets = RENAMED[entry]
    sets: list[tuple[str, Any]] = []
    for target in (targets,) if isinstance(targets, str) else targets:
        for part in matched.groups():
            target = target.replace("*", part, 1)
        verdict = _judge(target, value)
        if verdict.kind not in ("accepted", "translated"):
            return Verdict(key, verdict.kind, verdict.why)
        sets += verdict.sets
    return Verdict(key, "translated", "", tuple(sets))


def _refused(key: str, value: Any, refusal: Refusal) -> Verdict:
    is_harmless = str(value).lower() in refusal.harmless if refusal.harmless else value in OFF
    if value is None or is_harmless:
        return Verdict(key, "ignored", f"{override_text(value)} is what happens here")
    return Verdict(key, "refused", refusal.instead)


def _engine(key: str, value: Any) -> Verdict:
    """Of the files that verl's tree is composed of: they choose the training engine."""
    text = override_text(value).lower()
    if key == "--config-name":
        if "async" in text or "one_step" in text:
            return _refused(key, value, REFUSED["async_training.*"])
        if not text.startswith(("ppo_", "dapo_")):
            why = "the keys of this file are missing: read it with `lockstep verl-keys FILE.yaml key=value ...`"
            return Verdict(key, "refused", why)
    for engine in ("megatron", "torchtitan", "veomni"):
        if engine in text:
            return Verdict(key, "translated", "the file chooses the engine", tuple((strategy, engine) for strategy in _STRATEGIES))
    return Verdict(key, "ignored", "Hydra's own")


def _logger(key: str, value: Any) -> Verdict:
    names = value if isinstance(value, list) else [str(value)] if value else []
    kept = [name for name in names if name in KNOWN_TRACKERS]
    if kept == value:
        return Verdict(key, "accepted", "", ((key, value),))
    lost = ", ".join(name for name in names if name not in kept)
    why = f"without {lost}; metrics.jsonl in the run's folder has all metrics" if lost else ""
    return Verdict(key, "translated", why, ((key, kept or ["console"]),))


def _greedy(key: str, value: Any) -> Verdict:
    if value is True:
        return Verdict(key, "ignored", "temperature says it")
    return Verdict(key, "translated", "", (("actor_rollout_ref.rollout.val_kwargs.temperature", 0),))


def _truncation(key: str, value: Any) -> Verdict:
    """Of truncated importance sampling of each token."""
    if value in OFF or (isinstance(value, int | float) and value <= 0):
        return Verdict(key, "ignored", "it is switched off")
    section = "algorithm.rollout_correction"
    return Verdict(key, "translated", "", ((f"{section}.rollout_is_threshold", value), (f"{section}.rollout_is", "token")))


_SPECIAL: dict[str, Callable[[str, Any], Verdict]] = {
    "defaults": _engine,
    "--config-name": _engine,
    "trainer.logger": _logger,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": _greedy,
    "actor_rollout_ref.actor.tis_imp_ratio_cap": _truncation,
}
"""Keys that no table describes."""


def judge_all(given: Mapping[str, Any]) -> list[Verdict]:
    """Return a verdict on each key, in their order, and one of kind "default" for each default of verl's that must be set here."""
    verdicts = [judge(key, value) for key, value in given.items()]
    for section, size in _SIZES.items():
        if given.get(f"{section}.use_dynamic_bsz", given.get(f"{section}.log_prob_use_dynamic_bsz")) is True:
            why = "use_dynamic_bsz=True cuts rows by tokens instead"
            ignored = Verdict(f"{section}.{size}", "ignored", why)
            verdicts = [ignored if verdict.key == ignored.key else verdict for verdict in verdicts]
    named = {key for verdict in verdicts for key, _ in verdict.sets}
    for key, value in DEFAULTS.items():
        if key not in named:
            verdicts.append(Verdict(key, "default", "verl's default; Lockstep's differs", ((key, value),)))
    return verdicts


def overrides(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the arguments of `lockstep ppo` that say what the verdicts set."""
    values = dict(pair for verdict in verdicts for pair in verdict.sets)
    return [f"{key}={override_text(value)}" for key, value in values.items()]


_ORDER = ("refused", "unknown", "translated", "ignored", "default")


def table(verdicts: Iterable[Verdict]) -> str:
    """Return a line for each key that is not accepted: key, verdict and why. Refused keys are first, defaults last."""
    shown = sorted((verdict for verdict in verdicts if verdict.kind in _ORDER), key=lambda verdict: _ORDER.index(verdict.kind))
    width = max((len(verdict.key) for verdict in shown), default=0)
    return "\n".join(f"{verdict.key:{width}}  {_name(verdict):10}  {_reason(verdict)}".rstrip() for verdict in shown)


def summary(verdicts: Iterable[Verdict]) -> str:
    """Return how many keys got each verdict, and what refused keys mean, in a line."""
    counts = Counter(_name(verdict) for verdict in verdicts)
    text = ", ".join(f"{counts[kind]} {kind}" for kind in ("accepted", "translated", "ignored") if counts[kind])
    if counts["default"]:
        text += f"; {counts['default']} defaults of verl's added"
    if refused := counts["refused"]:
        keys = "1 key" if refused == 1 else f"{refused} keys"
        text += f"\n{keys} refused: without them this is another run. Change them, or add ~KEY for each that the run can do without"
    return text


def _name(verdict: Verdict) -> str:
    return "refused" if verdict.is_refused else verdict.kind


def _reason(verdict: Verdict) -> str:
    if verdict.kind not in ("translated", "default"):
        return verdict.why
    said = ", ".join(f"{key}={override_text(value)}" for key, value in verdict.sets)
    return f"{said}; {verdict.why}" if verdict.why else said
