"""What a configuration of `lockstep sft`, `reward-model` or `dpo` will take: one update of rows from files."""

from dataclasses import replace

from lockstep.config.actor_rollout_ref import Parts
from lockstep.config.dpo import DPOConfig
from lockstep.config.reward_train import RewardTrainConfig
from lockstep.config.sft import SFTConfig
from lockstep.config.stage import STAGE_KEYS
from lockstep.errors import ResourceError
from lockstep.models.load import Head
from lockstep.planner.built import reusing_models
from lockstep.planner.choices import candidates, choose
from lockstep.planner.count import Load
from lockstep.planner.hardware import Device
from lockstep.planner.memory import host_bytes, stage_parts
from lockstep.planner.needs import policy_needs, settle_policy
from lockstep.planner.prediction import SAVE, Lengths, Prediction, device_of, element_of, ranks_of, save_s, trained_share
from lockstep.planner.shape import read_shape
from lockstep.planner.time import Rows, pass_s, update_s

UPDATE = "update_actor"


def predict_stage(config: SFTConfig | RewardTrainConfig | DPOConfig, device: Device, lengths: Lengths) -> Prediction:
    """Memory and time of a step. Raises ResourceError when the models do not fit, DataError when a config cannot be read."""
    per_example = 1 if isinstance(config, SFTConfig) else 2
    head = Head.SCORE if isinstance(config, RewardTrainConfig) else Head.LANGUAGE_MODEL
    with_reference = isinstance(config, DPOConfig) and config.reference_mode == "model"
    engine, trainer, batch = config.engine, config.trainer, config.data.train_batch_size
    ranks = ranks_of(engine, trainer.n_gpus_per_node, trainer.nnodes)
    rows = -(-batch * per_example // ranks.count)
    with reusing_models():
        policy, load = config.policy(), Load(config.data.max_length, rows, rows, unit=per_example)
        parts = Parts(actor=True, reference=with_reference)
        options = {
            size: policy_needs(
                policy, parts, STAGE_KEYS, load=replace(load, auto_tokens=size),
                world_size=ranks.count, element=element_of(engine), head=head,
            ) for size in candidates(load)
        }  # fmt: skip
        try:
            chosen = choose(options, load, device.memory)
        except ResourceError as error:
            raise ResourceError(f"on {ranks.count} x {device.name}: {error}") from None
        shape = read_shape(config.model, head)
    models, plans = chosen.models, chosen.plans
    policy, numbers = settle_policy(policy, parts, STAGE_KEYS, replace(load, auto_tokens=chosen.tokens), chosen.numbers)
    found = Prediction(num_gpus=ranks.count, tokens=batch * per_example * (lengths.prompt + lengths.response), chosen=numbers)
    found.plans = {model.name: plan for model, plan in zip(models, plans, strict=True)}
    found.host = host_bytes(models, plans)
    used = {UPDATE, "ref"} if with_reference else {UPDATE}
    found.memory = {stage: parts for stage, parts in stage_parts(models, None, plans).items() if stage in used}
    width = lengths.prompt + lengths.response
    budget = int(engine.micro_batch_size_per_gpu * width) if engine.micro_batch_size_per_gpu else policy.actor.max_tokens
    work, own = Rows(batch / ranks.count, per_example, lengths.prompt, lengths.response, budget), device_of(engine, device)
    if with_reference:
        found.seconds["ref"] = pass_s(shape, work, own, ranks)
    trained = trained_share(models[0]) * ranks.count
    found.seconds[UPDATE] = update_s(shape, work, own, ranks, found.plans["actor"].recompute or "none", 1, trained)
    found.seconds[SAVE] = save_s(models)
    return found
