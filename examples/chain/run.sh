#!/usr/bin/env bash
# Supervised fine-tuning, a reward model, preferences, RL: each from the result of the one before, on the embedded task. See README.md.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
folder=${1:-chain}
python "$here/make_data.py" "$folder"

small="engine.max_token_len_per_gpu=4096 model.enable_gradient_checkpointing=false data.max_length=32"
run() { echo; echo "== $1"; shift; "$@"; }
newest() { ls -d "$folder/$1"/global_step_*/actor | sort -V | tail -1; }

run sft lockstep sft model.path="$folder/model" data.train_files="$folder/sft.jsonl" $small \
    data.train_batch_size=64 trainer.total_training_steps=600 optim.lr=4e-3 \
    trainer.default_local_dir="$folder/sft"
sft=$(newest sft)

run reward-model lockstep reward-model model.path="$sft" data.train_files="$folder/pairs.jsonl" data.val_files="$folder/val_pairs.jsonl" $small \
    data.train_batch_size=64 trainer.total_epochs=6 optim.lr=1e-3 trainer.default_local_dir="$folder/reward_model"

run dpo lockstep dpo model.path="$sft" data.train_files="$folder/pairs.jsonl" data.val_files="$folder/val_pairs.jsonl" $small \
    data.train_batch_size=64 data.train_max_samples=512 trainer.total_epochs=2 optim.lr=3e-4 trainer.default_local_dir="$folder/dpo"
dpo=$(newest dpo)

run ppo lockstep ppo actor_rollout_ref.model.path="$dpo" data.train_files="$folder/train.parquet" \
    data.max_prompt_length=8 data.max_response_length=8 data.train_batch_size=64 algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=5e-4 actor_rollout_ref.model.enable_gradient_checkpointing=false \
    reward_model.enable=true reward_model.model.path="$(newest reward_model)" \
    trainer.total_training_steps=80 trainer.default_local_dir="$folder/ppo"

# How good each of them is: 256 held-out words, sampled at temperature 1, judged by the rule.
for stage in sft dpo ppo; do
    lockstep ppo trainer.val_only=true actor_rollout_ref.model.path="$(newest $stage)" data.train_files="$folder/train.parquet" \
        data.val_files="$folder/val.parquet" data.max_prompt_length=8 data.max_response_length=8 \
        actor_rollout_ref.rollout.val_kwargs.temperature=1.0 algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 \
        trainer.validation_data_dir="$folder/answers/$stage" trainer.default_local_dir="$folder/judged_$stage" > /dev/null
done
python "$here/compare.py" "$folder/answers" sft dpo ppo
