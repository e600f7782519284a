"""Which class stands behind rollout.name. Engines are imported when they are chosen."""

from lockstep.errors import ConfigError
from lockstep.workers.rollout.base import RolloutEngine


def get_rollout(name: str) -> type[RolloutEngine]:
    """The engine class named by actor_rollout_ref.rollout.name."""
    if name == "native":
        from lockstep.workers.rollout.native.engine import NativeRollout

        return NativeRollout
    if name == "hf":
        from lockstep.workers.rollout.hf.engine import HFRollout

        return HFRollout
    raise ConfigError(f"actor_rollout_ref.rollout.name={name} is not known; choose one of: native, hf")
