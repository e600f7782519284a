import pytest

from lockstep.config.actor_rollout_ref import ROLLOUTS
from lockstep.errors import ConfigError
from lockstep.workers.rollout.base import RolloutEngine
from lockstep.workers.rollout.registry import get_rollout


def test_every_name_the_config_accepts_is_an_engine() -> None:
    assert all(issubclass(get_rollout(name), RolloutEngine) for name in ROLLOUTS)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choose one of: native, hf, vllm, sglang"):
        get_rollout("nativ")
