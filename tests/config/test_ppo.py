"""Every check that the configuration makes, and the values that it derives."""

import re
from pathlib import Path

import pytest
from helpers.errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lockstep.config.load import as_config
from lockstep.config.ppo import PPOConfig, describe
from lockstep.config.trainer import TrainerConfig
from lockstep.errors import ConfigError
from lockstep.trainer.ppo.stages import cut_mini_batches

MINE = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def load(*overrides):
    return as_config(OmegaConf.from_dotlist([*MINE, *overrides]))


def test_the_defaults_are_a_valid_configuration():
    assert PPOConfig().use_critic
    assert not PPOConfig().use_reference
    assert not PPOConfig().needs_ray


BATCH = "data.train_batch_size=64"
LENGTHS = ("data.max_prompt_length=512", "data.max_response_length=512")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["actor_rollout_ref.model.path=null"], ["actor_rollout_ref.model.path"]),
        (["data.train_files=null"], ["data.train_files"]),
        (["data.train_files=[]"], ["data.train_files"]),
        (["actor_rollout_ref.model.path=embedded"], ["data.train_files=train.parquet", "actor_rollout_ref.model.path"]),
        (["reward_model.enable=true"], ["reward_model.enable", "reward_model.model.path"]),
        (["data.custom_cls.path=mine.py"], ["data.custom_cls.path", "data.custom_cls.name"]),
        (["data.custom_cls.name=Mine"], ["data.custom_cls.path", "data.custom_cls.name"]),
        ([BATCH, f"{ACTOR}.ppo_mini_batch_size=48"], ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=48"]),
        ([BATCH, "critic.ppo_mini_batch_size=128"], ["data.train_batch_size=64", "critic.ppo_mini_batch_size=128"]),
        (
            [*LENGTHS, f"{ACTOR}.ppo_max_token_len_per_gpu=1023"],
            [f"{ACTOR}.ppo_max_token_len_per_gpu=1023", "data.max_prompt_length", "data.max_response_length", "1024"],
        ),
        (
            [*LENGTHS, "critic.ppo_max_token_len_per_gpu=1023"],
            ["critic.ppo_max_token_len_per_gpu=1023", "data.max_prompt_length + data.max_response_length = 1024"],
        ),
        (
            [*LENGTHS, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=7"],
            ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=7", "data.max_response_length"],
        ),
        (["critic.enable=false"], ["algorithm.adv_estimator=gae", "critic.enable"]),
        (
            ["algorithm.use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=true"],
            ["algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"],
        ),
        ([f"{ROLLOUT}.temperature=0"], [f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.val_kwargs.temperature"]),
        (
            ["trainer.critic_warmup=2", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"],
            ["trainer.critic_warmup=2", "algorithm.adv_estimator=grpo"],
        ),
        (
            ["trainer.worker_group=local", "trainer.n_gpus_per_node=2"],
            ["trainer.worker_group=local", "trainer.n_gpus_per_node=2", "trainer.nnodes=1", "trainer.worker_group=ray"],
        ),
        (["trainer.worker_group=local", "critic.enable_resource_pool=true"], ["critic.enable_resource_pool=True"]),
        (
            ["trainer.resume_mode=resume_path"],
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path"],
        ),
        (["trainer.resume_from_path=x"], ["trainer.resume_from_path", "trainer.resume_mode=auto"]),
        (
            ["actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.strategy=megatron"],
            ["actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.strategy=fsdp2 or fsdp, not megatron"],
        ),
        (
            ["critic.model.lora_rank=8", "critic.fsdp_config.tensor_parallel_size=2"],
            ["critic.model.lora_rank=8", "critic.fsdp_config.tensor_parallel_size=2"],
        ),
        (
            [*LENGTHS, "reward.overlong_buffer={enable: true, len: 513}"],
            ["reward.overlong_buffer.len=513", "data.max_response_length=512", "reward.overlong_buffer.enable=false"],
        ),
        (
            ["actor_rollout_ref.ref.param_offload=true", f"{ACTOR}.strategy=megatron"],
            ["actor_rollout_ref.ref.param_offload=true", f"{ACTOR}.strategy=fsdp2 or fsdp, not megatron"],
        ),
    ],
)
def test_keys_that_cannot_work_together_are_an_error_that_names_them(overrides, named):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert [key for key in named if key not in str(caught.value)] == []


@pytest.mark.parametrize(("horizon", "works"), [(102, False), (103, True)])
def test_an_adaptive_kl_weight_needs_a_horizon_that_one_step_cannot_use_up(horizon, works):
    overrides = [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        BATCH,
        f"algorithm.kl_ctrl.horizon={horizon}",
        f"{ROLLOUT}.n=8",  # 0.2 * 64 prompts * 8 samples = 102.4
    ]
    if works:
        load(*overrides)
        return
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    for part in ("algorithm.kl_ctrl.horizon=102", "data.train_batch_size", f"{ROLLOUT}.n", "512 rows", "above 102.4"):
        assert part in str(caught.value)
    load(*overrides[1:])  # the weight is not used
    load(*(o.replace("adaptive", "fixed") for o in overrides))


@pytest.mark.parametrize(
    "keys",
    [
        ("strategy=fsdp2", "fsdp_config.ulysses_sequence_parallel_size=2"),
        ("strategy=veomni", "veomni.ulysses_parallel_size=2"),
    ],
)
def test_ranks_that_divide_a_row_hold_it_together(keys):
    """A row of 1024 tokens at most, two ranks."""
    overrides = [*LENGTHS, "trainer.n_gpus_per_node=2", *(f"{ACTOR}.{key}" for key in keys)]
    load(*overrides, f"{ACTOR}.ppo_max_token_len_per_gpu=512", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=512")
    with raises(ConfigError, f"{ACTOR}.ppo_max_token_len_per_gpu"):
        load(*overrides, f"{ACTOR}.ppo_max_token_len_per_gpu=511")


def test_what_a_run_does_not_have_is_not_checked():
    """A critic's token budget must not stop a run without a critic."""
    load(
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=2",
        "data.max_response_length=40000",
        f"{ACTOR}.ppo_max_token_len_per_gpu=65536",
        "critic.ppo_mini_batch_size=48",
    )
    load("trainer.worker_group=local", "reward_model.enable_resource_pool=true", "reward_model.enable=false")


ONE_OF = {
    "data.truncation": "error, left, right, middle",
    f"{ACTOR}.strategy": "fsdp, fsdp2, megatron, torchtitan, veomni",
    "critic.strategy": "fsdp, fsdp2, megatron, torchtitan, veomni",
    "reward_model.strategy": "fsdp, fsdp2, megatron, torchtitan, veomni",
    f"{ROLLOUT}.name": "native, hf, vllm, sglang",
    "algorithm.kl_ctrl.type": "fixed, adaptive",
    "trainer.device": "auto, cpu, cuda",
    "trainer.worker_group": "auto, local, ray",
    "trainer.resume_mode": "auto, disable, resume_path",
    f"{ACTOR}.optim.lr_scheduler_type": "constant, cosine",
    "critic.fsdp_config.dtype": "auto, float32, bfloat16",
}


@pytest.mark.parametrize("key", ONE_OF)
def test_a_name_that_is_not_known_is_an_error_that_lists_the_names(key):
    with raises(ConfigError, key) as error:
        load(f"{key}=nothing")
    assert ONE_OF[key] in str(error.value)


TOO_SMALL = {
    **dict.fromkeys(["data.max_prompt_length", "data.max_response_length", "data.train_batch_size", "data.val_batch_size"], 0),
    **dict.fromkeys(
        [
            f"{section}.{name}"
            for section in (ACTOR, "critic")
            for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "ppo_epochs")
        ],
        0,
    ),
    **dict.fromkeys([f"{s}.{name}" for s in ("trainer", "critic", "reward_model") for name in ("n_gpus_per_node", "nnodes")], 0),
    **dict.fromkeys([f"trainer.{name}" for name in ("total_epochs", "total_training_steps", "max_ckpt_to_keep")], 0),
    **dict.fromkeys([f"trainer.{name}" for name in ("test_freq", "save_freq")], -2),
    **dict.fromkeys([f"reward_model.{name}" for name in ("micro_batch_size_per_gpu", "max_token_len_per_gpu")], 0),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 0,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 0,
    f"{ACTOR}.clip_ratio_c": 0.5,
    **{f"{section}.optim.{name}": -1.0 for section in (ACTOR, "critic") for name in ("lr", "clip_grad", "weight_decay")},
    **{f"{section}.model.lora_alpha": 0 for section in ("actor_rollout_ref", "critic", "reward_model")},
    **{f"{ACTOR}.{name}": -1.0 for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef")},
    f"{ACTOR}.policy_loss.ppo_kl_coef": -1.0,
    f"{ACTOR}.torchtitan.tensor_parallel_size": 0,
    "critic.cliprange_value": -1.0,
    "algorithm.kl_ctrl.kl_coef": -1.0,
    f"{ROLLOUT}.temperature": -1.0,
    f"{ROLLOUT}.top_k": 0,
    f"{ROLLOUT}.n": 0,
    f"{ROLLOUT}.max_num_seqs": 0,
    f"{ROLLOUT}.exactness_bound": -1.0,
    f"{ROLLOUT}.val_kwargs.temperature": -1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -2,
    f"{ROLLOUT}.val_kwargs.n": 0,
    "algorithm.kl_ctrl.horizon": 0,
    "reward.timeout_s": 0.0,
}


@pytest.mark.parametrize("key", TOO_SMALL)
def test_a_number_that_is_too_small_is_an_error_that_says_the_least(key):
    with raises(ConfigError, key):
        load(f"{key}={TOO_SMALL[key]}")


NOT_ABOVE_ZERO = [
    *(f"{ACTOR}.{name}" for name in ("tau_pos", "tau_neg", "loss_scale_factor")),
    *(f"{ACTOR}.policy_loss.{name}" for name in ("clip_cov_ratio", "kl_cov_ratio", "dro_beta")),
    "algorithm.kl_ctrl.target_kl",
]


@pytest.mark.parametrize("key", NOT_ABOVE_ZERO)
@pytest.mark.parametrize("value", [0.0, -1.0, "nan"])
def test_a_number_that_must_be_above_zero_is_an_error_that_says_so(key, value):
    with raises(ConfigError, key):
        load(f"{key}={value}")


@pytest.mark.parametrize(
    "override", [f"{ACTOR}.policy_loss.kl_cov_ratio=2", f"{ACTOR}.policy_loss.clip_cov_lb=9", f"{ROLLOUT}.stop=['']"]
)
def test_other_values_that_cannot_work_are_an_error_with_the_whole_key(override):
    with raises(ConfigError, override.partition("=")[0]):
        load(override)


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.gamma",
        "algorithm.lam",
        f"{ROLLOUT}.top_p",
        f"{ROLLOUT}.val_kwargs.top_p",
        "critic.optim.min_lr_ratio",
        "critic.optim.lr_warmup_steps_ratio",
    ],
)
@pytest.mark.parametrize("value", [-0.1, 1.1, "nan"])
def test_a_share_outside_zero_to_one_is_an_error(key, value):
    with raises(ConfigError, key):
        load(f"{key}={value}")


@pytest.mark.parametrize("betas", ["[0.9]", "[0.9,0.99,0.999]", "[0.9,1.0]"])
def test_adamw_takes_two_betas_below_one(betas):
    with raises(ConfigError, "critic.optim.betas"):
        load(f"critic.optim.betas={betas}")


def test_derived_values_fall_back_as_their_keys_say():
    config = load("data.train_batch_size=32", f"{ACTOR}.ppo_epochs=3")
    assert (config.actor_mini_batch_prompts, config.critic_mini_batch_prompts, config.critic_epochs) == (32, 32, 3)
    assert (config.data_seed, config.actor_rollout_ref.actor.clip_low, config.actor_rollout_ref.actor.clip_high) == (0, 0.2, 0.2)
    config = load(
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.clip_ratio_low=0.0",
        "critic.ppo_epochs=2",
        "data.seed=4",
    )
    assert (config.actor_mini_batch_prompts, config.critic_mini_batch_prompts, config.critic_epochs) == (16, 16, 2)
    assert (config.data_seed, config.actor_rollout_ref.actor.clip_low, config.actor_rollout_ref.actor.clip_high) == (4, 0.0, 0.28)
    assert load(f"{ACTOR}.ppo_mini_batch_size=16", "critic.ppo_mini_batch_size=8").critic_mini_batch_prompts == 8


@pytest.mark.parametrize(
    ("overrides", "critic", "reference", "ray"),
    [
        (["algorithm.use_kl_in_reward=true"], True, True, False),
        ([f"{ACTOR}.use_kl_loss=true", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"], False, True, False),
        (["critic.enable=true", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"], True, False, False),
        (["trainer.nnodes=2"], True, False, True),
        (["critic.enable_resource_pool=true"], True, False, True),
        (["critic.enable_resource_pool=true", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"], False, False, False),
        (["reward_model.enable_resource_pool=true", "reward_model.enable=true", "reward_model.model.path=rm"], True, False, True),
    ],
)
def test_what_a_run_consists_of_follows_from_the_config(overrides, critic, reference, ray):
    config = load(*overrides)
    assert (config.use_critic, config.use_reference, config.needs_ray) == (critic, reference, ray)


def test_the_run_folder_is_named_after_project_and_experiment_unless_given():
    assert TrainerConfig(project_name="p", experiment_name="e").run_dir == Path("checkpoints/p/e")
    assert TrainerConfig(default_local_dir="elsewhere").run_dir == Path("elsewhere")


def test_numbers_that_may_be_auto_are_auto_or_numbers() -> None:
    config = load(f"{ROLLOUT}.max_num_seqs=77", f"{ROLLOUT}.gpu_memory_utilization=1", f"{ACTOR}.ppo_max_token_len_per_gpu=4096")
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (rollout.seats, rollout.cache_share, actor.max_tokens) == (77, 1, 4096)
    plain = load().actor_rollout_ref
    assert (plain.rollout.max_num_seqs, plain.rollout.seats, plain.rollout.pass_tokens) == ("auto", 256, 8192)
    assert (plain.actor.ppo_max_token_len_per_gpu, plain.actor.max_tokens) == ("auto", 2048)
    for key in (f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.gpu_memory_utilization", f"{ACTOR}.ppo_max_token_len_per_gpu"):
        with raises(ConfigError, key):
            load(f"{key}=many")
    with raises(ConfigError, f"{ROLLOUT}.max_num_seqs"):
        load(f"{ROLLOUT}.max_num_seqs=2.5")


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
