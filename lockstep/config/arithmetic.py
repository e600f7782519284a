"""The batch sizes in plain words, and where everything goes: printed at the start of every run."""

from lockstep.config.auto import tokens_in_words
from lockstep.config.ppo import PPOConfig


def describe(config: PPOConfig, num_prompts: int, total_steps: int, device: str) -> str:
    """Lines that say what one step does, in numbers."""
    n = config.actor_rollout_ref.rollout.n
    batch = config.data.train_batch_size
    actor = config.actor_rollout_ref.actor
    trainer = config.trainer
    processes = trainer.n_gpus_per_node * trainer.nnodes
    per_epoch = num_prompts // batch
    lines = [
        f"{num_prompts} training prompts, {batch} a step: {per_epoch} steps an epoch, {total_steps} steps in all",
        f"a step: {batch} prompts x {n} samples = {batch * n} responses of up to {config.data.max_response_length} tokens",
        _updates("actor", batch, n, config.actor_mini_batch_prompts, actor.ppo_epochs),
    ]
    if config.use_critic:
        lines.append(_updates("critic", batch, n, config.critic_mini_batch_prompts, config.critic_epochs))
    if trainer.critic_warmup:
        lines.append(f"the first {trainer.critic_warmup} steps train the critic alone")
    cut = (
        f"{actor.ppo_micro_batch_size_per_gpu} responses"
        if actor.ppo_micro_batch_size_per_gpu
        else tokens_in_words(actor.ppo_max_token_len_per_gpu)
    )
    one, several = {"cuda": ("GPU", "GPUs"), "cpu": ("CPU process", "CPU processes")}[device]
    lines.append(
        f"on {processes} {several if processes > 1 else one}, at most {cut} at once on each (this bounds memory, not the result)"
    )
    lines.append(f"the run's folder: {trainer.run_dir}")
    return "\n".join(lines)


def _updates(who: str, batch: int, n: int, mini: int, epochs: int) -> str:
    count = batch // mini * epochs
    passes = f" ({epochs} passes)" if epochs > 1 else ""
    steps = f"{count} optimizer step{'s' if count > 1 else ''}"
    return f"the {who} makes {steps} a step{passes}, each on {mini} prompts x {n} = {mini * n} responses"
