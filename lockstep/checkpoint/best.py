"""Whether there is a metric of the name trainer.best_metric, said while little is lost."""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import ConfigError


def check_best(
    section: Any, metrics: Mapping[str, float], before: Mapping[str, float], step: int, tell: Callable[[str], None]
) -> None:
    """Raise ConfigError where best_metric of `section` (trainer.*) is not among the metrics of the first step, nor among those of the
    validation `before` it.

    In a later step it is told instead, where that is validated: an error would take the work with it.
    """
    best = section.best_metric
    first = 1 + getattr(section, "critic_warmup", 0)  # until then the actor has no metrics
    whole = "val-aux/share_of_rows" not in before  # a part of the rows need not have every data source
    known = {**before, **metrics} if step == first and whole else metrics
    is_validated = any(name.startswith("val") for name in known)
    if step < first or best in known or (best.startswith("val") and not is_validated) or (step != first and not is_validated):
        return
    said = f"trainer.best_metric={best} is not among the metrics: {', '.join(sorted(known))}"
    if step == 1:
        raise ConfigError(said)
    tell(f"warning: {said}; no checkpoint is kept as the best")
