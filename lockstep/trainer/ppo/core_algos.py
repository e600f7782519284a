"""verl's path to `lockstep.compat.verl`."""

from lockstep.compat.verl import *  # noqa: F403
