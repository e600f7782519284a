"""Updates that were left out because they were not finite (trainer.on_nonfinite=skip): said, and too many of them in a row are an error."""

from collections.abc import Callable, Mapping

from lockstep.errors import NumericalError

MOST_STEPS = 3
"""Steps in a row in which a model has no update."""


def heed_skipped(metrics: Mapping[str, float], step: int, before: int, say: Callable[[str], None]) -> int:
    """Say which updates of a step were left out; returns the number of steps in a row in which a model had none, of which there were
    `before`. Raises NumericalError when there are too many."""
    shares = {name.split("/")[0]: share for name, share in metrics.items() if name.endswith("/skipped_updates") and share}
    for model, share in shares.items():
        say(
            f"warning: step {step}: {share:.0%} of the updates ({model}) gave numbers that are not finite and were left out "
            "(trainer.on_nonfinite=skip)"
        )
    without = before + 1 if 1.0 in shares.values() else 0
    if without == MOST_STEPS:
        raise NumericalError(
            f"no update of a model in {MOST_STEPS} steps in a row gave finite numbers; look at the data and the weights, or lower the "
            "learning rate"
        )
    return without
