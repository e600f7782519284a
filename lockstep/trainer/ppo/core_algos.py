"""verl's path to `lockstep.compat.verl.core_algos`: the same module, so that its registries are one."""

import sys

from lockstep.compat.verl import core_algos

sys.modules[__name__] = core_algos
