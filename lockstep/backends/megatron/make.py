"""A MegatronEngine from the configuration. megatron-core is imported here, when it has been chosen."""

from lockstep.backends.megatron.engine import MegatronEngine
from lockstep.config.engine import EngineChoice
from lockstep.workers.engine.spec import EngineSpec


def make(choice: EngineChoice, spec: EngineSpec) -> MegatronEngine:
    """See registry.make_engine."""
    return MegatronEngine(choice.megatron, spec)
