#!/bin/sh
# A tiny model learns to cross a frozen lake: on two CPU cores, some minutes. SEED=1 for another run; ESTIMATOR=gae for PPO.
set -e
cd "$(dirname "$0")/../.."
lockstep=${LOCKSTEP:-.venv/bin/lockstep}
python=${PYTHON:-.venv/bin/python}
out=${OUT:-checkpoints/frozen_lake}
seed=${SEED:-0}
$python examples/agents/frozen_lake.py "$out/task" "$seed"
$lockstep sft model.path="$out/task/model" data.train_files="$out/task/games.parquet" data.max_length=400 \
    data.train_batch_size=64 optim.lr=3e-3 trainer.total_training_steps=90 trainer.device=cpu trainer.seed="$seed" \
    trainer.default_local_dir="$out/sft"
$lockstep ppo actor_rollout_ref.model.path="$out/sft/global_step_90/actor" \
    data.train_files="$out/task/train.parquet" data.val_files="$out/task/val.parquet" data.train_batch_size=16 \
    data.max_prompt_length=32 data.max_response_length=380 agent.environment=lockstep.agents.gym_text:GymText agent.max_turns=12 \
    agent.max_turn_tokens=4 algorithm.adv_estimator="${ESTIMATOR:-grpo}" actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1 actor_rollout_ref.actor.optim.lr=5e-4 critic.optim.lr=3e-3 \
    trainer.total_training_steps=30 trainer.test_freq=-1 trainer.val_before_train_samples=-1 trainer.device=cpu \
    trainer.seed="$seed" trainer.default_local_dir="$out/${ESTIMATOR:-grpo}"
