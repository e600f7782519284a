import pytest
from helpers.tiny import tiny_config
from transformers import MambaConfig

from lockstep.config.engine import STRATEGIES, EngineChoice
from lockstep.errors import ConfigError
from lockstep.workers.engine.registry import check_engine


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_without_attention_heads_is_refused_before_it_is_loaded(strategy):
    """The config of a real Mamba has no such entry; `tiny_config` gives every family one."""
    with pytest.raises(ConfigError, match="a mamba has no attention heads: .* choose a model with causal softmax attention"):
        check_engine(EngineChoice(strategy=strategy), MambaConfig(), 1, "cuda")


def test_a_family_with_another_name_for_its_heads_has_them():
    check_engine(EngineChoice(), tiny_config("gpt2"), 1, "cpu")
