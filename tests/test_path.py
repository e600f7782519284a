"""The path of a step is short: traced on a GRPO step of two mini-batches, in one process. docs/architecture.md says what for."""

import re
from pathlib import Path

import pytest
from helpers.run import make_trainer, roles
from helpers.trace import PACKAGE, trace

PAGE = Path(__file__).parents[1] / "docs/architecture.md"

MAX_FRAMES = 12
MINI_BATCHES = 2


@pytest.fixture(scope="module")
def steps(embedded_config_in, tmp_path_factory):
    """Two steps: the first computes old log-probs to compare them with the sampler's, the second does without."""
    config = embedded_config_in(
        tmp_path_factory.mktemp("path"),
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
    )
    trainer = make_trainer(config, {"global_pool": [1]}, roles("ActorRollout"))
    try:
        trainer.init_workers()
        with trace() as steps:
            trainer.fit()
    finally:
        trainer.close()
    first, second = steps
    return first, second


def test_the_formula_is_few_frames_below_fit(steps):
    for step in steps:
        assert 0 < len(step.path) <= MAX_FRAMES, step.report()


def test_rows_are_padded_at_most_once_and_never_unpadded(steps):
    for step in steps:
        assert step.pads <= 1, step.report()
        assert step.unpads == 0, step.report()


def test_rows_are_packed_once_per_micro_batch(steps):
    """Every mini-batch is one micro-batch here, and so is the pass for old log-probs."""
    first, second = steps
    assert first.packs == 1 + MINI_BATCHES, first.report()
    assert second.packs == MINI_BATCHES, second.report()


def test_the_account_of_one_row_names_every_file_of_a_step_and_no_other_than_there_is(steps):
    account = PAGE.read_text().split("## One row, from the file to the optimizer")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)", account))
    for step in steps:
        assert {file.removeprefix(PACKAGE) for file in step.files} - named == set()
    assert [file for file in named if not (Path(PACKAGE) / file).exists() and not (PAGE.parents[1] / file).exists()] == []
