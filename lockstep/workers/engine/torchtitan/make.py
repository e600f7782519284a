"""A TorchtitanEngine from the configuration. torchtitan is imported here, when it has been chosen."""

from lockstep.config.engine import EngineChoice
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.engine.torchtitan.compat import prepare_import


def make(choice: EngineChoice, spec: EngineSpec) -> TrainEngine:
    """See registry.make_engine."""
    prepare_import(spec.device)
    from lockstep.workers.engine.torchtitan.engine import TorchtitanEngine

    return TorchtitanEngine(choice.torchtitan, spec)
