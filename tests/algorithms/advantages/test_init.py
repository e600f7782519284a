import pytest

from lockstep.algorithms import advantages as module
from lockstep.algorithms.advantages import compute_advantage, get_adv_estimator, required_inputs
from lockstep.errors import ConfigError


@pytest.fixture
def scratch_registry(monkeypatch):
    """Registrations of one test, gone after it."""
    monkeypatch.setattr(module, "ADV_ESTIMATORS", dict(module.ADV_ESTIMATORS))


def test_an_estimator_says_what_it_requires():
    assert set(required_inputs("gae")) == {"token_level_rewards", "response_mask", "values", "gamma", "lam"}
    assert "values" not in required_inputs("grpo")


def test_an_unknown_estimator_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'grpoo'; did you mean 'grpo'\? Known: gae, grpo"):
        get_adv_estimator("grpoo")


@pytest.mark.usefixtures("scratch_registry")
def test_an_estimator_gets_the_inputs_its_signature_names_and_no_others():
    @module.register_adv_est("probe")
    def probe(*, response_mask, gamma=0.5, lam=0.25):
        return response_mask, (gamma, lam)

    assert required_inputs("probe") == ("response_mask",)
    assert compute_advantage("probe", {"response_mask": 1, "lam": 0.75, "values": 2}) == (1, (0.5, 0.75))


@pytest.mark.parametrize("available", [{"gamma": 1.0, "values": None}, {"gamma": 1.0}])
def test_a_missing_input_is_named_with_its_estimator(available):
    with pytest.raises(ConfigError, match=r"'gae' needs token_level_rewards, response_mask, values, lam.*has gamma"):
        compute_advantage("gae", available)


@pytest.mark.usefixtures("scratch_registry")
def test_an_estimator_with_positional_arguments_is_refused_when_registered():
    with pytest.raises(ConfigError, match=r"'rewards'.*keyword-only"):
        module.register_adv_est("positional")(lambda rewards: (rewards, rewards))
    assert "positional" not in module.ADV_ESTIMATORS
