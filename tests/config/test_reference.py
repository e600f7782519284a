import re

import pytest

from lockstep.config.keys import valid_keys
from lockstep.config.reference import ROOTS, about, command_help, keys, markdown
from lockstep.errors import ConfigError


def test_every_key_has_a_meaning_and_is_listed_everywhere():
    listed = list(keys())
    assert [key for key, _, _ in listed] == list(valid_keys())
    assert [key for key, _, meaning in listed if len(meaning) < 6] == []
    page = markdown()
    assert [key for key, default, meaning in listed if f"| `{key}` | `{default}` | {meaning} |" not in page] == []


def test_a_meaning_with_a_column_sign_would_break_the_table():
    assert [key for key, _, meaning in keys() if "|" in meaning or "\n" in meaning] == []


def explained(text):
    return re.findall(r"^([a-z_]+(?:\.[a-z_]+)+)=", text, re.MULTILINE)


@pytest.mark.parametrize("command", ROOTS)
def test_every_key_is_in_the_overview_under_its_group_and_in_all(command):
    root = ROOTS[command]
    overview, whole = command_help(root), command_help(root, ["all"])
    groups = dict(re.findall(r"^([a-z_.]+): .*\n((?:    .*\n?)*)", overview, re.MULTILINE))
    same = dict(re.findall(r"^([a-z_.]+): as (\S+)$", overview, re.MULTILINE))
    for key, default, _ in keys(root):
        group, _, name = key.rpartition(".")
        if group.endswith((".megatron", ".torchtitan", ".veomni")):  # shown by their name alone
            assert f"\n{key}={default}\n" in whole
            continue
        assert name in groups[same.get(group, group)].split(), key
        assert f"\n{key}={default}\n" in whole
        assert about(root, group), f"the section {group} has no docstring"


def test_a_group_is_what_is_below_its_name():
    listed = [key for key, _, _ in keys()]
    assert explained(command_help(ROOTS["ppo"], ["data"])) == [key for key in listed if key.startswith("data.")]
    assert explained(command_help(ROOTS["ppo"], ["critic.optim"])) == [key for key in listed if key.startswith("critic.optim.")]
    assert {key.rsplit(".", 2)[1] for key in explained(command_help(ROOTS["ppo"], ["optim"]))} == {"optim"}
    assert explained(command_help(ROOTS["ppo"], ["data.seed"])) == ["data.seed"]


def test_another_word_is_searched_in_names_and_meanings():
    found = explained(command_help(ROOTS["ppo"], ["Clip"]))
    assert {"actor_rollout_ref.actor.clip_ratio", "critic.cliprange_value", "critic.optim.clip_grad"} <= set(found)
    assert "algorithm.kl_ctrl.horizon" in explained(command_help(ROOTS["ppo"], ["over", "which"]))  # a meaning
    with pytest.raises(ConfigError, match=r"the nearest word is 'clip' \(lockstep sft --help clip\)"):
        command_help(ROOTS["sft"], ["clyp"])


def test_words_find_keys_in_which_each_of_them_occurs():
    for words in (["batch size"], ["batch", "size"], ["size", "batch"]):
        assert "data.train_batch_size" in explained(command_help(ROOTS["ppo"], words))


def test_the_help_of_an_algorithm_says_what_its_preset_sets():
    text = command_help(ROOTS["ppo"], algorithm="dapo")
    assert text.startswith("usage: lockstep dapo [")
    assert "reward.overlong_buffer.enable=True" in text
    assert "\nalgorithm.filter_groups.enable=True\n" in command_help(ROOTS["ppo"], ["filter_groups"], "dapo")


def test_other_engines_are_shown_when_they_are_asked_for():
    overview = command_help(ROOTS["ppo"])
    assert "critic.fsdp_config" in overview
    assert not any(f"critic.{engine}:" in overview for engine in ("megatron", "torchtitan", "veomni"))
    assert "--help megatron" in overview
    assert "critic.megatron.tensor_model_parallel_size" in command_help(ROOTS["ppo"], ["megatron"])
