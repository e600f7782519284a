import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.arithmetic import describe
from lockstep.config.load import as_config
from lockstep.trainer.ppo.stages import cut_mini_batches


def config_of(batch, n, actor_mini, critic_mini, epochs, **trainer):
    return as_config(
        {
            "data": {"train_batch_size": batch},
            "actor_rollout_ref": {"rollout": {"n": n}, "actor": {"ppo_mini_batch_size": actor_mini, "ppo_epochs": epochs}},
            "critic": {"ppo_mini_batch_size": critic_mini},
            "trainer": trainer,
        }
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    mini=st.integers(1, 4),
    parts=st.integers(1, 4),
    n=st.integers(1, 4),
    epochs=st.integers(1, 3),
    critic=st.none() | st.integers(1, 3),
    prompts=st.integers(16, 99),
)
def test_the_numbers_it_prints_are_the_numbers_that_are_trained(mini, parts, n, epochs, critic, prompts):
    batch = mini * parts
    critic_mini = critic if critic is not None and batch % critic == 0 else None
    config = config_of(batch, n, mini, critic_mini, epochs)
    text = describe(config, prompts, total_steps=7, device="cpu")
    for who, size in (("actor", config.actor_mini_batch_prompts), ("critic", config.critic_mini_batch_prompts)):
        cuts = cut_mini_batches(batch, n, size, epochs, seed=None)
        found = re.search(
            rf"the {who} makes (\d+) optimizer steps? a step.*, each on (\d+) prompts x (\d+) = (\d+) responses", text
        )
        assert found is not None
        steps, per_step, samples, responses = map(int, found.groups())
        assert (steps, responses) == (len(cuts), len(cuts[0]))
        assert (per_step, samples) == (size, n)
    assert f"{batch} prompts x {n} samples = {batch * n} responses" in text
    assert f"{prompts} training prompts, {batch} a step: {prompts // batch} steps an epoch, 7 steps in all" in text


@pytest.mark.parametrize(
    ("device", "processes", "expected"),
    [("cpu", 1, "on 1 CPU process,"), ("cuda", 1, "on 1 GPU,"), ("cpu", 2, "on 2 CPU processes,"), ("cuda", 8, "on 8 GPUs,")],
)
def test_it_says_where_the_run_happens(device, processes, expected):
    config = config_of(4, 1, 4, 4, 1, n_gpus_per_node=processes, default_local_dir="runs/mine")
    text = describe(config, 64, 1, device)
    assert expected in text
    assert "runs/mine" in text
    assert "at most as many tokens as the plan chose at once" in text


def test_it_leaves_out_a_critic_that_is_not_there():
    config = as_config({"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"rollout": {"n": 2}}})
    assert "critic" not in describe(config, 64, 1, "cpu")
