"""A VeOmniEngine from the configuration."""

from lockstep.config.engine import EngineChoice
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.engine.veomni.engine import VeOmniEngine


def make(choice: EngineChoice, spec: EngineSpec) -> VeOmniEngine:
    """See registry.make_engine."""
    return VeOmniEngine(choice.veomni, spec)
