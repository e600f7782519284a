"""`lockstep check loss|advantage|preference NAME`: does batching change a loss or an estimator of your own?

NAME is `path.py:function`, or a registered name. Each property of `properties` is tried on many small batches; for one that does not
hold, the smallest batch that breaks it is shown.
"""

import functools
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.errors import ConfigError, as_command
from lockstep.utils.printable import say

USAGE = """usage: lockstep check loss NAME [argument=number ...]
       lockstep check advantage NAME [argument=number ...]
       lockstep check preference NAME [argument=number ...]

NAME is path.py:function, or the name of a registered loss or estimator. Arguments of its own are given as argument=number.
--examples N tries N batches for each property (default 100)."""

_EXAMPLES = 100


@as_command
def main(arguments: Sequence[str]) -> int:
    """Run the properties; 0 when all hold, 1 when one does not or the command cannot be run."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        say(USAGE)
        return 0
    checks = {"loss": check_loss, "advantage": check_advantage, "preference": check_preference}
    if len(arguments) < 2 or arguments[0] not in checks:
        raise ConfigError(f"expected 'loss', 'advantage' or 'preference' and a name, got {' '.join(arguments)!r}\n{USAGE}")
    max_examples, others = _split_examples(list(arguments[2:]))
    return 0 if checks[arguments[0]](arguments[1], dict(map(_argument, others)), max_examples) else 1


def check_loss(name: str, given: dict[str, Any], max_examples: int = _EXAMPLES) -> bool:
    """Check the policy loss `name`, called with the config's defaults and `given`; prints a line per property. True when all hold.

    Raises ConfigError or DataError when there is no such loss or it asks for something that no run has.
    """
    from lockstep.algorithms.policy_losses import get_policy_loss, loss_inputs
    from lockstep.tools.check.cases import loss_cases
    from lockstep.tools.check.properties import LOSS_PROPERTIES, LOSS_WARNINGS, LossSubject
    from lockstep.utils.files import load_reference

    loss = load_reference(name) or get_policy_loss(name)
    names = loss_inputs(loss)
    subject = LossSubject(loss, ActorConfig().loss_parameters | given)
    return _run(name, given, names, subject, loss_cases(), LOSS_PROPERTIES, LOSS_WARNINGS, max_examples)


def check_advantage(name: str, given: dict[str, Any], max_examples: int = _EXAMPLES) -> bool:
    """Check the estimator `name`, called with the config's defaults and `given`; prints a line per property. True when all hold.

    Raises ConfigError or DataError when there is no such estimator or it asks for something that no run has.
    """
    from lockstep.algorithms.advantages import get_adv_estimator
    from lockstep.algorithms.registry import input_names
    from lockstep.tools.check.cases import advantage_cases
    from lockstep.tools.check.properties import ADVANTAGE_PROPERTIES, ADVANTAGE_WARNINGS, AdvantageSubject
    from lockstep.utils.files import load_reference

    estimator = load_reference(name) or get_adv_estimator(name)
    names = input_names(f"advantage estimator {name!r}", estimator)
    config = AlgorithmConfig()
    numbers = {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo, "config": config}
    subject = AdvantageSubject(estimator, numbers | given)
    return _run(name, given, names, subject, advantage_cases(), ADVANTAGE_PROPERTIES, ADVANTAGE_WARNINGS, max_examples)


def check_preference(name: str, given: dict[str, Any], max_examples: int = _EXAMPLES) -> bool:
    """Check the preference loss `name`, called with its own defaults and `given`; prints a line per property. True when all hold.

    Raises ConfigError or DataError when there is no such loss or it asks for something that no run has.
    """
    from lockstep.algorithms.preference_losses import get_preference_loss, preference_inputs
    from lockstep.tools.check.cases import pair_cases
    from lockstep.tools.check.pairs import PAIR_PROPERTIES, PAIR_WARNINGS, PreferenceSubject
    from lockstep.utils.files import load_reference

    loss = load_reference(name) or get_preference_loss(name)
    names = preference_inputs(loss)
    return _run(name, given, names, PreferenceSubject(loss, given), pair_cases(), PAIR_PROPERTIES, PAIR_WARNINGS, max_examples)


def _run(
    name: str,
    given: Collection[str],
    names: Collection[str],
    subject: Any,
    strategy: Any,
    properties: Mapping[str, Callable[[Any, Any], None]],
    warnings: Mapping[str, Callable[[Any, Any], None]],
    max_examples: int,
) -> bool:
    from lockstep.tools.check.cases import smallest_failure

    for key in given:
        if key not in names:
            raise ConfigError(f"{name} has no argument {key!r}; it reads {', '.join(names)}")
    holds = True
    for label, check in {**properties, **warnings}.items():
        failure = smallest_failure(strategy, functools.partial(check, subject), max_examples)
        if failure is None:
            say(f"  ok       {label}")
            continue
        case, violation = failure
        is_warning = label in warnings
        holds = holds and is_warning
        say(f"  {'warning' if is_warning else 'FAILED '}  {label}: {(check.__doc__ or '').strip()}")
        say(textwrap.indent(f"{violation}\nthe smallest batch:\n{_describe(case, names)}", " " * 11))
        if check is next(iter(properties.values())):
            break  # the shapes are wrong: every other property would say the same again
    say(f"{name}: {'every property holds' if holds else 'a property does not hold'} ({max_examples} batches for each)")
    return holds


def _describe(case: Any, names: Collection[str]) -> str:
    """The batch, one line for each tensor in `names`; masked entries are dots."""
    lines = []
    for name in (name for name in case.tokens if name in names):
        pairs = zip(case.tokens[name].tolist(), case.mask.tolist(), strict=True)
        rows = (" ".join(f"{v:g}" if m else "." for v, m in zip(*pair, strict=True)) for pair in pairs)
        lines.append(f"{name:20} " + "  ".join(f"[{row}]" for row in rows))
    lines += [f"{name:20} {x.tolist()}" for name, x in case.of_rows.items() if name in names]
    return "\n".join([*lines, *([f"{'loss_agg_mode':20} {case.mode}"] if case.mode else [])])


def _split_examples(arguments: list[str]) -> tuple[int, list[str]]:
    if "--examples" not in arguments:
        return _EXAMPLES, arguments
    at = arguments.index("--examples")
    if at + 1 == len(arguments) or not arguments[at + 1].isdigit() or arguments[at + 1] == "0":
        raise ConfigError("--examples needs a number of at least 1 after it")
    return int(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]


def _argument(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"{text!r} cannot be read; expected argument=number") from None
