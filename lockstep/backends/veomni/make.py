"""A VeOmniEngine from the configuration."""

from lockstep.backends.veomni.engine import VeOmniEngine
from lockstep.config.engine import EngineChoice
from lockstep.workers.engine.spec import EngineSpec


def make(choice: EngineChoice, spec: EngineSpec) -> VeOmniEngine:
    """See registry.make_engine."""
    return VeOmniEngine(choice.veomni, spec)
