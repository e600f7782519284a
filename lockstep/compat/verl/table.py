"""verl's keys that are not Lockstep's under the same name and meaning: what becomes of each.

Made from the configuration trees of verl 0.8.0 and 0.9.1, and from older names that scripts still have. A row is

    pattern | verdict | why

and the first row that fits a key decides; a key that no row fits is accepted when Lockstep has it, else unknown. In a pattern `*` stands
for anything, dots included, and {a,b} for one of the words. The verdicts:

    > key         translated: the value moves to this key, in which \\1 stands for what the first * or {} matched
    > key : name  the same through a function of `keys.CONVERTERS`
    -             ignored: it changes memory, time or files there, or nothing at all; never what is learned. Accepted where Lockstep has it
    --            ignored although Lockstep has a key of that name: it means another thing
    ! a, b        refused: without it another run would happen. Not refused for the values a and b; without any, for `keys.OFF`
"""

ROWS = r"""
*_target_ | - | names a class of verl's
defaults* | - | Hydra's own: the list of files that verl's tree is composed of
hydra.* | - | Hydra's own
--config-name | > actor_rollout_ref.actor.strategy : config_name | the file of verl's tree that chooses the engine
--config-* | - | Hydra's own: verl's tree is not read; `lockstep ppo --config FILE` reads a YAML file
-* | ! | a flag of Hydra's: one command starts one run
model_engine | > actor_rollout_ref.actor.strategy : engine | the training engine
{*.profiler.,*.profile_,global_profiler.}* | - | no profiler: each step logs timing_s/* and perf/*
transfer_queue.* | - | batches go straight from stage to stage
{skip.*,actor_rollout_ref.rollout.skip}.enable | ! | generations cannot be replayed in training
{skip,actor_rollout_ref.rollout.skip}.* | - | read with enable only
distillation.enabled | ! | set algorithm.adv_estimator=distill and actor_rollout_ref.ref.model.path, or use lockstep distill
distillation.* | - | read with distillation.enabled only
ray_kwargs.timeline_json_file | - | no timeline: each step logs timing_s/*
data.gen_batch_size | - | filter_groups generates batches of train_batch_size prompts until the batch is full
data.trust_remote_code | > actor_rollout_ref.model.trust_remote_code | one switch for model and tokenizer
data.return_* | - | verl reads it no more; rows keep all their columns
data.{dataloader_num_workers,filter_overlong_prompts_workers} | - | prompts are encoded while the step before runs
data.validation_shuffle | - | validation takes every prompt: their order changes nothing
data.reward_fn_key | ! data_source | the column is data_source: rename yours when the file is made
data.{image,video,audio}_key | ! images, videos, audios | training is on text: no images, videos or audio
data.{image_patch_size,mm_processor_kwargs}* | - | read for images, videos and audio only
data.sampler.* | ! | write a dataset of your own (data.custom_cls) and set data.shuffle=false
data.datagen.* | ! | no data made during training: a dataset of one's own is data.custom_cls
data.{tool_*,function_tool_path} | ! | tools come with multi_turn, which is refused
actor_rollout_ref.hybrid_engine | ! True | trainer and generator share the devices
{actor_rollout_ref,critic}.nccl_timeout | - | verl reads it no more; every call ends after trainer.worker_timeout_s
*.{use_remove_padding,pad_to_length*} | - | rows are always packed without padding
*.{use_fused_kernels,fused_kernel_options.*} | - | log-probs and entropy are always computed without whole logits
*.use_liger | - | the layers have kernels of their own
{*.use_shm,data.use_shm} | - | copies files to /dev/shm for speed
*.{tiled_mlp.*,enable_activation_offload} | - | saves memory only; model.recompute is the way here
critic.model.tokenizer_path | - | the tokenizer is the actor's
{data.tokenizer,*.model.tokenizer_path} | ! | the tokenizer is the model's: put its files into the folder of model.path
*.model.{input_tokenizer,rm_tokenizer} | - | a reward model reads text with its own tokenizer and chat template, found in its folder
*.hf_config_path | ! | the config is the model's: use model.override_config
*.external_lib | ! | importing a module by key: register in a program of your own, or name path.py:function
*.custom_chat_template | ! | put the template into the model folder's tokenizer_config.json
*.exclude_modules | ! | name the layers that get adapters in model.target_modules
*.lora_adapter_path | ! | merge the adapters into the model's folder first
*.model.lora.rank | ! | LoRA is that of fsdp and fsdp2: model.lora_rank
*.model.lora.* | - | read with model.lora.rank only
*.mtp.enable* | ! | no training of multi-token prediction heads
*.mtp* | - | read with mtp.enable only
*.model.fsdp_config.{param_offload,optimizer_offload,fsdp_size} | > \1.fsdp_config.\2 | the engine's section is beside the model's
*.model.fsdp_config.offload_policy | > \1.fsdp_config.param_offload | the engine's section is beside the model's
critic.fsdp.offload_policy | > critic.fsdp_config.param_offload | the section's name
critic.fsdp.{fsdp_size,param_offload,optimizer_offload,dtype,reshard_after_forward} | > critic.fsdp_config.\1 | the section's name
{actor_rollout_ref.actor,critic,reward_model}.strategy | > \1.strategy : engine | the training engine
*.qat.enable | ! | no training with quantised weights
*.qat* | - | read with qat.enable only
*.router_replay.mode | ! disabled | no router replay: native generation has the trainer's weights
*.router_replay.* | - | read with router_replay.mode only
*.load_weight | ! True | a run starts from weights, never from random ones
*.grad_clip | > \1.optim.clip_grad | the name that verl 0.9 reads, too
actor_rollout_ref.ref.*ulysses_sequence_parallel_size | - | the reference is laid out as the actor is
critic.fsdp.ulysses_sequence_parallel_size | > critic.fsdp_config.ulysses_sequence_parallel_size | the section's name
{actor_rollout_ref.actor,critic,reward_model}.ulysses_* | > \1.fsdp_config.ulysses_\2 | in the engine's section
{*.use_dynamic_bsz,actor_rollout_ref.ref.log_prob_use_dynamic_bsz} | - | rows are always cut by tokens, unless a size in rows is set
{*.ppo,actor_rollout_ref.ref.log_prob,reward_model.}*micro_batch_size | - | the old size over all devices; it never changes the result
*.rollout_n | - | follows rollout.n
*.data_loader_seed | - | one seed: trainer.seed
*.use_rollout_log_probs | - | verl reads it no more; see algorithm.rollout_correction.bypass_mode
*.calculate_entropy | - | actor/entropy is always logged
*.calculate_sum_pi_squared | - | computed when the estimator asks for it
*.use_prefix_grouper | - | changes time only
*.entropy_* | - | entropy is always computed in chunks
*.use_torch_compile | -- | verl compiles small functions with it; fsdp_config.use_torch_compile here compiles whole layers
*.checkpoint.load_contents | - | a checkpoint is loaded whole
*.checkpoint.* | - | a checkpoint is a Hugging Face folder with all that an exact resume needs
actor_rollout_ref.actor.kl_loss.{type,coef} | > actor_rollout_ref.actor.kl_loss_\1 | an old name
*.policy_loss.loss_mode | > \1.policy_loss.loss_mode : loss_mode | the policy loss
*.tis_imp_ratio_cap | > algorithm.rollout_correction.rollout_is_threshold : tis | truncated importance sampling of each token
{actor_rollout_ref.actor,critic}.optim.* | > \1.optim.\2 : optim |
actor_rollout_ref.ref.optim.* | - | a reference is not trained
critic.shuffle | - | follows actor_rollout_ref.actor.shuffle
critic.forward_* | - | verl reads it no more; the training sizes hold for both passes
critic.loss_scale_factor | ! | the critic's loss has no scale of its own
actor_rollout_ref.ref.fsdp_config.{param_offload,offload_policy} | > actor_rollout_ref.ref.param_offload | it has no engine section
actor_rollout_ref.ref.megatron.param_offload | - | megatron keeps weights on the device
actor_rollout_ref.ref.* | - | the reference is laid out as the actor is
*.fsdp_config.offload_policy | > \1.fsdp_config.param_offload | host memory while the model is idle
*.fsdp_config.model_dtype | - | master weights are always float32
{*.fsdp_config.,critic.fsdp.}* | - | layout and memory, which are chosen here
*.override_transformer_config.fp8* | ! | no training in fp8
*.engine.* | - | of an engine that is not here
*.{megatron,torchtitan}.context_parallel_size | ! 1 | no context parallelism; fsdp2 divides long rows (ulysses_sequence_parallel_size)
*.{megatron,torchtitan,veomni}.expert_* | ! 1 | no expert parallelism
*.megatron.dist_checkpointing_path | ! | name the Hugging Face folder, or that checkpoint, in model.path
*.megatron.use_megatron_fsdp | ! | use strategy=fsdp2
*.torchtitan.data_parallel* | - | what tensor and pipeline parallelism leave of the devices
*.{megatron,torchtitan,veomni}.* | - | memory, schedule and kernels of that engine, which are chosen here
actor_rollout_ref.rollout.name | > actor_rollout_ref.rollout.name : rollout | the generation engine
actor_rollout_ref.rollout.mode | - | one engine interface: rows finish and are scored one by one
actor_rollout_ref.rollout.{top_k,val_kwargs.top_k} | > actor_rollout_ref.rollout.\1 : top_k | 0 is -1 here: no limit
actor_rollout_ref.rollout.do_sample | - | verl reads it no more; temperature says it
actor_rollout_ref.rollout.val_kwargs.do_sample | > actor_rollout_ref.rollout.val_kwargs.temperature : greedy | temperature says it
actor_rollout_ref.rollout.*_model_parallel_size | - | every device generates its rows; see actor.fsdp_config.tensor_parallel_size
actor_rollout_ref.rollout.{data_parallel_size,expert_parallel_size} | - | every device generates its own rows
actor_rollout_ref.rollout.nnodes | ! | no machines for generation alone by key; a Rollout role in a program of your own has them
actor_rollout_ref.rollout.n_gpus_per_node | - | read with rollout.nnodes only
actor_rollout_ref.rollout.{prompt_length,response_length,max_model_len} | - | data.max_prompt_length + data.max_response_length
actor_rollout_ref.rollout.dtype | - | generation computes as training does
actor_rollout_ref.rollout.seed | - | one seed: trainer.seed
actor_rollout_ref.rollout.full_determinism | > actor_rollout_ref.rollout.batch_invariant | the same tokens in any batch
actor_rollout_ref.rollout.ignore_eos | ! | a response ends at its end token
actor_rollout_ref.rollout.quantization* | ! | no quantised generation: it samples with the trainer's own weights
actor_rollout_ref.rollout.enable_rollout_routing_replay | ! | no router replay: native generation has the trainer's weights
actor_rollout_ref.rollout.limit_images | ! | training is on text: no images
actor_rollout_ref.rollout.calculate_log_probs | - | the sampler's log-probs are always there
actor_rollout_ref.rollout.logprobs_mode | - | log-probs are those of the whole distribution at the temperature
actor_rollout_ref.rollout.log_prob_* | - | old log-probs are cut as the actor's update is
actor_rollout_ref.rollout.multi_turn.enable | ! | no multi-turn rollouts
actor_rollout_ref.rollout.multi_turn.* | - | read with multi_turn.enable only
actor_rollout_ref.rollout.agent.default_agent_loop | ! single_turn_agent | no multi-turn rollouts
actor_rollout_ref.rollout.agent.agent_loop_config_path | ! | no agent loops of one's own
actor_rollout_ref.rollout.agent.* | - | no processes between trainer and engine
actor_rollout_ref.rollout.disaggregation.enabled | ! | prefill and decoding share a device
actor_rollout_ref.rollout.disaggregation.* | - | read with disaggregation.enabled only
actor_rollout_ref.rollout.trace.* | - | trainer.rollout_data_dir writes every sample
actor_rollout_ref.rollout.prometheus.* | - | each step logs its metrics to trainer.logger
actor_rollout_ref.rollout.enable_* | - | chunked prefill and prefix caching are always on
actor_rollout_ref.rollout.{engine_kwargs.*,cudagraph_*,scheduling_policy,layered_summon,swap_space,disable_log_stats} | - | of one engine
actor_rollout_ref.rollout.skip_tokenizer_init | - | engines get and give token ids
actor_rollout_ref.rollout.moe_load_balance_metrics_interval | - | no metrics of the router
actor_rollout_ref.rollout.router_config_path | ! | no router between engines
actor_rollout_ref.rollout.checkpoint_engine.* | - | rollout.weight_sync chooses how weights travel
actor_rollout_ref.rollout.load_format | - | native generation reads the trainer's own weights
*.{freeze_vision_tower,multi_stage_wake_up,over_sample_rate} | - | verl reads it no more
{reward_model.reward_manager,reward.reward_manager.name} | > reward.rules : manager | one manager: the function's arguments say the kind
reward.reward_manager.source | ! register | a manager of one's own is passed as reward_fn in a program of one's own
reward.reward_manager.module.path | ! | a manager of one's own is passed as reward_fn in a program of one's own
reward.reward_manager.* | - | read with reward_manager.source=importlib only
*.{overlong_buffer_cfg,overlong_buffer}.log | - | the penalty is always logged
{*.reward_kwargs.overlong_buffer_cfg,reward_model.overlong_buffer}.* | > reward.overlong_buffer.\3 | DAPO's penalty for long responses
*.reward_kwargs.max_resp_len | - | data.max_response_length
custom_reward_function.{path,name} | > reward.custom_reward_function.\1 | in the section reward
*custom_reward_function.reward_kwargs.* | > reward.custom_reward_function.reward_kwargs.\2 | in the section reward
{reward,reward_model}.reward_kwargs.* | ! | pass it to a reward function: reward.custom_reward_function.reward_kwargs
reward_model.sandbox_fusion_url | > reward.sandbox.url | the server that runs programs
*sandbox_fusion.{url,max_concurrent,memory_limit_mb} | > reward.sandbox.\2 | the server that runs programs
reward.reward_model.{enable,enable_resource_pool,n_gpus_per_node} | > reward_model.\1 | in a section of its own
reward.reward_model.nnodes | > reward_model.nnodes : at_least_one | in a section of its own
reward.reward_model.model_path | > reward_model.model.path | in a section of its own
{reward.reward_model,reward_model.rollout}.* | - | a reward model is a classifier in a training engine: no server
reward_model.param_offload | > reward_model.fsdp_config.param_offload | in the engine's section
reward_model.num_workers | > reward.num_workers | processes that call reward functions
reward_model.reward_loop_* | ! | a manager of one's own is passed as reward_fn in a program of one's own
reward_model.forward_max_token_len_per_gpu | > reward_model.max_token_len_per_gpu | the token budget
reward_model.max_length | - | a reward model reads prompt and response whole
reward_model.launch_reward_fn_async | - | scoring always runs while responses are generated
reward_model.nnodes | > reward_model.nnodes : at_least_one | nodes of that pool
algorithm.adv_estimator | > algorithm.adv_estimator : estimator | the advantage estimator
algorithm.in_reward_kl.type | > algorithm.kl_penalty | an old name
algorithm.in_reward_kl.coef | > algorithm.kl_ctrl.kl_coef | an old name
algorithm.in_reward_kl.kl_ctrl.* | > algorithm.kl_ctrl.\1 | an old name
algorithm.use_pf_ppo | ! | no resampling of rows by their score
algorithm.pf_ppo.* | - | read with use_pf_ppo only
algorithm.filter_groups.metric | > algorithm.filter_groups.metric : metric | what must differ within a group
algorithm.filter_groups.max_inflight_gen_batches | - | one batch at a time
algorithm.rollout_correction.loss_type | ! ppo_clip | policy_loss.loss_mode says it: cispo with clip_ratio_low=1 is reinforce
algorithm.rollout_is_level | > algorithm.rollout_correction.rollout_is | in a section of its own
algorithm.rollout_is_threshold | > algorithm.rollout_correction.rollout_is_threshold | in a section of its own
algorithm.rollout_is* | - | of verl 0.6; algorithm.rollout_correction is what came of it
algorithm.rollout_correction.rollout_token_veto_threshold | ! | rollout_rs=token_k1 rejects single tokens
trainer.balance_batch | - | rows are always dealt out by their lengths
trainer.{save_freq,test_freq} | > trainer.\1 : never | -1 there is never; here -1 is after the last step, 0 never
trainer.logger | > trainer.logger : loggers | metrics.jsonl in the run's folder is always written
trainer.device | ! cuda, cpu, auto | CUDA and CPU only
trainer.max_actor_ckpt_to_keep | > trainer.max_ckpt_to_keep | one checkpoint holds all models
trainer.max_critic_ckpt_to_keep | - | one checkpoint holds all models
trainer.remove_previous_ckpt_in_save | ! | set trainer.max_ckpt_to_keep=1
trainer.{log_val_generations,val_generations_to_log_to_wandb} | - | trainer.validation_data_dir writes every validation sample
trainer.default_hdfs_dir | ! | no HDFS: copy trainer.default_local_dir yourself
trainer.del_local_ckpt_after_load | ! | a checkpoint is never deleted by loading it
trainer.checkpoint_callback_class | ! | no callbacks: every published folder is complete, so watch trainer.default_local_dir
trainer.esi_redundant_time | - | verl 0.9 reads it no more
trainer.ray_wait_register_center_timeout | > trainer.start_timeout_s | longest time that workers may take to start
trainer.{use_v1,use_legacy_worker_impl} | - | verl's choice between its own parts
trainer.v1.trainer_mode | ! sync | asynchronous schedules are not here
trainer.v1.sampler.custom_sampler.path | ! | write a dataset of your own (data.custom_cls) and set data.shuffle=false
trainer.v1.* | - | of the asynchronous schedules
"""
