import dataclasses
import json
import shutil
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.tiny import save_tiny_model

from lockstep import protocol
from lockstep.algorithms.advantages import ADV_ESTIMATORS, register_adv_est
from lockstep.config.data import DataConfig
from lockstep.config.load import as_config
from lockstep.embedded.task import make_tokenizer
from lockstep.errors import ConfigError, DataError, MissingReward
from lockstep.trainer.ppo.checks import check_algorithm, check_columns, check_models, check_rewards, check_roles
from lockstep.trainer.role import Role

GRPO = {"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"rollout": {"n": 2}}}


class Worker:
    pass


class OtherRole(Enum):
    ActorRollout = 0
    Teacher = 1


def roles(*names):
    return dict.fromkeys(names, Worker), dict.fromkeys(names, "pool")


# -- algorithms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vanila"}}}}, "'vanila'; did you mean 'vanilla'"),
        ({"actor_rollout_ref": {"actor": {"loss_agg_mode": "mean"}}}, r"actor_rollout_ref\.actor\.loss_agg_mode=mean.*token-mean"),
        ({"critic": {"loss_agg_mode": "seq-mean-token-sum-norm"}}, r"critic\.loss_agg_mode=seq-mean-token-sum-norm.*token-mean"),
        ({"actor_rollout_ref": {"actor": {"kl_loss_type": "k9"}}}, r"actor_rollout_ref\.actor\.kl_loss_type=k9.*low_var_kl"),
        ({"algorithm": {"kl_penalty": "k9"}}, r"algorithm\.kl_penalty=k9.*low_var_kl"),
        ({"algorithm": {"adv_estimator": "gea"}}, "'gea'; did you mean 'gae'"),
    ],
)
def test_an_algorithm_that_does_not_exist_is_an_error_that_names_the_choices(config, message):
    with pytest.raises(ConfigError, match=message):
        check_algorithm(as_config(config))


def test_an_estimator_of_ones_own_that_needs_values_needs_a_critic(monkeypatch):
    monkeypatch.setattr("lockstep.algorithms.advantages.ADV_ESTIMATORS", dict(ADV_ESTIMATORS))
    register_adv_est("mine")(lambda *, values, response_mask: (values, values))
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator=mine needs values.*set critic\.enable=true"):
        check_algorithm(as_config({"algorithm": {"adv_estimator": "mine"}}))
    check_algorithm(as_config({"algorithm": {"adv_estimator": "mine"}, "critic": {"enable": True}}))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"adv_estimator": "gdpo"}, r"adv_estimator=gdpo.*name them in algorithm\.gdpo_reward_keys"),
        ({"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "use_kl_in_reward": True}, r"set algorithm\.use_kl_in_reward=false"),
        ({"gdpo_reward_keys": ["a"], "gdpo_reward_weights": [1.0, 2.0]}, "one weight for each"),
        ({"rollout_correction": {"rollout_is": "tokens"}}, "did you mean 'token'"),
        ({"rollout_correction": {"rollout_rs": "token_k1"}}, "rollout_rs_threshold"),
        ({"rollout_correction": {"rollout_is": "token", "bypass_mode": True}}, "compare them with themselves"),
    ],
)
def test_an_algorithm_that_lacks_what_it_reads_is_an_error(algorithm, message):
    with pytest.raises(ConfigError, match=message):
        check_algorithm(as_config({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}}))


@pytest.mark.parametrize("correction", [{"rollout_is": "token"}, {"bypass_mode": True}])
def test_a_correction_needs_a_sampler_that_has_log_probs(correction):
    def config(**rollout):
        return as_config(
            {"algorithm": {"rollout_correction": correction}, "actor_rollout_ref": {"rollout": {"name": "vllm"} | rollout}}
        )

    check_algorithm(config(top_k=5))
    check_algorithm(config(temperature=0.7))
    with pytest.raises(ConfigError, match="rollout.name=vllm cannot give for this sampling"):
        check_algorithm(config(temperature=0.7, top_k=5))


def test_remax_needs_nothing_more_and_gdpo_its_keys():
    check_algorithm(as_config({"algorithm": {"adv_estimator": "remax"}}))
    gdpo = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 2.0]}
    check_algorithm(as_config({"algorithm": gdpo, "actor_rollout_ref": {"rollout": {"n": 2}}}))


def test_gdpo_balances_the_penalty_for_length_or_the_run_has_none():
    def config(*keys):
        gdpo = {"adv_estimator": "gdpo", "gdpo_reward_keys": keys}
        return as_config(GRPO | {"algorithm": gdpo, "reward": {"overlong_buffer": {"enable": True}}})

    check_algorithm(config("a", "overlong_penalty"))
    with pytest.raises(ConfigError, match=r"reward\.overlong_buffer is not among them: add 'overlong_penalty'"):
        check_algorithm(config("a"))


def test_an_estimator_that_reads_what_no_run_has_is_an_error(monkeypatch):
    monkeypatch.setattr("lockstep.algorithms.advantages.ADV_ESTIMATORS", dict(ADV_ESTIMATORS))
    register_adv_est("mine")(lambda *, temperature, response_mask: (response_mask, response_mask))
    register_adv_est("weighted")(lambda *, rollout_is_weights: (rollout_is_weights, rollout_is_weights))
    with pytest.raises(ConfigError, match="adv_estimator=mine needs temperature.*can read config, gamma"):
        check_algorithm(as_config({"algorithm": {"adv_estimator": "mine"}}))
    with pytest.raises(ConfigError, match="adv_estimator=weighted needs rollout_is_weights"):
        check_algorithm(as_config({"algorithm": {"adv_estimator": "weighted"}}))
    check_algorithm(as_config({"algorithm": {"adv_estimator": "weighted", "rollout_correction": {"rollout_is": "token"}}}))


def test_loss_kwargs_must_be_arguments_of_the_loss(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mine(*, log_prob, sharpness):\n    return -sharpness * log_prob, {}\n")

    def config(mode, **kwargs):
        return as_config({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": mode, "loss_kwargs": kwargs}}}})

    check_algorithm(config(f"{file}:mine", sharpness=2.0))
    with pytest.raises(ConfigError, match=r"loss_kwargs\.sharp is not an argument.*which reads log_prob, sharpness"):
        check_algorithm(config(f"{file}:mine", sharp=2.0))
    with pytest.raises(ConfigError, match=r"mine\.py:mine needs sharpness; set .*loss_kwargs\.sharpness"):
        check_algorithm(config(f"{file}:mine"))
    with pytest.raises(DataError, match="has no 'other'"):
        check_algorithm(config(f"{file}:other"))


@pytest.mark.parametrize(
    ("mode", "numbers", "message"),
    [
        (
            "vanilla",
            {"clip_ratio_low": 2.0},
            r"needs 0 <= clip_ratio_low <= 1.* not 2\.0.*actor_rollout_ref\.actor\.clip_ratio_low",
        ),
        ("gspo", {"clip_ratio_low": 2.0}, "gspo policy loss needs"),
        ("clip_cov", {"clip_ratio_low": 2.0}, "clip_cov policy loss needs"),
        ("vanilla", {"clip_ratio_c": 1.0}, r"needs clip_ratio_c above 1"),
    ],
)
def test_numbers_outside_the_range_of_the_loss_are_an_error_before_models_are_loaded(mode, numbers, message):
    actor = {"policy_loss": {"loss_mode": mode}} | numbers
    with pytest.raises(ConfigError, match=message):
        check_algorithm(as_config({"actor_rollout_ref": {"actor": actor}}))


def test_a_wide_range_suits_a_loss_of_log_ratios():
    check_algorithm(as_config({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "geo_mean"}, "clip_ratio_low": 2.0}}}))


def test_the_defaults_and_grpo_pass():
    check_algorithm(as_config({}))
    check_algorithm(as_config(GRPO))


# -- roles -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, [Role.ActorRollout, Role.Critic]),
        (GRPO, [Role.ActorRollout]),
        (GRPO, [Role.Actor, Role.Rollout]),
        (GRPO, [OtherRole.ActorRollout, OtherRole.Teacher]),
        ({"algorithm": {"use_kl_in_reward": True}}, [Role.ActorRolloutRef, Role.Critic]),
        ({"algorithm": {"use_kl_in_reward": True}}, [Role.ActorRollout, Role.RefPolicy, Role.Critic]),
        (GRPO | {"reward_model": {"enable": True, "model": {"path": "rm"}}}, [Role.ActorRollout, Role.RewardModel]),
    ],
)
def test_roles_that_can_do_the_run_pass(config, names):
    check_roles(as_config(config), *roles(*names))


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (GRPO, [], "exactly one of Actor, ActorRollout, ActorRolloutRef; it has none"),
        (GRPO, [Role.ActorRollout, Role.ActorRolloutRef], "exactly one of .* it has .*'ActorRollout', 'ActorRolloutRef'"),
        (GRPO, [Role.Actor], "an Actor alone cannot generate"),
        (GRPO, [Role.ActorRollout, Role.Rollout], "ActorRollout has its own rollout"),
        ({}, [Role.ActorRollout], r"no Role\.Critic; add it, or set critic\.enable=false"),
        (
            {"algorithm": {"use_kl_in_reward": True}},
            [Role.ActorRollout, Role.Critic],
            r"algorithm\.use_kl_in_reward.*Role\.RefPolicy",
        ),
        (
            {"reward_model": {"enable": True, "model": {"path": "rm"}}},
            [Role.ActorRollout, Role.Critic],
            r"reward_model\.enable=True, but Role\.RewardModel is not in",
        ),
        (GRPO, [Role.ActorRollout, Role.RewardModel], r"reward_model\.enable=False, but Role\.RewardModel is in"),
    ],
)
def test_roles_that_cannot_do_the_run_are_an_error(config, names, message):
    with pytest.raises(ConfigError, match=message):
        check_roles(as_config(config), *roles(*names))


def test_a_role_without_a_pool_is_an_error():
    workers, _ = roles(Role.ActorRollout, OtherRole.Teacher)
    with pytest.raises(ConfigError, match=r"OtherRole\.Teacher .* has no pool"):
        check_roles(as_config(GRPO), workers, {Role.ActorRollout: "pool"})


# -- models ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """32 tokens, 64 positions."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("small"), vocab_size=8)


def model_config(path, critic=None, reward_model=None, length=16, **model):
    return as_config(
        {
            "data": {"train_files": "train.parquet", "max_prompt_length": length, "max_response_length": length},
            "actor_rollout_ref": {"model": {"path": path, **model}},
            "critic": {"model": {"path": critic}},
            "reward_model": {"enable": reward_model is not None, "model": {"path": reward_model}},
        }
    )


def test_models_that_fit_pass(model):
    check_models(model_config(model, critic=model, reward_model=model, length=32), make_tokenizer())


@pytest.mark.parametrize("place", ["path", "critic", "reward_model"])
def test_a_folder_that_is_not_a_model_is_an_error_wherever_it_is_named(model, tmp_path, place):
    with pytest.raises(DataError, match=r"no config\.json"):
        check_models(model_config(**{"path": model, place: str(tmp_path)}), make_tokenizer())


def test_an_adapter_is_no_model_and_the_error_says_where_it_goes(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"no config\.json in it; it is an adapter: .* model\.lora_adapter_path"):
        check_models(model_config(str(tmp_path)), make_tokenizer())


def test_a_model_that_the_run_does_not_use_is_not_looked_at(model, tmp_path):
    config = model_config(model, critic=str(tmp_path))
    algorithm = dataclasses.replace(config.algorithm, adv_estimator="grpo")
    rollout = dataclasses.replace(config.actor_rollout_ref.rollout, n=2)
    arr = dataclasses.replace(config.actor_rollout_ref, rollout=rollout)
    check_models(dataclasses.replace(config, algorithm=algorithm, actor_rollout_ref=arr), make_tokenizer())


def test_the_longest_row_must_fit_into_the_models_context_as_it_is_overridden(model):
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length \+ data\.max_response_length = 66 tokens, but .* holds 64"):
        check_models(model_config(model, length=33), make_tokenizer())
    check_models(model_config(model, length=33, override_config={"max_position_embeddings": 66}), make_tokenizer())


@pytest.mark.parametrize("place", ["path", "critic"])
def test_policy_and_critic_must_know_every_token(model, small_vocabulary, place):
    with pytest.raises(DataError, match=r"the tokenizer has 14 tokens, the model .* only 8"):
        check_models(model_config(**{"path": model, place: small_vocabulary}), make_tokenizer())


def test_a_critic_reads_the_policys_tokens(model, tmp_path):
    critic, own = Path(shutil.copytree(model, tmp_path / "critic")), make_tokenizer()
    config = model_config(model, critic=str(critic))
    more = make_tokenizer()
    more.add_tokens(["of a reward model's own"])
    more.save_pretrained(critic)
    check_models(config, own)
    padded = make_tokenizer()
    padded.add_tokens(["<pad of the policy>"])
    check_models(config, padded)
    file = critic / "tokenizer.json"
    described = json.loads(file.read_text())
    words = described["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"critic\.model\.path=.* has another tokenizer: 'a' is"):
        check_models(config, own)
    for file in critic.glob("*token*"):  # as in a critic's checkpoint
        file.unlink()
    check_models(config, own)


def test_a_tokenizer_without_a_pad_token_is_an_error(model):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(DataError, match="no pad token; load it with"):
        check_models(model_config(model), tokenizer)


# -- rewards ---------------------------------------------------------------------------------------------------------------


class Rewards:
    def __init__(self, known):
        self.known = known

    def check(self, tags, has_model=False, validation=False):
        for tag in tags:
            if tag not in self.known and not has_model:
                raise MissingReward(tag)


class Dataset:
    def __init__(self, *sources):
        self.sources = sources

    def tags(self):
        return self.sources


def test_a_missing_reward_function_is_an_error():
    with pytest.raises(ConfigError, match="reward_fn is missing"):
        check_rewards(as_config({}), None, None, Dataset("a"), None)
    with pytest.raises(ConfigError, match="no val_reward_fn"):
        check_rewards(as_config({}), Rewards("a"), None, Dataset("a"), Dataset("a"))


def test_every_data_source_must_have_its_reward_before_the_run():
    good, config = Rewards("ab"), as_config({})
    check_rewards(config, good, None, Dataset("a", "b"), None)
    with pytest.raises(MissingReward):
        check_rewards(config, good, good, Dataset("a", "c"), None)
    with pytest.raises(MissingReward):
        check_rewards(config, good, good, Dataset("a"), Dataset("c"))
    judged = as_config({"reward_model": {"enable": True, "model": {"path": "rm"}}})
    check_rewards(judged, good, good, Dataset("c"), None)  # the reward model judges them
    check_rewards(config, lambda data: None, None, [1, 2], None)  # a plain function and a plain list have nothing to check


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_estimators_that_compare_samples_need_more_than_one_a_prompt(estimator):
    with pytest.raises(ConfigError, match=rf"adv_estimator={estimator} compares.*rollout\.n=1"):
        check_algorithm(as_config({"algorithm": {"adv_estimator": estimator}, "actor_rollout_ref": {"rollout": {"n": 1}}}))
    check_algorithm(as_config({"algorithm": {"adv_estimator": "reinforce_plus_plus"}}))


def test_columns_of_the_ledger_are_refused_in_data_but_for_those_that_data_may_have():
    ledger = protocol.__doc__.split("written by")[1].split("```")[0]
    written = {line.split()[0] for line in ledger.splitlines()[1:] if line[:1].strip()}
    may_be_there = {"index", "raw_prompt", "data_source", "reward_model", "extra_info", "uid", "sample", "prompts", "responses"}
    for name in written:
        dataset = SimpleNamespace(columns=["prompt", name])
        refused = False
        try:
            check_columns(DataConfig(), None, dataset)
        except DataError as error:
            refused = f"data.val_files: the columns {name} have" in str(error)
        assert refused == (name not in may_be_there), name
    check_columns(DataConfig(prompt_key="turn"), SimpleNamespace(columns=["turn"]), object())
