"""What becomes of a key of verl's: accepted, translated, ignored with a reason, or refused with a reason. The rows are in keys.txt."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from lockstep.config.load import has_key
from lockstep.config.overrides import override_text

Kind = Literal["accepted", "translated", "ignored", "refused", "unknown", "default"]

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that switch a thing off, which needs no refusal."""
_DYNAMIC = {"actor_rollout_ref.actor": "ppo_", "critic": "ppo_", "actor_rollout_ref.ref": "log_prob_", "reward_model": ""}
"""Section -> how its size in rows begins, which use_dynamic_bsz switches off."""


class Several(str):
    """Text with commas and without quotes, which stands for several values in Hydra."""

    __slots__ = ()


@dataclass(frozen=True)
class Verdict:
    """`key`, what becomes of it, why, and the Lockstep keys with their values that say the same."""

    key: str
    kind: Kind
    why: str = ""
    sets: tuple[tuple[str, Any], ...] = ()


class KeyRule(NamedTuple):
    """A row of keys.txt; `sign` is the first of its verdict: - -- ! ? > or =."""

    pattern: re.Pattern[str]
    sign: str
    keys: list[str]
    values: dict[str, str]
    allowed: list[str]
    why: str


@functools.cache
def rows() -> list[KeyRule]:
    """The table."""
    found = []
    for line in Path(__file__).with_name("keys.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        key, verdict, why = (part.strip() for part in line.split(" | "))
        regex = re.escape(key)
        for mark, meaning in ((r"\*", "(.*)"), (r"\{", "("), (r"\}", ")"), (",", "|")):
            regex = regex.replace(mark, meaning)
        sign, _, rest = verdict.partition(" ")
        rest, _, allowed = rest.partition(" ! ") if sign in (">", "=") else ("", "", rest)
        keys, _, values = rest.partition(" : ")
        words = dict(word.rpartition("=")[::2] for word in values.split(", ") if word)
        found.append(KeyRule(re.compile(regex), sign, keys.split(", "), words, allowed.split(", ") if allowed else [], why))
    return found


def judge(key: str, value: Any) -> Verdict:
    """The verdict on one key of verl's with its value (None, a bool, a number, a string, a list, a dict, or Several)."""
    if isinstance(value, Several):
        return Verdict(key, "refused", "it names several values, and one command starts one run: a list is '[a,b]', in quotes")
    verdict = next((_ruled(row, found, value) for row in rows() if row.sign != "=" and (found := row.pattern.fullmatch(key))), None)
    verdict = verdict or _same(key, value)
    if any(value == "" for _, value in verdict.sets):
        return Verdict(key, "refused", "its value is empty: set the variable that the script reads, or the key itself")
    return verdict


def _ruled(row: KeyRule, found: re.Match[str], value: Any) -> Verdict:
    key, same, text = found.string, _same(found.string, value), override_text(value).lower()
    ours = same.kind == "accepted"
    if row.sign in ("-", "--") or (row.sign == "?" and ours and value is not None):
        return same if ours and row.sign != "--" else Verdict(key, "ignored", row.why)
    if row.sign in ("!", "?"):
        if value is None or (str(value).lower() in map(str.lower, row.allowed) if row.allowed else value in OFF):
            return same if ours and row.sign == "!" else Verdict(key, "ignored", f"{text} asks for nothing that is not so here")
        return Verdict(key, "refused", row.why)
    return _translated(row, found, value, next((new for old, new in row.values.items() if fnmatchcase(text, old)), None))


def _translated(row: KeyRule, found: re.Match[str], value: Any, new: str | None) -> Verdict:
    """Under the row's keys, with the value `new` of the row's table where it has one: nothing is ignored, ! refused."""
    key, why = found.string, row.why
    if new in ("", "!"):
        return Verdict(key, "refused" if new else "ignored", why)
    value = value if new is None else yaml.safe_load(new)
    if key == "trainer.logger":
        names = value if isinstance(value, list) else [str(value)] if value else []
        lost = [name for name in names if name not in row.allowed]
        why, kept = (f"without {', '.join(lost)}: {why}" if lost else why), [name for name in names if name not in lost]
        new, value = (None if kept == value else ""), kept or ["console"]
    elif row.allowed and str(value) not in ("", *row.allowed):
        return Verdict(key, "refused", f"not {value} here, but one of {', '.join(row.allowed)}")
    sets = [(target, *constant) for target, *constant in (found.expand(word).split("=") for word in row.keys)]
    if missing := next((target for target, *_ in sets if not has_key(target)), None):
        return Verdict(key, "refused", _same(missing, value).why)
    if new is None and sets == [(key,)]:
        return _same(key, value)
    return Verdict(key, "translated", why, tuple((target, constant[0] if constant else value) for target, *constant in sets))


def _same(key: str, value: Any) -> Verdict:
    if has_key(key):
        return Verdict(key, "accepted", "", ((key, value),))
    return Verdict(key, "unknown", f"{key} is no key of Lockstep's (lockstep ppo --help lists them)")


def judge_all(given: Mapping[str, Any]) -> list[Verdict]:
    """A verdict for each key, in their order, and then one of kind "default" for each of verl's defaults that has to be said here."""
    verdicts = [judge(key, value) for key, value in given.items()]
    for section, kind in _DYNAMIC.items():
        if given.get(f"{section}.use_dynamic_bsz", given.get(f"{section}.log_prob_use_dynamic_bsz")) is True:
            size, why = f"{section}.{kind}micro_batch_size_per_gpu", "use_dynamic_bsz=True cuts rows by tokens instead"
            verdicts = [Verdict(size, "ignored", why) if verdict.key == size else verdict for verdict in verdicts]
    said = {key for verdict in verdicts for key, _ in verdict.sets}
    defaults = {row.pattern.pattern.replace("\\", ""): yaml.safe_load(row.keys[0]) for row in rows() if row.sign == "="}
    return verdicts + [
        Verdict(key, "default", "verl's default, which is another here", ((key, value),))
        for key, value in defaults.items() if key not in said
    ]  # fmt: skip


def overrides(verdicts: Iterable[Verdict]) -> list[str]:
    """The arguments of `lockstep ppo` that say what the verdicts set."""
    return [f"{key}={override_text(value)}" for key, value in dict(pair for verdict in verdicts for pair in verdict.sets).items()]


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as lines of three columns: key, verdict, why."""
    width = max((len(verdict.key) for verdict in verdicts), default=0)
    return "\n".join(f"{v.key:{width}}  {v.kind:10}  {_reason(v)}".rstrip() for v in verdicts)


def _reason(verdict: Verdict) -> str:
    if verdict.kind not in ("translated", "default"):
        return verdict.why
    said = ", ".join(f"{key}={override_text(value)}" for key, value in verdict.sets)
    return f"{said}; {verdict.why}" if verdict.why else said
