import dataclasses

import pytest
from helpers.errors import raises
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.actor_rollout_ref import RolloutConfig, ValidationSampling
from lockstep.config.sampling import SamplingConfig, SamplingParams
from lockstep.config.sft import SampledConfig
from lockstep.errors import ConfigError

SHARED = {item.name for item in dataclasses.fields(SamplingConfig)} & {item.name for item in dataclasses.fields(SamplingParams)}
VALUES = st.fixed_dictionaries(
    {
        "temperature": st.floats(0, 10),
        "top_k": st.just(-1) | st.integers(1, 100),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.5, 2),
    }
)


@given(VALUES)
def test_what_an_engine_is_asked_for_is_what_the_configuration_says(values):
    assert set(values) == SHARED
    params = SamplingConfig(**values).params(max_tokens=7, stop_token_ids=(1,), seed=3, stop=["x"])
    assert params == SamplingParams(**values, max_tokens=7, stop_token_ids=(1,), seed=3, stop=("x",))


@pytest.mark.parametrize("name", ["top_p", "n"])
@pytest.mark.parametrize("section", [SamplingConfig, ValidationSampling, RolloutConfig, SampledConfig])
def test_a_value_that_cannot_be_sampled_with_is_an_error_with_the_sections_key(section, name):
    with raises(ConfigError, f"{section.prefix}.{name}"):
        section(**{name: -1})
