#!/usr/bin/env bash
# SmolLM2 on GSM8K on a GPU: supervised fine-tuning, then GRPO from its result; both are validated on the test questions. See README.md.
#   gsm8k.sh OUT [MODEL] [SOURCE...]     SOURCE: files or folders of GSM8K as `lockstep preprocess gsm8k --source` takes them
set -euo pipefail
out=$1 model=${2:-smollm2-135m}
shift $(($# < 2 ? $# : 2))
lockstep preprocess gsm8k ${@:+--source "$@"} --out "$out/data"

lockstep sft model.path="$model" data.train_files="$out/data/train.parquet" data.max_length=1024 \
    data.train_batch_size=64 trainer.total_epochs=3 optim.lr=1e-4 engine.max_token_len_per_gpu=65536 \
    sampled.files="$out/data/test.parquet" sampled.max_response_length=320 sampled.temperature=1.0 \
    trainer.default_local_dir="$out/sft"
sft=$(ls -d "$out"/sft/global_step_*/actor | sort -V | tail -1)

lockstep ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path="$sft" \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/test.parquet" \
    data.train_batch_size=256 data.max_response_length=320 actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.max_num_seqs=2048 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536 actor_rollout_ref.actor.optim.lr=1e-5 \
    trainer.total_training_steps="${STEPS:-60}" trainer.default_local_dir="$out/grpo"
