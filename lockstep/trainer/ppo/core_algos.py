"""verl's path to `lockstep.compat.verl.core_algos`."""

from lockstep.compat.verl.core_algos import *  # noqa: F403
