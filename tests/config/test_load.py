import dataclasses
import functools
import re
import subprocess
import sys
import time

import pytest
from helpers.errors import raises
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lockstep.config.dpo import DPOConfig
from lockstep.config.engine import STRATEGIES, section_of
from lockstep.config.keys import NOTHING_LIKE, TRL_NAMES, check_key, valid_keys
from lockstep.config.load import as_config, load_config, load_recipe, read_keys, read_overrides, read_yaml, to_yaml, with_changes
from lockstep.config.ppo import PPOConfig
from lockstep.config.presets import EMBEDDED_PRESET
from lockstep.config.reference import ROOTS
from lockstep.config.sft import SFTConfig
from lockstep.errors import ConfigError

NAMED = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


# -- unknown keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("trainr.nnodes", "trainer.nnodes"),
        ("actor_rollout_ref.actor.optim.learning_rate", "actor_rollout_ref.actor.optim"),
        ("actor_rollout.rollout.n", "actor_rollout_ref.rollout.n"),
        ("critic.strateg", "critic.strategy"),
        ("algorithm.kl_ctrl.horizn", "algorithm.kl_ctrl.horizon"),
        ("gamma", "algorithm.gamma"),
        ("model.path", "actor_rollout_ref.model.path"),
        ("data.train_batch_size.more", "data.train_batch_size"),
        ("data.train_files.first", "data.train_files"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_one(key, nearest, tmp_path):
    nested = OmegaConf.create()
    OmegaConf.update(nested, key, 1)
    for load in (
        lambda: load_config([f"{key}=1"]),
        lambda: load_config([f"+{key}=1"]),
        lambda: load_config(config_file=write(tmp_path, OmegaConf.to_yaml(nested))),
        lambda: as_config(OmegaConf.to_container(nested)),
        lambda: check_key(key),
    ):
        with pytest.raises(ConfigError, match=f"unknown key '{key}'; the nearest valid key is '{nearest}"):
            load()


def test_a_field_of_trls_names_the_key_that_does_the_same_in_every_recipe_that_has_one():
    keys = {root: list(valid_keys(root)) for root in (PPOConfig, SFTConfig, DPOConfig)}
    for name, end in ((name, end) for name, ends in TRL_NAMES.items() for end in ends.split()):
        wanted = {root: [k for k in keys[root] if f".{k}".endswith(f".{end}")][:1] for root in keys}
        assert any(wanted.values()), end
        for root, found in wanted.items():
            if found and not any(k.endswith(f".{name}") for k in keys[root]):
                with pytest.raises(ConfigError, match=f"unknown key '{name}'; the nearest valid key is '{found[0]}'"):
                    check_key(name, root)
    with pytest.raises(ConfigError, match="nearest valid key is 'actor_rollout_ref.rollout.n'"):
        load_config(["num_generations=8"])
    with pytest.raises(ConfigError, match="nearest valid key is 'data.max_response_length'"):
        load_config(["max_completion_length=256"])


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, DPOConfig])
@pytest.mark.parametrize("name", [*NOTHING_LIKE, "xyzzy", "data.xyzzy"])
def test_a_key_that_nothing_here_is_like_names_none(name, root):
    if name not in valid_keys(root):
        with pytest.raises(ConfigError, match=rf"unknown key '{name}': there is nothing like it here"):
            check_key(name, root)


def test_no_field_of_trls_without_a_counterpart_has_become_a_key():
    keys = {key.rpartition(".")[2] for root in (PPOConfig, SFTConfig, DPOConfig) for key in valid_keys(root)}
    assert keys & set(NOTHING_LIKE) == set()


def test_an_unknown_key_inside_a_value_that_is_a_mapping_is_found():
    with pytest.raises(ConfigError, match=r"unknown key 'critic\.strateg'; the nearest valid key is 'critic\.strategy'"):
        load_config(["critic={strateg: fsdp}"])


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("actor_rollout_ref.actor.use_dynamic_bsz", "always cut by tokens"),
        ("actor_rollout_ref.model.use_remove_padding", "always packed"),
        ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
        ("algorithm.rollout_correction.loss_type", "vanilla is ppo_clip"),
    ],
)
def test_a_key_of_other_systems_that_is_not_needed_here_is_an_error_that_says_why(key, why):
    with pytest.raises(ConfigError, match=f"unknown key '{key}': .*{why}"):
        load_config([f"{key}=1"])


def test_a_key_that_is_another_ones_elsewhere_is_not_taken_for_it():
    """TRL's name for what DPO learns with; verl has a key of PPO that ends so."""
    with pytest.raises(
        ConfigError, match=r"unknown key 'loss.loss_type'; the nearest valid key is 'loss.loss_mode' \(all keys: lockstep dpo"
    ):
        load_recipe(DPOConfig, ["loss.loss_type=kto"])


@pytest.mark.parametrize("value", ["5", "null", "[1]"])
def test_a_section_is_not_a_value(value, tmp_path):
    for load in (lambda: load_config([f"data={value}"]), lambda: load_config(config_file=write(tmp_path, f"data: {value}\n"))):
        with pytest.raises(ConfigError, match=r"'data' is a section.*such as 'data\.train_files'"):
            load()


# -- values ----------------------------------------------------------------------------------------------------------------


def test_a_weight_without_its_judge_is_an_error_that_shows_the_form():
    with pytest.raises(ConfigError, match=r"reward\.weights\.my/sums must be .* such as \{rule: 1\.0"):
        load_config(["reward.weights={my/sums:1.0}"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train_batch_size", "many"),
        ("data.train_batch_size", "1.5"),
        ("data.train_batch_size", "null"),
        ("actor_rollout_ref.actor.optim.lr", "fast"),
        ("actor_rollout_ref.rollout.max_num_seqs", "2.5"),
        ("data.shuffle", "perhaps"),
        ("trainer.logger", "3"),
        ("algorithm.kl_ctrl.type", "[fixed]"),
        ("data.train_max_samples", "0"),
        ("data.val_max_samples", "-2"),
        ("actor_rollout_ref.actor.optim.lr", "inf"),
        ("actor_rollout_ref.actor.optim.weight_decay", "nan"),
        ("actor_rollout_ref.actor.entropy_coeff", "nan"),
        ("actor_rollout_ref.actor.kl_loss_coef", "inf"),
        ("algorithm.kl_ctrl.kl_coef", "inf"),
        ("actor_rollout_ref.rollout.temperature", "inf"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "nan"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_the_key(key, value):
    section, leaf = key.rsplit(".", 1)
    nested = OmegaConf.create()
    OmegaConf.update(nested, section, OmegaConf.create(f"{leaf}: {value}"))
    for load in (lambda: load_config([f"{key}={value}"]), lambda: as_config(nested)):
        with raises(ConfigError, key):
            load()


def test_a_bound_may_be_infinite():
    """No clip is a clip that nothing reaches."""
    keys = ("actor_rollout_ref.actor.clip_ratio_high", "actor_rollout_ref.actor.optim.clip_grad")
    assert load_config([f"{key}=inf" for key in keys]).actor_rollout_ref.actor.clip_ratio_high == float("inf")


@pytest.mark.parametrize(
    ("text", "key"), [("data.seed", None), ("data.seed=[1", None), ("~data.seed", "data.seed"), ("data.seed=1,2", "data.seed")]
)
def test_an_override_that_is_not_one_value_for_one_key_is_an_error(text, key):
    with pytest.raises(ConfigError) as error:
        load_config([text])
    assert error.value.key == key
    assert text in str(error.value)


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_text_with_commas_needs_no_quotes(quote):
    key = "algorithm.rollout_correction.rollout_rs"
    found = load_config(
        [f"{key}={quote}token_k1,seq_mean_k2{quote}", f'{key}_threshold="0.5_2.0,0.1"']
    ).algorithm.rollout_correction
    assert (found.rollout_rs, found.rollout_rs_threshold) == ("token_k1,seq_mean_k2", "0.5_2.0,0.1")


def test_what_is_not_a_mapping_of_sections_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(config_file=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="mapping of sections, not ListConfig"):
        load_config(config_file=write(tmp_path, "- data\n"))
    with pytest.raises(ConfigError, match="line 2 is not valid YAML: expected the node content"):
        load_config(config_file=write(tmp_path, "data: {\n  seed: ["))
    with pytest.raises(ConfigError, match="mapping of sections, not list"):
        as_config(["data"])
    with raises(ConfigError, "data.train_files"):
        as_config({"data": {"train_files": object()}})


def test_free_form_sections_take_any_key_but_only_in_themselves(tmp_path):
    config = load_config(
        [
            "actor_rollout_ref.model.override_config.rope_scaling.factor=2",
            "data.apply_chat_template_kwargs={enable_thinking: false}",
            "ray_kwargs.ray_init.num_cpus=4",
        ],
        write(tmp_path, "reward: {custom_reward_function: {reward_kwargs: {bonus: 1.5}}}\n"),
    )
    assert config.actor_rollout_ref.model.override_config == {"rope_scaling": {"factor": 2}}
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.ray_kwargs.ray_init == {"num_cpus": 4}
    assert config.reward.custom_reward_function.reward_kwargs == {"bonus": 1.5}
    assert isinstance(config.actor_rollout_ref.model.override_config, dict)


def test_offloading_is_auto_true_or_false():
    critic, ref = "critic.fsdp_config.optimizer_offload", "actor_rollout_ref.ref.param_offload"
    config = load_config([*NAMED, f"{critic}=true", f"{ref}=False", "critic.fsdp_config.param_offload=auto"])
    assert config.critic.fsdp_config.optimizer_offload is True
    assert config.actor_rollout_ref.ref.param_offload is False
    assert config.critic.fsdp_config.param_offload == config.actor_rollout_ref.actor.fsdp_config.param_offload == "auto"
    for key in (critic, ref, "reward_model.fsdp_config.param_offload"):
        for wrong in ("perhaps", "true", 1, None):
            with raises(ConfigError, key):
                with_changes(config, {key: wrong})


# -- what lies over what ---------------------------------------------------------------------------------------------------


def test_overrides_lie_over_the_file_over_the_preset_over_the_defaults(tmp_path):
    file = write(tmp_path, "data: {train_batch_size: 32, seed: 5}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 16}}\n")
    config = load_config(["data.seed=7"], file)
    assert (config.data.seed, config.data.train_batch_size) == (7, 32)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 16
    assert config.actor_rollout_ref.rollout.n == EMBEDDED_PRESET["actor_rollout_ref"]["rollout"]["n"]
    assert config.trainer.project_name == PPOConfig().trainer.project_name


@pytest.mark.parametrize("word", ["tensorboard", "'my file.py:Mine'"])
def test_one_word_for_a_list_is_a_list_of_one(tmp_path, word):
    expected = [word.strip("'")]
    assert load_config([f"trainer.logger={word}"]).trainer.logger == expected
    assert load_config([], write(tmp_path, f"trainer: {{logger: {word}}}")).trainer.logger == expected
    assert as_config({"trainer": {"logger": expected[0]}}).trainer.logger == expected
    assert load_config(["trainer.logger=[console,wandb]"]).trainer.logger == ["console", "wandb"]


STOP = "actor_rollout_ref.rollout.stop"


@pytest.mark.parametrize("given", ['["\\n"]', "['\\n\\nQ:']", "\\n"])
def test_a_stop_string_with_a_backslash_for_a_line_break_is_an_error_that_says_how_it_is_written(given):
    with pytest.raises(ConfigError, match=rf"^{STOP} has \\n.*; a line break is \$'\.\.\.\\n\.\.\.' around the whole word"):
        load_config([*NAMED, f"{STOP}={given}"])


def test_a_stop_string_may_have_a_line_break_or_a_backslash(tmp_path):
    found = load_config([*NAMED, f'{STOP}=["\n","\\boxed","\\nabla"]'])
    assert found.actor_rollout_ref.rollout.stop == ["\n", "\\boxed", "\\nabla"]
    file = write(tmp_path, 'actor_rollout_ref: {rollout: {stop: ["\\n"]}}')
    assert load_config(NAMED, file).actor_rollout_ref.rollout.stop == ["\n"]


def test_without_data_and_model_the_embedded_preset_applies():
    config = load_config()
    assert config == as_config(EMBEDDED_PRESET)
    assert config != PPOConfig()


@pytest.mark.parametrize(
    "overrides",
    [
        NAMED,
        NAMED[1:],
        ["data.train_files=embedded"],
        ["data={train_files: train.parquet}", "actor_rollout_ref={model: {path: model}}"],
    ],
)
def test_naming_data_or_a_model_leaves_the_embedded_preset_out(overrides, tmp_path):
    config = load_config(overrides)
    assert config.trainer == dataclasses.replace(PPOConfig().trainer, experiment_name=config.trainer.experiment_name)
    assert config.actor_rollout_ref.rollout == PPOConfig().actor_rollout_ref.rollout


def test_naming_them_in_a_file_leaves_the_embedded_preset_out_too(tmp_path):
    file = write(tmp_path, "data: {train_files: [a.parquet, b.parquet]}\nactor_rollout_ref: {model: {path: model}}\n")
    config = load_config(config_file=file)
    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.trainer == dataclasses.replace(PPOConfig().trainer, experiment_name=config.trainer.experiment_name)


def test_the_yaml_of_a_config_reads_back_as_the_same_config(tmp_path):
    for overrides in (
        [],
        [*NAMED, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "trainer.logger=[console,wandb]"],
        [*NAMED, "data.train_files=[a,b]", "actor_rollout_ref.model.override_config.a.b=1", "data.seed=3"],
    ):
        config = load_config(overrides)
        assert load_config(config_file=write(tmp_path, to_yaml(config))) == config


def test_a_config_is_taken_as_it_is_and_a_mapping_lies_over_the_defaults():
    config = PPOConfig()
    assert as_config(config) is config
    assert as_config({}) == config
    changed = as_config({"data": {"train_batch_size": 8}})
    assert changed.data.train_batch_size == 8
    changed.data.train_batch_size = 64
    changed.trainer.experiment_name = config.trainer.experiment_name
    assert changed == config


# -- start-up --------------------------------------------------------------------------------------------------------------


def test_parsing_and_help_import_no_torch_and_are_quick():
    program = (
        "import sys, contextlib, io, time\n"
        "from lockstep.cli import main\n"
        "from lockstep.config import load_config\n"
        "load_config(['data.train_batch_size=32'])\n"
        "sys.argv = ['lockstep', 'ppo', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    assert main() == 0\n"
        "assert 'train_batch_size' in out.getvalue()\n"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)))\n"
        "assert time.process_time() < 2, time.process_time()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_changes_are_checked_like_the_command_line():
    config = load_config([*NAMED, "algorithm.adv_estimator=grpo"])
    changed = with_changes(config, {"algorithm.lam": 0.5, "actor_rollout_ref.actor.policy_loss.loss_kwargs.slope": 2})
    assert (changed.algorithm.lam, changed.algorithm.adv_estimator) == (0.5, "grpo")
    assert changed.actor_rollout_ref.actor.policy_loss.loss_kwargs == {"slope": 2}
    assert config.algorithm.lam == 1.0
    for key, value in (("algorithm.lan", 1), ("algorithm.lam", 2), ("algorithm.lam", "x")):
        with raises(ConfigError, key):
            with_changes(config, {key: value})


def test_the_keys_of_a_file_and_of_overrides_are_read_with_their_values(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("algorithm: {lam: 0.5, gdpo_reward_keys: [a, b]}\ndata: {train_batch_size: 3}\n")
    expected = {"algorithm.lam": 0.5, "algorithm.gdpo_reward_keys": ["a", "b"], "data.train_batch_size": 3}
    assert read_keys(file) == expected
    assert read_overrides(["algorithm.lam=0.5", "algorithm.gdpo_reward_keys=[a,b]", "++data.train_batch_size=3"]) == expected
    for read in (lambda: read_overrides(["algorithm.lan=1"]), lambda: read_overrides(["algorithm"])):
        with pytest.raises(ConfigError):
            read()


def test_the_embedded_task_runs_without_a_critic_by_one_key():
    config = load_config(["algorithm.adv_estimator=grpo"])
    assert (config.use_critic, config.trainer.critic_warmup) == (False, 0)
    assert load_config([]).trainer.critic_warmup > 0
    with raises(ConfigError, "trainer.critic_warmup"):
        load_config(["algorithm.adv_estimator=grpo", "trainer.critic_warmup=3"])


@pytest.mark.parametrize("root", ROOTS.values(), ids=list(ROOTS))
def test_home_is_written_out_in_every_key_of_a_path(root, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    named = re.compile(r"(^|[._])(path|files|dir|folder|recorded)$")
    keys = [key for key in valid_keys(root) if named.search(key) and not key.endswith("lora_adapter_path")]
    assert len(keys) >= 5
    both = {"model.path", "data.train_files", "teacher.path", "actor_rollout_ref.model.path"}
    others = {
        "trainer.resume_from_path": ["trainer.resume_mode=resume_path"],
        "data.custom_cls.path": ["data.custom_cls.name=Mine"],
    }
    others |= {"reference.path": ["reference.mode=model"], "reference.folder": ["reference.mode=file"]}
    others |= {"actor_rollout_ref.ref.model.path": ["actor_rollout_ref.actor.use_kl_loss=true"]}
    for key in keys:
        needed = [f"{name}=x" for name in both & set(valid_keys(root)) - {key}] + others.get(key, [])
        config = load_recipe(root, [*needed, f"{key}=~/a b/x"])
        assert functools.reduce(getattr, key.split("."), config) == "/home/me/a b/x", key
    listed = load_recipe(root, [*(f"{name}=x" for name in both & set(valid_keys(root))), "data.train_files=[~/a,b~,~/c]"])
    assert listed.data.train_files == ["/home/me/a", "b~", "/home/me/c"]


def test_an_empty_mapping_clears_a_free_form_mapping_and_leaves_a_section_alone(tmp_path):
    kwargs = "actor_rollout_ref.actor.policy_loss.loss_kwargs"
    file = write(tmp_path, "actor_rollout_ref: {actor: {policy_loss: {loss_kwargs: {a: 1}}}}")
    assert load_config([f"{kwargs}.b=2"], file).actor_rollout_ref.actor.policy_loss.loss_kwargs == {"a": 1, "b": 2}
    assert load_config([f"{kwargs}={{}}"], file).actor_rollout_ref.actor.policy_loss.loss_kwargs == {}
    assert load_config([f"{kwargs}={{}}", f"{kwargs}.b=2"], file).actor_rollout_ref.actor.policy_loss.loss_kwargs == {"b": 2}
    assert load_config(["data.train_batch_size=7", "data={}"]).data.train_batch_size == 7


ROLES = {PPOConfig: ("actor_rollout_ref.actor", "critic", "reward_model"), SFTConfig: ("engine",)}
SIZE_KEYS = {
    "fsdp_config": "fsdp_size", "megatron": "tensor_model_parallel_size", "torchtitan": "tensor_parallel_size",
    "veomni": "ulysses_parallel_size",
}  # fmt: skip


@pytest.mark.parametrize("root", ROLES, ids=lambda root: root.command)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_the_keys_of_the_chosen_engine_exist_in_a_run(root, strategy, tmp_path):
    needed = list(NAMED) if root is PPOConfig else ["model.path=m", "data.train_files=rows.jsonl"]
    for role in ROLES[root]:
        chosen = [*needed, f"{role}.strategy={strategy}"]
        for section, name in SIZE_KEYS.items():
            if section == section_of(strategy):
                load_recipe(root, [*chosen, f"{role}.{section}.{name}=1"])
                continue
            for key in (f"{role}.{section}.{name}=1", f"{role}.{section}={{{name}: 1}}"):
                with raises(ConfigError, f"{role}.{section}.{name}") as error:
                    load_recipe(root, [*chosen, key])
                assert f"{role}.strategy" in str(error.value)
        config = load_recipe(root, chosen)
        text = to_yaml(config)
        sections = functools.reduce(lambda node, part: node[part], role.split("."), OmegaConf.create(text))
        assert [section for section in SIZE_KEYS if section in sections] == [section_of(strategy)]
        assert load_recipe(root, [], write(tmp_path, text)) == config


def test_a_file_may_have_the_sections_of_all_engines(tmp_path):
    whole = OmegaConf.to_yaml(OmegaConf.structured(load_config(NAMED)))
    assert load_config(config_file=write(tmp_path, whole)) == load_config(NAMED)
    other = load_config(NAMED, write(tmp_path, "critic: {megatron: {tensor_model_parallel_size: 2}}\n"))
    assert "megatron" in to_yaml(other)  # what is set is kept


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    "text",
    [
        BOMB, "a: &a [*a]\n", "a: &a\n  b: *a\n", "[" * 100_000, "a: " + "{a: " * 5_000, "- a\n", "words\n", "a: !!python/object:os.x {}\n",
        "a: \xff\x00\n", "x" * 2_000_000, "a: " + "9" * 5_000, "a: 1\na: 2\n", "? [1, 2]\n: 3\n",
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_an_error_at_once(text, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode("latin-1"))
    began = time.process_time()
    with pytest.raises(ConfigError, match="a.yaml") as raised:
        load_config(config_file=file)
    assert time.process_time() - began < 5
    assert "\n" not in str(raised.value)


def test_an_alias_that_is_no_bomb_is_read(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {b: 1, c: [2]}\nd:\n  <<: *a\n  b: 3\ne: *a\nf: ${d.b}\n")
    found = OmegaConf.to_container(read_yaml(tmp_path / "a.yaml"))
    assert found == {"a": {"b": 1, "c": [2]}, "d": {"b": 3, "c": [2]}, "e": {"b": 1, "c": [2]}, "f": "${d.b}"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_characters="$")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner, max_size=3),
    max_leaves=20,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), VALUES, max_size=4))
def test_what_omegaconf_writes_is_read_back(tmp_path_factory, values):
    file = tmp_path_factory.mktemp("yaml") / "a.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    assert OmegaConf.to_container(read_yaml(file)) == OmegaConf.to_container(OmegaConf.load(file))
