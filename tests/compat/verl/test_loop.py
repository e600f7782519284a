"""A trainer class of verl's with its own `fit` runs with only its imports renamed, and trains as Lockstep's own loop does."""

from collections import defaultdict
from copy import deepcopy
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers.run import CLASSES, read_metrics, roles, train
from omegaconf import OmegaConf

from lockstep.compat.verl import RayPPOTrainer, TaskRunner, run_ppo
from lockstep.compat.verl.loop import VerlTrainer
from lockstep.compat.verl_keys.command import our_config
from lockstep.errors import ConfigError
from lockstep.protocol import DataProto
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.main_ppo import create_rl_sampler
from lockstep.trainer.ppo import ray_trainer
from lockstep.trainer.ppo.core_algos import agg_loss
from lockstep.trainer.ppo.ray_trainer import (
    AdvantageEstimator,
    ResourcePoolManager,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from lockstep.trainer.role import Role
from lockstep.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.reward_manager import DAPORewardManager, get_reward_manager_cls

# isort: split
# verl's modules, which exist after the import of lockstep.compat.verl.
from lockstep.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from lockstep.trainer.ppo.reward import extract_reward
from lockstep.utils.metric import reduce_metrics
from lockstep.utils.profiler import marked_timer
from lockstep.utils.tracking import Tracking

POOL = {"global_pool": [1]}
EVERYTHING = (
    "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=0",
    "trainer.save_freq=0", "actor_rollout_ref.rollout.exactness_bound=0",
)  # fmt: skip


class Moved(RayPPOTrainer):
    """A loop as verl's recipes write it; `asks_rewards` as before 0.8, where the loop itself calls the reward function."""

    asks_rewards = False

    def fit(self):
        self.logger = Tracking(
            project_name="p", experiment_name="e", default_backend=[], config=OmegaConf.to_container(self.config, resolve=True)
        )
        self.global_steps = 0
        self._load_checkpoint()
        self.global_steps += 1
        for _ in range(self.config.trainer.total_epochs):
            for batch_dict in self.train_dataloader:
                metrics, timing_raw = {}, defaultdict(float)
                with marked_timer("step", timing_raw):
                    batch = self._collect(DataProto.from_single_dict(batch_dict), metrics, timing_raw)
                    self._learn(batch, metrics, timing_raw)
                metrics |= compute_data_metrics(batch=batch, use_critic=self.use_critic)
                metrics |= compute_timing_metrics(batch=batch, timing_raw=timing_raw)
                devices = self.resource_pool_manager.get_n_gpus()
                metrics |= compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=devices)
                self.logger.log(data=metrics, step=self.global_steps)
                if self.config.trainer.save_freq > 0:
                    self._save_checkpoint()
                if self.global_steps >= self.total_training_steps:
                    return
                self.global_steps += 1

    def _collect(self, batch, metrics, timing_raw):
        n = self.config.actor_rollout_ref.rollout.n
        if self.asks_rewards:
            gen_batch = batch.pop(["input_ids", "attention_mask", "position_ids"], ["raw_prompt_ids"])
            output = self.actor_rollout_wg.generate_sequences(gen_batch)
        else:
            gen_batch = self._get_gen_batch(batch)
            output = self.async_rollout_manager.generate_sequences(gen_batch.repeat(repeat_times=n, interleave=True))
        timing_raw.update(output.meta_info.pop("timing"))
        if self.config.algorithm.adv_estimator == AdvantageEstimator.REMAX:
            greedy = deepcopy(gen_batch)
            greedy.meta_info["do_sample"] = False
            baseline = self.async_rollout_manager.generate_sequences(greedy)
            batch = batch.union(baseline)
            scores, _ = extract_reward(batch)
            batch.pop(batch_keys=list(baseline.batch.keys()))
            batch.batch["reward_baselines"] = scores.sum(dim=-1)
        batch.non_tensor_batch["uid"] = np.array([str(i) for i in range(len(batch.batch))], dtype=object)
        batch = batch.repeat(repeat_times=n, interleave=True).union(output)
        if self.asks_rewards:
            result = self.reward_fn(batch, return_dict=True)
            scores, extra = result["reward_tensor"], result["reward_extra_info"]
        else:
            scores, extra = extract_reward(batch)
        batch.batch["token_level_scores"] = scores
        batch.non_tensor_batch.update({name: np.array(values) for name, values in extra.items()})
        halves = batch[: len(batch) // 2], batch[list(range(len(batch) // 2, len(batch)))]
        batch = DataProto.concat(list(halves))
        self._balance_batch(batch, metrics=metrics)
        batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
        return batch

    def _learn(self, batch, metrics, timing_raw):
        algorithm, actor = self.config.algorithm, self.config.actor_rollout_ref.actor
        batch.batch["response_mask"] = compute_response_mask(batch)
        old = self.actor_rollout_wg.compute_log_prob(batch)
        entropy = old.batch.pop("entropys")
        metrics["actor/entropy"] = agg_loss(entropy, batch.batch["response_mask"], actor.loss_agg_mode).item()
        batch.union(old)
        if self.use_reference_policy:
            batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
        if self.use_critic:
            batch.union(self.critic_wg.compute_values(batch))
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        if algorithm.use_kl_in_reward:
            _, told = apply_kl_penalty(batch, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=algorithm.kl_penalty)
            metrics |= told
        compute_advantage(batch, adv_estimator=algorithm.adv_estimator, gamma=algorithm.gamma, lam=algorithm.lam,
                          norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True))  # fmt: skip
        if self.use_critic:
            metrics |= reduce_metrics(self.critic_wg.update_critic(batch).meta_info["metrics"])
        metrics |= reduce_metrics(self.actor_rollout_wg.update_actor(batch).meta_info["metrics"])
        assert not hasattr(self.actor_rollout_wg, "async_calls_finalize_fn_exec")


def make(cls, config, **more):
    """The trainer as verl's main makes it, with keys that only verl has."""
    given = OmegaConf.create(asdict(config))
    given.trainer.balance_batch, given.actor_rollout_ref.actor.use_dynamic_bsz = True, True
    names = ("ActorRollout", "Critic", "RefPolicy")
    return cls(
        config=given,
        tokenizer=hf_tokenizer(str(config.actor_rollout_ref.model.path)),
        processor=None,
        role_worker_mapping={Role[name]: CLASSES[name] for name in names},
        resource_pool_manager=ResourcePoolManager(resource_pool_spec=POOL, mapping={Role[name]: "global_pool" for name in names}),
        ray_worker_group_cls=LocalWorkerGroup,
        device_name="cpu",
        **more,
    )


def fit(trainer):
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.inner.close()
    return read_metrics(trainer.inner.config)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true", "algorithm.use_kl_in_reward=false"),
        ("algorithm.adv_estimator=gae",),
        ("algorithm.adv_estimator=remax",),
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
         "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.1", "actor_rollout_ref.actor.ppo_epochs=2"),
    ],
)  # fmt: skip
def test_a_loop_of_its_own_trains_as_lockstep_does(overrides, embedded_config_in, tmp_path):
    overrides = (*EVERYTHING, "trainer.critic_warmup=0", *overrides)
    ours = train(embedded_config_in(tmp_path / "ours", *overrides), POOL, roles("ActorRollout", "Critic", "RefPolicy"))
    moved = fit(make(Moved, embedded_config_in(tmp_path / "moved", *overrides)))
    assert [row["step"] for row in moved] == [row["step"] for row in ours] == [1, 2]
    compared = {"actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "critic/advantages/max", "critic/vf_loss",
                "actor/kl_loss", "actor/reward_kl_penalty", "response_length/mean"}  # fmt: skip
    for theirs, row in zip(moved, ours, strict=True):
        for name in compared & row.keys():
            assert theirs[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), (row["step"], name)


def test_a_loop_that_asks_for_rewards_itself_resumes_where_it_was(embedded_config_in, tmp_path):
    overrides = (*EVERYTHING, "algorithm.adv_estimator=grpo", "trainer.save_freq=1", "trainer.total_training_steps=")
    overlong = OmegaConf.create({"enable": True, "len": 8, "penalty_factor": 2.0, "log": True})

    class Old(Moved):
        asks_rewards = True

        def fit(self):
            super().fit()

    def run(folder, steps):
        config = embedded_config_in(tmp_path / folder, *overrides[:-1], overrides[-1] + str(steps))
        tokenizer = hf_tokenizer(str(config.actor_rollout_ref.model.path))
        judges = [
            DAPORewardManager(
                tokenizer=tokenizer, num_examine=0, compute_score=None, reward_fn_key="data_source", max_resp_len=12,
                overlong_buffer_cfg=overlong, num_workers=1,
            )
            for _ in range(2)
        ]  # fmt: skip
        return fit(make(Old, config, reward_fn=judges[0], val_reward_fn=judges[1]))

    whole, first, rest = run("whole", 2), run("halves", 1), run("halves", 2)
    assert [row["step"] for row in rest] == [1, 2]
    assert rest[1]["actor/pg_loss"] == pytest.approx(whole[1]["actor/pg_loss"], rel=1e-5)
    assert first[0]["critic/score/mean"] == whole[0]["critic/score/mean"]
    assert whole[0]["critic/score/min"] < 0  # nothing but the penalty is negative


def entropy_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, concurrent_semaphore=None):
    """A recipe's own reward, with the arguments of verl's."""
    return {"score": float(solution_str[:1] == str(ground_truth)[:1]), "acc": solution_str == ground_truth}


class Entropy(Moved):
    """The recipe `entropy`: rewards from a manager and a function of its own, batches filled up with prompts whose samples differ."""

    def fit(self):
        self.logger = Tracking("p", "e", [], OmegaConf.to_container(self.config, resolve=True))
        self.asks_rewards, self.global_steps, kept, self.generated = True, 1, None, 0
        for batch_dict in self.train_dataloader:
            metrics, timing_raw = {}, defaultdict(float)
            batch, self.generated = self._collect(DataProto.from_single_dict(batch_dict), metrics, timing_raw), self.generated + 1
            batch.meta_info.pop("global_token_num")  # of these rows, not of those that are kept
            scores = batch.batch["token_level_scores"].sum(dim=-1).tolist()
            groups = defaultdict(list)
            for uid, score in zip(batch.non_tensor_batch["uid"], scores, strict=True):
                groups[uid].append(score)
            rows = [i for i, uid in enumerate(batch.non_tensor_batch["uid"]) if np.std(groups[uid]) > 0]
            kept = batch[rows] if kept is None else DataProto.concat([kept, batch[rows]])
            wanted = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
            if len(kept) < wanted:
                continue
            self.trained, kept = kept[:wanted], None
            self._learn(self.trained, metrics, timing_raw)
            metrics |= compute_data_metrics(batch=self.trained, use_critic=self.use_critic)
            self.logger.log(data=metrics, step=self.global_steps)
            return


def test_the_recipe_entropy_moves_with_its_imports_renamed(embedded_config_in, tmp_path):
    config = embedded_config_in(
        tmp_path, *EVERYTHING, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
    )  # fmt: skip
    manager = get_reward_manager_cls("dapo")
    overlong = OmegaConf.create({"enable": False, "len": 0, "penalty_factor": 0.0, "log": False})
    named = {
        "tokenizer": hf_tokenizer(str(config.actor_rollout_ref.model.path)),
        "reward_fn_key": "data_source",
        "max_resp_len": 12,
    }
    judges = [
        manager(num_examine=i, compute_score=entropy_score, overlong_buffer_cfg=overlong, num_workers=1, **named) for i in (0, 1)
    ]
    train = RLHFDataset(data_files=config.data.train_files, tokenizer=named["tokenizer"], processor=None, config=config.data)
    trainer = make(
        Entropy, config, reward_fn=judges[0], val_reward_fn=judges[1], train_dataset=train, collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, train),
    )  # fmt: skip
    (row,) = fit(trainer)
    scores = trainer.trained.batch["token_level_scores"].sum(-1).view(4, 4)
    assert trainer.generated > 1
    assert (scores.std(dim=1) > 0).all()
    assert row["critic/score/mean"] == pytest.approx(scores.mean().item())
    assert row["actor/grad_norm"] > 0


class Runner(TaskRunner):
    """A recipe's main."""

    def run(self, config):
        worker, group = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, worker)
        self.pools, self.config, seen[:] = self.init_resource_pool_mgr(config), config, [self]
        self.group = group


seen: list = []


def test_a_main_builds_on_ppo_trainer_and_runs_its_own_task_runner(tmp_path):
    hydra = pytest.importorskip("hydra")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "data: {gen_batch_size: '${data.train_batch_size}'}\n"
        "reward_model: {reward_manager: dapo, overlong_buffer: {enable: false, len: 0, penalty_factor: 0.0, log: false}}\n"
        "trainer: {project_name: mine}\n"
    )
    given = ["data.train_batch_size=4", "trainer.n_gpus_per_node=1", "actor_rollout_ref.model.use_liger=true", "data.val_files=b.parquet",
             "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.train_files=a.parquet", "actor_rollout_ref.model.path=m"]  # fmt: skip
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        config = hydra.compose("mine", overrides=given)
        refused = hydra.compose("mine", overrides=[*given, "actor_rollout_ref.rollout.skip_rollout=true"])
    run_ppo(config, task_runner_class=Runner)
    (runner,) = seen
    assert config.data.gen_batch_size == 4
    assert config.global_profiler.steps is None
    assert runner.group is LocalWorkerGroup
    assert set(runner.role_worker_mapping) == {Role.ActorRollout, Role.Critic, Role.RefPolicy}
    assert runner.pools.resource_pool_spec == {"global_pool": [1]}
    assert our_config(config).trainer.run_dir.parts[-2:] == ("mine", "gsm8k")
    with pytest.raises(ConfigError, match="skip_rollout"):
        run_ppo(refused, task_runner_class=Runner)


def test_a_class_has_the_base_that_it_names():
    class Ours(ray_trainer.RayPPOTrainer):
        def fit(self):
            return {}

    assert Ours.__bases__ == (ray_trainer.RayPPOTrainer,)
    assert not issubclass(Ours, VerlTrainer)
    assert RayPPOTrainer is VerlTrainer
    assert not issubclass(VerlTrainer, ray_trainer.RayPPOTrainer)
