"""A TorchtitanEngine from the configuration. torchtitan is imported here, when it has been chosen."""

from lockstep.backends.torchtitan.compat import prepare_import
from lockstep.config.engine import EngineChoice
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.spec import EngineSpec


def make(choice: EngineChoice, spec: EngineSpec) -> TrainEngine:
    """See registry.make_engine."""
    prepare_import(spec.device)
    from lockstep.backends.torchtitan.engine import TorchtitanEngine

    return TorchtitanEngine(choice.torchtitan, spec)
