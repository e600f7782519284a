from dataclasses import dataclass, field

import pytest

from lockstep.config import load_config
from lockstep.config.load import with_changes
from lockstep.config.resume import check_resumable, kept_values
from lockstep.errors import ConfigError

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
