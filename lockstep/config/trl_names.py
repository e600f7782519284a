"""Fields of TRL's configurations, and how the keys end that do the same here (docs/from_trl.md): for the error that an unknown key is.

By spelling alone `max_completion_length` would be nearest to the longest prompt, and `num_generations` to what an agent observes.
"""

TRL_NAMES = {
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "model_name_or_path": "model.path",
    "reward_funcs": "reward.custom_reward_function.path",
    "reward_weights": "reward.weights",
    "num_generations": "rollout.n",
    "per_device_train_batch_size": "data.train_batch_size",
    "gradient_accumulation_steps": "data.train_batch_size",
    "steps_per_generation": "actor.ppo_mini_batch_size",
    "num_iterations": "actor.ppo_epochs",
    "max_completion_length": "data.max_response_length",
    "beta": "actor.kl_loss_coef",
    "epsilon": "actor.clip_ratio_low",
    "epsilon_high": "actor.clip_ratio_high",
    "delta": "actor.clip_ratio_c",
    "loss_type": "actor.loss_agg_mode loss.loss_mode",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "importance_sampling_level": "actor.policy_loss.loss_mode",
    "mask_truncated_completions": "reward.overlong_buffer.enable",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "use_vllm": "rollout.name",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip_grad",
    "warmup_ratio": "optim.lr_warmup_steps_ratio",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.default_local_dir",
    "report_to": "trainer.logger",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "bf16": "fsdp_config.dtype",
    "assistant_only_loss": "data.train_on",
    "completion_only_loss": "data.train_on",
}
"""Field -> the end of the key, which recipes have under sections of their own; two where it is another key in another recipe."""

NOTHING_LIKE = {
    "packing": "rows are always packed, and never see each other",
    "padding_free": "rows are always packed without padding",
    "logging_steps": "every step is logged",
    "logging_strategy": "every step is logged",
    "dataset_text_field": "sft reads the column `text`, or conversations and completions: rename your column",
    "precompute_ref_log_probs": "the reference's log-probs are computed in each step",
    "remove_unused_columns": "columns that nothing reads are left alone",
    "dataloader_num_workers": "rows are read while the device computes, without processes of their own",
}
"""Field -> why it has no key here."""
