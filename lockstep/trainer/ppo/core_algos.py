"""verl's path to `lockstep.compat.core_algos`: the same functions and the same registries."""

from lockstep.compat.core_algos import *  # noqa: F403
