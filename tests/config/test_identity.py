import dataclasses
import itertools
import re
from dataclasses import dataclass, field

import pytest
from helpers.errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.identity import check_resumable, kept_values, redacted
from lockstep.config.load import load_config, load_recipe, to_yaml, with_changes
from lockstep.config.sft import SFTConfig
from lockstep.config.trainer import RunConfig
from lockstep.errors import ConfigError

MODEL = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
KWARGS = "reward.custom_reward_function.reward_kwargs"


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setenv("MY_JUDGE", "plain-but-from-outside")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh12345678")
    return load_config([
        *MODEL,
        f"+{KWARGS}.url='https://me:hunter22@judge.example/v1?model=x&api_key=k12345'",
        f"+{KWARGS}.judge='${{oc.env:MY_JUDGE}}'",
        f"+{KWARGS}.header='Bearer hf_abcdefgh12345678'",
        f"+{KWARGS}.openai_api_key=sk-1234567",
        f"+{KWARGS}.max_tokens=77",
        "+ray_kwargs.ray_init.runtime_env.env_vars={WANDB: w4ndb-value, OMP_NUM_THREADS: '2'}",
    ])  # fmt: skip


SECRETS = ("plain-but-from-outside", "hunter22", "k12345", "hf_abcdefgh12345678", "sk-1234567", "w4ndb-value")


def test_nothing_secret_is_written_and_the_rest_is(config):
    values = redacted(dataclasses.asdict(config))
    written = (to_yaml(config), repr(values), repr(kept_values(config)))
    assert [(secret, i) for secret in SECRETS for i, text in enumerate(written) if secret in text] == []
    assert values["reward"]["custom_reward_function"]["reward_kwargs"] == {
        "url": "https://me:***@judge.example/v1?model=x&api_key=***",
        "judge": "${oc.env:MY_JUDGE}",
        "header": "Bearer ***",
        "openai_api_key": "***",
        "max_tokens": 77,
    }
    assert values["ray_kwargs"]["ray_init"] == {"runtime_env": {"env_vars": {"WANDB": "***", "OMP_NUM_THREADS": "***"}}}


def test_what_came_from_the_environment_reads_back(config, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(config_file=tmp_path / "config.yaml")
    assert again.reward.custom_reward_function.reward_kwargs["judge"] == "plain-but-from-outside"


def test_a_configuration_without_secrets_is_written_as_it_is():
    config = load_config([*MODEL, "trainer.logger=[console,wandb]"])
    assert redacted(dataclasses.asdict(config)) == dataclasses.asdict(config)


BASE = load_config(["data.train_files=a.parquet", "actor_rollout_ref.model.path=model"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.seed", 1),
        ("data.train_batch_size", 512),
        ("actor_rollout_ref.model.path", "other"),
        ("actor_rollout_ref.actor.optim.lr", 1e-5),
        ("actor_rollout_ref.actor.fsdp_config.dtype", "float32"),
        ("algorithm.adv_estimator", "grpo"),
        ("reward.functions", {"f": "file.py:f"}),
    ],
)
def test_what_changes_the_training_is_listed_with_both_values_and_asked_for(key, value):
    saved, present = kept_values(BASE), kept_values(with_changes(BASE, {key: value}))
    with pytest.raises(ConfigError) as raised:
        check_resumable(saved, present, [], "run/global_step_3")
    text = str(raised.value)
    assert text.startswith("run/global_step_3 was trained with other settings:")
    assert f"  {key}" in text
    asked = text.partition("trainer.allow_changes=[")[2].partition("]")[0].split(",")
    check_resumable(saved, present, asked, "run/global_step_3")
    check_resumable(saved, saved, [], "run/global_step_3")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.total_training_steps", 7),
        ("trainer.n_gpus_per_node", 2),
        ("critic.strategy", "fsdp"),
        ("critic.ppo_max_token_len_per_gpu", 5000),
        ("data.val_files", "b.parquet"),
        ("actor_rollout_ref.rollout.max_num_seqs", 8),
        ("reward.timeout_s", 3.0),
    ],
)
def test_how_long_where_and_how_fast_may_change(key, value):
    check_resumable(kept_values(BASE), kept_values(with_changes(BASE, {key: value})), [], "x")


def test_any_recipe_is_flattened_to_json():
    @dataclass
    class Inner:
        rate: float = 0.5
        names: tuple[str, ...] = ("a", "b")

    @dataclass
    class Recipe:
        inner: Inner = field(default_factory=Inner)
        extra: dict = field(default_factory=dict)

    assert kept_values(Recipe()) == {"inner.rate": 0.5, "inner.names": ["a", "b"], "extra": {}}


NAMED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=Org/Model-1B"]
CHOICES = {
    "algorithm.lam": (1.0, 0.9), "data.train_batch_size": (64, 32), "trainer.seed": (0, 1), "trainer.total_training_steps": ("null", 7),
    "trainer.save_freq": (-1, 5), "actor_rollout_ref.actor.optim.lr": (1e-6, 2e-6), "critic.strategy": ("fsdp2", "fsdp"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": (16384, 8192), "data.val_files": ("null", "val.parquet"),
}  # fmt: skip


def folder(*overrides, **options):
    return load_config([*NAMED, *overrides], **options).trainer.run_dir


@settings(max_examples=30, deadline=None)
@given(*(st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in CHOICES.items()}) for _ in range(2)))
def test_runs_meet_in_a_folder_if_and_only_if_one_may_go_on_from_the_other(one, other):
    first, second = (load_config([*NAMED, *(f"{key}={value}" for key, value in keys.items())]) for keys in (one, other))
    assert (first.trainer.run_dir == second.trainer.run_dir) == (kept_values(first) == kept_values(second))


def test_the_name_says_algorithm_and_model():
    assert re.fullmatch(r"checkpoints/lockstep/ppo-Model-1B-[0-9a-f]{8}", str(folder()))
    names = {name: folder(algorithm=name).name.split("-")[0] for name in ("grpo", "dapo", "gspo", "rloo")}
    assert names == {name: name for name in names}
    assert load_config().trainer.experiment_name.startswith("ppo-embedded-")
    own = folder("algorithm.adv_estimator='my/file.py:best'").name
    assert own.startswith("best-Model-1B-")


def test_a_model_of_a_run_is_called_after_the_run():
    config = load_recipe(SFTConfig, ["data.train_files=a.parquet", "model.path=runs/my run/global_step_7/actor"])
    assert config.trainer.experiment_name.startswith("sft-my_run-")


def test_a_name_that_was_given_stays_and_one_that_was_made_is_written_down(tmp_path):
    assert str(folder("trainer.experiment_name=mine")) == "checkpoints/lockstep/mine"
    config = load_config(NAMED)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(config_file=tmp_path / "config.yaml") == config
    data = dataclasses.replace(config.data, train_batch_size=8)
    assert dataclasses.replace(config, data=data).trainer.run_dir == config.trainer.run_dir  # a run that has begun keeps its folder


def test_a_value_of_the_environment_gives_the_same_name_each_time(monkeypatch):
    monkeypatch.setenv("ROWS_FILE", "rows_of_this_test_alone.parquet")
    name = "data.train_files='${oc.env:ROWS_FILE}'"
    assert folder(name) == folder(name)


@pytest.mark.parametrize(
    ("given_key", "samples", "expected"),
    [(None, 1, 8), (None, 4, 2), (None, 16, 1), (-1, 1, 100), (20, 2, 10), (500, 1, 100)],
)
def test_the_rows_of_the_first_validation_are_spread_evenly(given_key, samples, expected):
    rows = RunConfig(val_before_train_samples=given_key).first_validation_rows(100, samples, samples_per_step=8)
    assert len(rows) == expected
    assert len(set(rows)) == expected
    gaps = {b - a for a, b in itertools.pairwise(rows)}
    assert rows[0] == 0
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert max(rows) < 100


def test_a_validation_of_nothing_is_refused():
    with raises(ConfigError, "trainer.val_before_train_samples"):
        RunConfig(val_before_train_samples=0)
