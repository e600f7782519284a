from pathlib import Path

import pytest

from lockstep.config.load import load_config, with_changes
from lockstep.errors import ConfigError, DataError
from lockstep.tools.compare.algorithms import ALGORITHMS, read_algorithm
from lockstep.trainer.ppo.checks import check_algorithm

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
FILE = """
def my_loss(*, log_prob, advantages, response_mask):
    return -advantages * log_prob * response_mask, {}


def my_estimator(*, token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def base():
    return load_config(["actor_rollout_ref.rollout.n=2", "algorithm.use_kl_in_reward=false", "algorithm.gdpo_reward_keys=[acc]"])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_named_algorithm_is_a_configuration_that_could_train(name, base):
    algorithm = read_algorithm(name)
    assert algorithm.name == name
    # A recorded run may have had other values: every name sets all of them.
    assert algorithm.changes.keys() == ALGORITHMS["ppo"].keys()
    check_algorithm(with_changes(base, {"trainer.critic_warmup": 0, **algorithm.changes}))


def test_the_page_lists_every_name():
    page = (Path(__file__).parents[3] / "docs" / "compare.md").read_text()
    assert [name for name in ALGORITHMS if f"`{name}`" not in page] == []


def test_an_estimator_alone_keeps_the_recorded_loss():
    assert read_algorithm("grpo_passk").changes == {"algorithm.adv_estimator": "grpo_passk"}


def test_a_loss_and_an_estimator_are_joined_with_a_plus():
    both = read_algorithm("gspo+rloo")
    assert both.name == "gspo+rloo"
    assert both.changes == ALGORITHMS["gspo"] | {"algorithm.adv_estimator": "rloo"}
    assert read_algorithm("dppo_tv+opo").changes == {LOSS: "dppo_tv", "algorithm.adv_estimator": "opo"}


def test_a_function_of_a_file_is_a_loss_when_it_reads_log_probs(folder):
    loss, estimator = read_algorithm("own.py:my_loss"), read_algorithm("own.py:my_estimator")
    assert (loss.name, loss.changes) == ("my_loss", {LOSS: f"{folder}/own.py:my_loss"})
    assert (estimator.name, estimator.changes) == ("my_estimator", {"algorithm.adv_estimator": f"{folder}/own.py:my_estimator"})
    both = read_algorithm("own.py:my_loss+own.py:my_estimator")
    assert both.name == "my_loss+my_estimator"
    assert both.changes == loss.changes | estimator.changes


def test_a_yaml_file_sets_any_key_and_is_named_after_the_file(folder):
    (folder / "wide.yaml").write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {clip_ratio: 0.5}}\n")
    wide = read_algorithm("wide.yaml")
    assert wide.name == "wide"
    assert wide.changes == {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.clip_ratio": 0.5}


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("grp0", ConfigError, "'grpo'"),
        ("gspp+rloo", ConfigError, "'gspo'"),
        ("gspo+rlo", ConfigError, "'rloo'"),
        ("bad.yaml", ConfigError, "algorithm.adv_estimator"),
        ("none.yaml", ConfigError, "does not exist"),
        ("none.py:f", DataError, "does not exist"),
        ("own.py:f", DataError, "my_loss"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(folder, text, error, says):
    (folder / "bad.yaml").write_text("algorithm: {adv_estimatr: grpo}\n")
    with pytest.raises(error, match=says):
        read_algorithm(text)
