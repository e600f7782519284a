"""`lockstep check loss|advantage|preference NAME`: does batching change a loss or an estimator of your own?

NAME is `path.py:function`, or a registered name. Each property of `properties` is tried on many small batches; for one that does not
hold, the smallest batch that breaks it is shown.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.errors import ConfigError, as_command
from lockstep.utils.terminal import say

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from lockstep.tools.check.properties import Property
    from lockstep.tools.check.subjects import Case, Subject

USAGE = """usage: lockstep check loss NAME [argument=number ...]
       lockstep check advantage NAME [argument=number ...]
       lockstep check preference NAME [argument=number ...]

NAME is path.py:function, or the name of a registered loss or estimator. Arguments of its own are given as argument=number.
--examples N tries N batches for each property (default 100)."""

_EXAMPLES = 100


@as_command
def main(arguments: Sequence[str]) -> int:
    """Run the properties; return 0 if all hold, 1 if one does not or the command cannot be run."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        say(USAGE)
        return 0
    checks = {"loss": check_loss, "advantage": check_advantage, "preference": check_preference}
    if len(arguments) < 2 or arguments[0] not in checks:
        raise ConfigError(f"expected 'loss', 'advantage' or 'preference' and a name, got {' '.join(arguments)!r}\n{USAGE}")
    kind, name, *others = arguments
    max_examples, words = _split_examples(others)
    parameters = dict(map(_argument, words))
    return 0 if checks[kind](name, parameters, max_examples) else 1


def check_loss(name: str, given: dict[str, Any], max_examples: int = _EXAMPLES) -> bool:
    """Check the policy loss `name`, called with the config's defaults and `given`; print a line per property. Return whether all hold.

    Raises ConfigError or DataError if there is no such loss or it asks for something that no run has.
    """
    from lockstep.algorithms.policy_losses import get_policy_loss, loss_inputs
    from lockstep.tools.check.cases import loss_cases
    from lockstep.tools.check.properties import LOSS_PROPERTIES, LOSS_WARNINGS
    from lockstep.tools.check.subjects import LossSubject
    from lockstep.utils.files import load_reference

    loss = load_reference(name) or get_policy_loss(name)
    names = loss_inputs(loss)
    subject = LossSubject(loss, ActorConfig().loss_parameters | given)
    return _run(name, given, names, subject, loss_cases(), LOSS_PROPERTIES, LOSS_WARNINGS, max_examples)


def check_advantage(name: str, given: dict[str, Any], max_examples: int = _EXAMPLES) -> bool:
    """Check the estimator `name`, called with the config's defaults and `given`; print a line per property. Return whether all hold.

    Raises ConfigError or DataError if there is no such estimator or it asks for something that no run has.
    """
    from lockstep.algorithms.advantages import get_adv_estimator
    from lockstep.algorithms.registry import input_names
    from lockstep.tools.check.cases import advantage_cases
    from lockstep.tools.check.properties import ADVANTAGE_PROPERTIES, ADVANTAGE_WARNINGS
    from lockstep.tools.check.subjects import AdvantageSubject
    from lockstep.utils.files import load_reference

    estimator = load_reference(name) or get_adv_estimator(name)
    names = input_names(f"advantage estimator {name!r}", estimator)
    config = AlgorithmConfig()
    parameters = {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo, "config": config}
    subject = AdvantageSubject(estimator, parameters | given)
    return _run(name, given, names, subject, advantage_cases(), ADVANTAGE_PROPERTIES, ADVANTAGE_WARNINGS, max_examples)


def check_preference(name: str, given: dict[str, Any], max_examples: int = _EXAMPLES) -> bool:
    """Check the preference loss `name`, called with its own defaults and `given`; print a line per property. Return whether all hold.

    Raises ConfigError or DataError if there is no such loss or it asks for something that no run has.
    """
    from lockstep.algorithms.preference_losses import get_preference_loss, preference_inputs
    from lockstep.tools.check.cases import pair_cases
    from lockstep.tools.check.properties import PAIR_PROPERTIES, PAIR_WARNINGS
    from lockstep.tools.check.subjects import PreferenceSubject
    from lockstep.utils.files import load_reference

    loss = load_reference(name) or get_preference_loss(name)
    names = preference_inputs(loss)
    return _run(name, given, names, PreferenceSubject(loss, given), pair_cases(), PAIR_PROPERTIES, PAIR_WARNINGS, max_examples)


def _run(
    name: str,
    given: Collection[str],
    names: Collection[str],
    subject: Subject,
    strategy: SearchStrategy[Case],
    properties: Mapping[str, Property],
    warnings: Mapping[str, Property],
    max_examples: int,
) -> bool:
    """Print a line per property and the smallest case that breaks it; return whether all `properties` hold."""
    from lockstep.tools.check.cases import smallest_failure

    for key in given:
        if key not in names:
            raise ConfigError(f"{name} has no argument {key!r}; it reads {', '.join(names)}")
    first = next(iter(properties))
    all_hold = True
    for label, check in {**properties, **warnings}.items():
        failure = smallest_failure(strategy, functools.partial(check, subject), max_examples)
        if failure is None:
            say(f"  ok       {label}")
            continue
        case, violation = failure
        verdict = "warning" if label in warnings else "FAILED "
        say(f"  {verdict}  {label}: {(check.__doc__ or '').strip()}")
        say(textwrap.indent(f"{violation}\nthe smallest batch:\n{_describe(case, names)}", " " * 11))
        if label in properties:
            all_hold = False
        if label == first:
            break  # the shapes are wrong: every other property would say the same again
    say(f"{name}: {'every property holds' if all_hold else 'a property does not hold'} ({max_examples} batches for each)")
    return all_hold


def _describe(case: Case, names: Collection[str]) -> str:
    """Return the batch as text, one line for each tensor in `names`; masked entries are dots."""
    lines = []
    for name, values in case.tokens.items():
        if name not in names:
            continue
        rows = []
        for row, mask in zip(values.tolist(), case.mask.tolist(), strict=True):
            numbers = [f"{value:g}" if is_shown else "." for value, is_shown in zip(row, mask, strict=True)]
            rows.append(f"[{' '.join(numbers)}]")
        lines.append(f"{name:20} " + "  ".join(rows))
    lines += [f"{name:20} {values.tolist()}" for name, values in case.of_rows.items() if name in names]
    if case.mode:
        lines.append(f"{'loss_agg_mode':20} {case.mode}")
    return "\n".join(lines)


def _split_examples(words: list[str]) -> tuple[int, list[str]]:
    """Return the number after --examples, and the other words."""
    if "--examples" not in words:
        return _EXAMPLES, words
    at = words.index("--examples")
    if at + 1 == len(words) or not words[at + 1].isdigit() or words[at + 1] == "0":
        raise ConfigError("--examples needs a number of at least 1 after it")
    return int(words[at + 1]), words[:at] + words[at + 2 :]


def _argument(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"{text!r} cannot be read; expected argument=number") from None
