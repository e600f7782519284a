"""Which class stands behind rollout.name. Engines are imported when they are chosen."""

from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.errors import ConfigError
from lockstep.workers.rollout.base import DecodeText, RolloutEngine


def get_rollout(name: str) -> type[RolloutEngine]:
    """The engine class named by actor_rollout_ref.rollout.name."""
    if name == "native":
        from lockstep.workers.rollout.native.engine import NativeRollout

        return NativeRollout
    if name == "hf":
        from lockstep.workers.rollout.hf.engine import HFRollout

        return HFRollout
    raise ConfigError(f"actor_rollout_ref.rollout.name={name} is not known; choose one of: native, hf")


def make_rollout(
    module: PreTrainedModel, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None
) -> RolloutEngine:
    """The engine named by `config.name` over `module`, which must have its weights and that engine's attention.

    A model that the engine would compute wrongly raises ConfigError; with `config.fallback_to_hf` transformers generates instead, and a
    line on standard output says so.
    """
    engine = get_rollout(config.name)(module, config, pad_token_id, decode_text)
    try:
        engine.check()
    except ConfigError as error:
        if not config.fallback_to_hf:
            raise
        print(f"{error}. Generating with transformers, as rollout.fallback_to_hf=true allows", flush=True)
        module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")
        engine = get_rollout("hf")(module, config, pad_token_id, decode_text)
    return engine
