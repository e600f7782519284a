"""An estimator and a loss of the user's own, from a file, train in one process and in Ray's alike."""

import pytest
from helpers.run import roles, train

from lockstep.algorithms.policy_losses import POLICY_LOSSES
from lockstep.single_controller.ray import RayWorkerGroup

FILE = '''
from lockstep.algorithms.masking import masked_mean, zero_outside
from lockstep.algorithms.policy_losses import register_policy_loss


def to_go(*, token_level_rewards, response_mask, reward_scale=3.0):
    returns = zero_outside(token_level_rewards.flip(1).cumsum(1).flip(1), response_mask) * reward_scale
    return returns, returns


def mean_advantage(*, advantages, response_mask):
    """The mean of the whole mini-batch, which one micro-batch cannot know."""
    return {"centre": masked_mean(advantages, response_mask).expand(advantages.shape)}


@register_policy_loss("centred", prepare=mean_advantage)
def centred(*, old_log_prob, log_prob, advantages, response_mask, centre, slope):
    ratio = zero_outside(log_prob - old_log_prob, response_mask).exp()
    return -slope * zero_outside(advantages - centre, response_mask) * ratio, {"centre": zero_outside(centre, response_mask)}
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file for all tests: a second one of the same text would register the same name again."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(FILE)
    yield folder
    POLICY_LOSSES.pop("centred", None)


@pytest.fixture
def config(embedded_config, folder, monkeypatch):
    """The file is named by a relative path, which a worker in another folder could not find."""
    monkeypatch.chdir(folder)
    return lambda *more: embedded_config(
        "trainer.total_training_steps=2", "trainer.val_before_train=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3", "algorithm.adv_estimator=mine.py:to_go",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine.py:centred",
        "actor_rollout_ref.actor.policy_loss.loss_kwargs={slope: 0.5}", *more,
    )  # fmt: skip


@pytest.fixture
def local(config, tmp_path):
    return train(
        config(f"trainer.default_local_dir={tmp_path / 'local'}"), {"global_pool": [1]}, roles("ActorRollout", "RefPolicy")
    )


def test_a_users_estimator_and_loss_train_in_one_process(local):
    assert len(local) == 2
    for row in local:
        assert row["actor/grad_norm"] > 0
        # The loss's own metric is the mean that its prepare took over each mini-batch.
        assert row["actor/centre"] == pytest.approx(row["critic/advantages/mean"], abs=0.5)


@pytest.mark.ray
def test_two_ranks_of_ray_do_the_same_training(ray_cluster, local, config):
    metrics = train(config(), {"global_pool": [2]}, roles("ActorRollout", "RefPolicy"), RayWorkerGroup)
    for row, reference in zip(metrics, local, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/centre", "critic/score/mean"):
            assert row[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-6), name
