"""verl's programs with the package renamed: `import lockstep.compat.verl`, then `from lockstep.utils.fs import copy_to_local`.

Importing this package makes verl's import paths importable (`names`): modules that Lockstep does not have are added, and Lockstep's
own modules get verl's names beside their own. No name of Lockstep's changes. A trainer class with a `fit` of its own, written for
verl, derives from the `RayPPOTrainer` of this package. docs/from_verl.md is the page for readers.
"""

from lockstep.compat.verl.loop import TaskRunner, run_ppo
from lockstep.compat.verl.loop import VerlTrainer as RayPPOTrainer
from lockstep.compat.verl.names import add_names

__all__ = ["RayPPOTrainer", "TaskRunner", "run_ppo"]

add_names()
