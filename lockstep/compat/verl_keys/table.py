"""What becomes of verl's keys that Lockstep does not have under the same name and meaning. A `*` in a key stands for anything.

A key of Lockstep's is accepted, with the values that `VALUES` says. For other keys the longest entry of `RENAMED`, `REFUSED` and
`IGNORED` that fits decides; a renamed key is looked up again. A key without an entry is refused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lockstep.config.actor_rollout_ref import ROLLOUTS
from lockstep.config.engine import SCHEDULES, STRATEGIES

DEFAULTS: dict[str, Any] = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.save_freq": 0,
    "trainer.test_freq": 0,
}
"""What verl means if a command does not name the key, and Lockstep means something else."""

UNSET = object()
"""The key is left out."""


class Values(NamedTuple):
    """What a key's values mean here."""

    why: str
    new: Mapping[str, Any] = {}
    """verl's value, in lower case -> the value here."""
    allowed: tuple[str, ...] = ()
    """Other values are refused. All are allowed if this is empty."""
    refused: tuple[str, ...] = ()


VALUES: dict[str, Values] = {
    "*.strategy": Values("the training engine", {"dp": "fsdp"}, STRATEGIES),
    "actor_rollout_ref.rollout.name": Values("the generation engine", allowed=ROLLOUTS),
    "*.optim.lr_scheduler_type": Values("the shape of the learning rate", {"null": UNSET}, SCHEDULES),
    "*.policy_loss.loss_mode": Values(
        "set algorithm.rollout_correction.bypass_mode=true and the loss itself here", refused=("bypass_mode",)
    ),
    "actor_rollout_ref.rollout.*top_k": Values("0 is -1 here: no limit", {"0": -1}),
    "algorithm.adv_estimator": Values(
        "the advantage estimator",
        {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "tir_optimal_token_baseline": "optimal_token_baseline"},
    ),
    "algorithm.filter_groups.metric": Values(
        "what must differ within a group", {"reward": "seq_reward", "seq_final_reward": "seq_reward"}
    ),
    "reward.overlong_buffer.len": Values("DAPO's penalty for long responses", {"0": 1}),
    "reward_model.nnodes": Values("nodes of that pool", {"0": 1}),
    "trainer.save_freq": Values("-1 is never in verl; here -1 is after the last step, 0 never", {"-1": 0}),
    "trainer.test_freq": Values("-1 is never in verl; here -1 is after the last step, 0 never", {"-1": 0}),
    "trainer.device": Values("the device", allowed=("cuda", "cpu", "auto")),
    "*.use_torch_compile": Values(
        "verl compiles small functions with it; here it compiles whole layers", {"true": UNSET, "false": UNSET}
    ),
}
"""Keys of Lockstep's with some values of verl's that mean something else here."""

RENAMED: dict[str, str | tuple[str, ...]] = {
    "data.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "model_engine": ("actor_rollout_ref.actor.strategy", "critic.strategy"),
    "*.grad_clip": "*.optim.clip_grad",
    "*.optim.warmup_style": "*.optim.lr_scheduler_type",
    "*.optim.lr_decay_style": "*.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp_config.ulysses_sequence_parallel_size",
    "reward_model.ulysses_sequence_parallel_size": "reward_model.fsdp_config.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "actor_rollout_ref.ref.param_offload",
    "actor_rollout_ref.ref.fsdp_config.offload_policy": "actor_rollout_ref.ref.param_offload",
    "*.model.fsdp_config.*": "*.fsdp_config.*",
    "critic.fsdp.*": "critic.fsdp_config.*",
    "*.fsdp_config.offload_policy": "*.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.full_determinism": "actor_rollout_ref.rollout.batch_invariant",
    "custom_reward_function.*": "reward.custom_reward_function.*",
    "sandbox_fusion.*": "reward.sandbox.*",
    "reward.sandbox_fusion.*": "reward.sandbox.*",
    "reward_model.sandbox_fusion.*": "reward.sandbox.*",
    "reward.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "reward_model.overlong_buffer.*": "reward.overlong_buffer.*",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.*": "reward_model.*",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.param_offload": "reward_model.fsdp_config.param_offload",
    "reward_model.forward_max_token_len_per_gpu": "reward_model.max_token_len_per_gpu",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout": "trainer.start_timeout_s",
}
"""verl's key -> Lockstep's. The stars of the new key stand for what those of the old one matched."""


class Refusal(NamedTuple):
    """What to do instead, and the values that ask for nothing beside None, False, 0 and empty ones."""

    instead: str
    harmless: tuple[str, ...] = ()


_TOOLS = "name the tools in agent.tools (file.py:function) or a class in agent.environment, and leave this out: docs/agents.md"
_MANAGER = "one manager does what naive, dapo, batch and prime do; write the rest as a function (reward.custom_reward_function)"
_ADAMW = "the optimizer is torch's AdamW: leave this out and set optim.lr, betas, weight_decay and clip_grad"
_EXPERTS = (
    "expert parallelism is not supported with this engine: set it to 1; strategy=fsdp2 shards the experts with all other weights"
)
_TEXT = "training is on text: leave out images, videos and audio"
_REPLAY = "set actor_rollout_ref.rollout.router_replay=true, which trains with the experts that the sampler chose"
_ASYNC = "asynchronous schedules are not supported: use the synchronous script of the same recipe"
_SKIP = "generations cannot be replayed in training: leave it out"
_POLICY_GRADIENT = "set policy_loss.loss_mode: cispo with clip_ratio_low=1 is reinforce"

REFUSED: dict[str, Refusal] = {
    "-*": Refusal("a flag of Hydra's: one command starts one run, so leave it out"),
    "actor_rollout_ref.hybrid_engine": Refusal("trainer and generator share the devices: leave it out", ("true",)),
    "data.reward_fn_key": Refusal("name the column data_source when the file is made", ("data_source",)),
    "data.image_key": Refusal(_TEXT, ("images",)),
    "data.video_key": Refusal(_TEXT, ("videos",)),
    "data.sampler.*": Refusal("write a dataset of your own (data.custom_cls) and set data.shuffle=false"),
    "data.tool_config_path": Refusal(_TOOLS),
    "data.function_tool_path": Refusal(_TOOLS),
    "*.rollout.multi_turn.enable": Refusal(f"{_TOOLS} (max_assistant_turns is agent.max_turns, format is agent.parser)"),
    "*.rollout.agent.default_agent_loop": Refusal(_TOOLS, ("single_turn_agent",)),
    "*.rollout.agent.agent_loop_config_path": Refusal("write the loop as an agent.environment: docs/agents.md"),
    "*.rollout.skip_rollout": Refusal(_SKIP),
    "*.rollout.ignore_eos": Refusal("a response ends at its end token: leave it out"),
    "*.rollout.quantization*": Refusal("generation samples with the trainer's own weights: leave it out"),
    "*.rollout.enable_rollout_routing_replay": Refusal(_REPLAY),
    "*.router_replay.mode": Refusal(_REPLAY, ("disabled",)),
    "*.external_lib": Refusal("register in a program of your own, or name path.py:function in the key"),
    "*.custom_chat_template": Refusal("put the template into the model folder's tokenizer_config.json"),
    "*.tokenizer_path": Refusal("put the tokenizer's files into the folder of model.path"),
    "data.tokenizer": Refusal("put the tokenizer's files into the folder of model.path"),
    "*.model.lora.rank": Refusal("use LoRA of fsdp or fsdp2: model.lora_rank"),
    "*.optim.optimizer": Refusal(_ADAMW, ("adamw", "adam")),
    "*.optim.optimizer_impl": Refusal(_ADAMW, ("torch.optim",)),
    "*.optim.min_lr": Refusal("use optim.min_lr_ratio, the share of lr"),
    "*.override_transformer_config.fp8*": Refusal("fp8 training is not supported: leave it out to train in bfloat16"),
    "*.context_parallel_size": Refusal(
        "set it to 1 and use strategy=fsdp2, which divides long rows (fsdp_config.ulysses_sequence_parallel_size)",
        ("1",),
    ),
    "*.expert_model_parallel_size": Refusal(_EXPERTS, ("1",)),
    "*.expert_tensor_parallel_size": Refusal(_EXPERTS, ("1",)),
    "*.expert_parallel_size": Refusal(_EXPERTS, ("1",)),
    "*.megatron.dist_checkpointing_path": Refusal("name the Hugging Face folder, or that checkpoint, in model.path"),
    "algorithm.use_pf_ppo": Refusal("rows are not resampled by their score: leave it out"),
    "algorithm.rollout_correction.loss_type": Refusal(_POLICY_GRADIENT, ("ppo_clip",)),
    "algorithm.rollout_correction.use_policy_gradient": Refusal(_POLICY_GRADIENT),
    "algorithm.rollout_correction.rollout_token_veto_threshold": Refusal("use rollout_rs=token_k1, which rejects single tokens"),
    "algorithm.rollout_is*": Refusal("a key of verl 0.6: use algorithm.rollout_correction (docs/algorithms/mismatch.md)"),
    "distillation.enabled": Refusal(
        "set algorithm.adv_estimator=distill and actor_rollout_ref.ref.model.path, or use lockstep distill"
    ),
    "reward_model.reward_manager": Refusal(_MANAGER, ("naive", "dapo", "batch", "prime")),
    "*reward_manager.name": Refusal(_MANAGER, ("naive", "dapo", "batch", "prime")),
    "*.reward_kwargs.*": Refusal("pass it to a reward function: reward.custom_reward_function.reward_kwargs"),
    "trainer.default_hdfs_dir": Refusal("HDFS is not supported: copy trainer.default_local_dir yourself"),
    "trainer.remove_previous_ckpt_in_save": Refusal("set trainer.max_ckpt_to_keep=1"),
    "trainer.v1.trainer_mode": Refusal(_ASYNC, ("sync",)),
    "rollout.*": Refusal(_ASYNC),
    "async_training.*": Refusal(_ASYNC),
}
"""Keys without which another run would happen."""

IGNORED: dict[str, str] = {
    "Hydra's own": "hydra.* --config-path --config-dir *_target_",
    "rows are always packed without padding": "*.use_remove_padding",
    "rows are always cut by tokens, unless a size in rows is set": "*use_dynamic_bsz",
    "rows are always dealt out by their lengths": "trainer.balance_batch",
    "the old size over all devices, which never changes the result": "*micro_batch_size",
    "old log-probs are computed in micro-batches of the actor's size": "actor_rollout_ref.rollout.log_prob_*",
    "log-probs and entropy are always computed without whole logits": "*.use_fused_kernels *.fused_kernel_options.* *.entropy_*",
    "verl compiles small functions with it; fsdp_config.use_torch_compile here compiles whole layers": "*.use_torch_compile",
    "the layers have kernels of their own": "*.use_liger",
    "saves memory or time only": (
        "*.use_shm *.enable_activation_offload *.tiled_mlp.* *.use_prefix_grouper *.optim.override_optimizer_config* *.optim.use_*"
        " data.dataloader_num_workers data.filter_overlong_prompts_workers *.nccl_timeout"
    ),
    "actor/entropy is always logged": "*.calculate_entropy",
    "the sampler's log-probs are always there": "*.calculate_log_probs *.logprobs_mode *.calculate_sum_pi_squared",
    "verl reads it no more": (
        "data.return_* *.rollout.do_sample *.multi_stage_wake_up *.freeze_vision_tower *.use_rollout_log_probs *.over_sample_rate"
        " trainer.use_v1 trainer.use_legacy_worker_impl *.use_reward_loop"
    ),
    "prompts are generated in batches of train_batch_size until the batch is full": ("data.gen_batch_size"),
    "validation takes every prompt": "data.validation_shuffle",
    "there is one seed: trainer.seed": "*.data_loader_seed *.rollout.seed",
    "follows the actor's key": "*.rollout_n critic.shuffle critic.model.tokenizer_path",
    "the steps of the run are known": "*.optim.total_training_steps *.optim.lr_decay_steps",
    "the reference is laid out as the actor is": (
        "actor_rollout_ref.ref.* actor_rollout_ref.ref.megatron.* actor_rollout_ref.ref.fsdp_config.*"
    ),
    "layout and memory, which Lockstep chooses": (
        "*.fsdp_config.* *.megatron.* *.torchtitan.* *.veomni.* *.rollout.*_model_parallel_size"
        " actor_rollout_ref.rollout.data_parallel_size actor_rollout_ref.rollout.expert_parallel_size"
    ),
    "of another generation engine": (
        "*.rollout.engine_kwargs.* *.rollout.enable_* *.rollout.cudagraph_* *.rollout.load_format *.rollout.layered_summon"
        " *.rollout.swap_space *.rollout.disable_log_stats *.rollout.dtype *.rollout.checkpoint_engine.* *.update_weights_bucket_megabytes"
    ),
    "follows from data.max_prompt_length and data.max_response_length": (
        "*.rollout.prompt_length *.rollout.response_length *.rollout.max_model_len *.reward_kwargs.max_resp_len reward_model.max_length"
    ),
    "one engine interface: rows finish and are scored one by one": (
        "*.rollout.mode *.rollout.agent.* reward_model.launch_reward_fn_async"
    ),
    "read with its switch only": (
        "*.multi_turn.* *.model.lora.* *.router_replay.* algorithm.pf_ppo.* distillation.* *reward_manager.* *.skip_dump_dir"
    ),
    "a reward model is a classifier in a training engine, with its own tokenizer": "reward_model.rollout.* *.input_tokenizer",
    "the penalty is always logged": "reward.overlong_buffer.log",
    "a checkpoint is a Hugging Face folder with all that an exact resume needs": "*.checkpoint.* trainer.max_critic_ckpt_to_keep",
    "each step logs timing_s/* and perf/*, trainer.validation_data_dir writes every validation sample": (
        "*.profiler.* *.profile_* *_nsight_options.* global_profiler.* *.timeline_json_file trainer.log_val_generations"
        " *.rollout.prometheus.* *.rollout.trace.*"
    ),
    "of verl's own parts": "transfer_queue.* trainer.v1.* ray_init.*",
}
"""Why a key is ignored -> such keys. They change memory, time or files in verl; never what is learned."""
