#!/bin/sh
# A tiny model learns to use its environment, from nothing, on two CPU cores, in some minutes:
#   TASK=lookup       it learns to ask a tool instead of guessing (the default)
#   TASK=frozen_lake  it learns to cross gymnasium's frozen lake
# ESTIMATOR=gae for PPO with a critic; SEED=1 for another run; OUT=FOLDER. Keys at the end go to the run with the environment.
set -e
cd "$(dirname "$0")/../.."
lockstep=${LOCKSTEP:-.venv/bin/lockstep}
python=${PYTHON:-.venv/bin/python}
task=${TASK:-lookup}
seed=${SEED:-0}
estimator=${ESTIMATOR:-grpo}
out=${OUT:-checkpoints/agents}/${task}_$seed
case $task in
lookup)
    warm_up_steps=200
    warm_up="data.max_length=48"
    play="agent.environment=examples/agents/lookup.py:Lookup agent.max_turns=3 data.max_prompt_length=8 data.max_response_length=24
        data.train_batch_size=32"
    ;;
frozen_lake)
    warm_up_steps=45
    warm_up="data.max_length=400"
    play="agent.environment=lockstep.agents.gym_text:GymText agent.max_turns=12 agent.max_turn_tokens=4 data.max_prompt_length=32
        data.max_response_length=380 data.train_batch_size=16"
    ;;
*)
    echo "TASK=$task: expected lookup or frozen_lake" >&2
    exit 1
    ;;
esac
if [ ! -e "$out/sft/done" ]; then # the same start for every estimator
    $python examples/agents/make.py "$task" "$out/task" "$seed"
    $lockstep sft model.path="$out/task/model" data.train_files="$out/task/warmup.parquet" data.train_batch_size=64 optim.lr=3e-3 \
        trainer.total_training_steps=$warm_up_steps trainer.device=cpu trainer.seed="$seed" trainer.default_local_dir="$out/sft" $warm_up
    touch "$out/sft/done"
fi
$lockstep ppo actor_rollout_ref.model.path="$out/sft/global_step_$warm_up_steps/actor" data.train_files="$out/task/train.parquet" \
    data.val_files="$out/task/val.parquet" algorithm.adv_estimator="$estimator" actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1 actor_rollout_ref.actor.optim.lr=5e-4 critic.optim.lr=3e-3 \
    trainer.total_training_steps=30 trainer.test_freq=-1 trainer.val_before_train_samples=-1 trainer.device=cpu trainer.seed="$seed" \
    trainer.default_local_dir="$out/$estimator" $play "$@"
