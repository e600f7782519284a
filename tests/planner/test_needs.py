"""What is counted against engines that exist: bytes on this machine, peaks that were measured on a GPU."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import STEPS, TWO_MICRO_BATCHES, batch_of, engine_step
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.families import FAMILIES
from helpers.tiny import save_tiny_model, tiny_config, tiny_model
from torch import Tensor
from transformers import Qwen2Config

from benchmarks.workload import SHAPES
from lockstep.config.actor_rollout_ref import POLICY_ROLES, ActorConfig, ActorRolloutRefConfig, RolloutConfig
from lockstep.config.critic import CriticConfig
from lockstep.config.engine import EngineChoice, FSDPConfig, MegatronConfig, ModelConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.errors import DataError
from lockstep.generation.model_support import cache_shape
from lockstep.models.attention import CACHED
from lockstep.models.load import Head
from lockstep.planner.choices import choose_rollout, place_policy, place_training
from lockstep.planner.memory import Keys, MemoryPlan, Model, Rollout, describe_plan, plan_memory, stage_bytes
from lockstep.planner.needs import LEAST_SEQUENCES, Load, build, count_model, count_rollout, policy_needs, training_needs
from lockstep.workers.engine.fsdp import sharding

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30
KEYS = Keys("tokens", "weights", "moments", "recompute")


def count(path: str, choice: EngineChoice | None = None, update: str | None = "update", **changes: Any) -> Any:
    model = ModelConfig(path=path, **changes.pop("model", {}))
    options = {
        "head": Head.LANGUAGE_MODEL,
        "world_size": 1,
        "element": 4,
        "load": Load(16, 8, 4),
        "budget": (16384, None),
    } | changes
    return count_model("actor", KEYS, ("pass",), update, choice=choice or EngineChoice(), model=model, **options)


def bytes_of(tensors: Any) -> int:
    """Bytes of the memory behind the tensors, each piece once."""
    found = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


def copied_bytes(module: Any) -> int:
    """Bytes of what a model that one rank has whole has copied to compute with it."""
    return bytes_of(copied.copy for copied in getattr(module, "_copied", ()))


@pytest.mark.parametrize(
    ("world", "section", "model"),
    [
        (1, {}, {}),
        (1, {"dtype": "bfloat16"}, {}),
        (1, {}, {"lora_rank": 2}),
        (1, {"dtype": "bfloat16"}, {"lora_rank": 2}),
        (2, {"dtype": "bfloat16"}, {"lora_rank": 2}),
        (2, {}, {}),
        (2, {"fsdp_size": 1}, {}),
        (2, {"tensor_parallel_size": 2}, {}),
    ],
)
def test_weights_gradients_and_moments_are_those_of_the_engine(
    tmp_path: Path, world: int, section: dict[str, Any], model: dict[str, int]
) -> None:
    """On the fullest rank within 8 %: a rank has whole rows, and with tensor parallelism norms are not divided."""
    element = 2 if section.get("dtype") == "bfloat16" else 4
    path = save_tiny_model(tmp_path, tie_word_embeddings=True)

    def measure() -> dict[str, int]:
        engine = make_tiny_engine(path, section=section, model=model)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)  # makes the moments
        state = engine._optimizer.state.values()
        moments = [value for one in state for name, value in one.items() if isinstance(value, Tensor) and name != "step"]
        copies = []
        engine.module.register_forward_hook(lambda *_: copies.append(copied_bytes(engine.module)))
        clear = engine._optimizer.zero_grad
        gradients = []
        engine._optimizer.zero_grad = lambda: (gradients.append(bytes_of(sharding.gradient_shards(engine.module))), clear())
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        return {"weights": bytes_of(sharding.shards(engine.module)), "moments": bytes_of(moments), "gradients": gradients[0]} | {
            "gathered": max(copies) if world == 1 else None
        }

    measured = run_distributed(measure, world)
    counted = count(path, EngineChoice(fsdp_config=FSDPConfig(**section)), world_size=world, model=model, element=element)
    for part in ("weights", "moments", "gradients"):
        assert getattr(counted, part) == pytest.approx(max(rank[part] for rank in measured), rel=0.08), part
    if world == 1:
        assert counted.gathered == measured[0]["gathered"]


@pytest.mark.parametrize(
    ("head", "section"), [(Head.LANGUAGE_MODEL, {"dtype": "bfloat16"}), (Head.VALUE, {"dtype": "bfloat16"}), (Head.VALUE, {})]
)
def test_a_frozen_model_on_one_rank_copies_what_is_counted(tmp_path: Path, head: Head, section: dict[str, Any]) -> None:
    """References and reward models."""
    path = save_tiny_model(tmp_path, tie_word_embeddings=True)

    def measure() -> tuple[int, int]:
        engine = make_tiny_engine(path, section=section, head=head, optim=None)
        weights, found = bytes_of(engine.module.parameters()), []
        engine.module.register_forward_hook(lambda *_: found.append(copied_bytes(engine.module)))
        engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)
        return weights, max(found)

    ((weights, copied),) = run_distributed(measure, 1)
    element = 2 if section else 4
    counted = count(path, EngineChoice(fsdp_config=FSDPConfig(**section)), update=None, head=head, element=element)
    assert (counted.weights, counted.gathered) == (weights, copied)


def test_parts_shrink_with_the_ranks_that_share_them(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    one, eight = count(path), count(path, world_size=8)
    assert (one.weights, one.moments, one.gradients) == (8 * eight.weights, 8 * eight.moments, 8 * eight.gradients)
    assert one.gathered == 0  # one rank shards nothing
    assert eight.gathered == one.weights  # two layers of two, in float32 too
    assert count(path, world_size=8, element=2).gathered == count(path, element=2).gathered == one.weights // 2
    small = count(path, EngineChoice(fsdp_config=FSDPConfig(reshard_after_forward=False)), world_size=8)
    assert small.gathered == one.weights
    # Several micro-batches add their gradients up whole.
    assert count(path, world_size=8, load=Load(16, 8, 4000)).gradients == one.gradients


def test_a_frozen_model_has_weights_alone(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    frozen = count(path, update=None)
    assert (frozen.moments, frozen.gradients, frozen.activations, frozen.optimizer_offload) == (0, 0, {}, False)
    assert frozen.weights == 4 * sum(p.numel() for p in tiny_model().parameters())


def test_an_engine_that_cannot_offload_is_not_asked_to(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    fsdp, megatron = count(path, EngineChoice("fsdp")), count(path, EngineChoice("megatron", megatron=MegatronConfig()), element=2)
    assert (fsdp.param_offload, fsdp.optimizer_offload, fsdp.keys) == ("auto", "auto", KEYS)
    assert (megatron.param_offload, megatron.optimizer_offload) == (False, False)
    assert (megatron.keys.weights, megatron.keys.moments) == (None, None)
    assert megatron.weights == fsdp.weights * 10 // 4  # half-precision weights, float32 master weights and gradients


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ({}, ["none", "selective", "full"]),
        ({"recompute": "selective"}, ["selective"]),
        ({"enable_gradient_checkpointing": False}, ["none"]),
    ],
)
def test_only_what_the_user_leaves_open_may_be_recomputed(tmp_path: Path, model: dict[str, Any], kinds: list[str]) -> None:
    assert list(count(save_tiny_model(tmp_path), model=model).activations) == kinds


def test_a_micro_batch_is_no_larger_than_its_rows_and_its_budget() -> None:
    load = Load(longest=10, step_rows=8, update_rows=4)
    assert load.tokens(1000, None, load.step_rows) == 80
    assert load.tokens(50, None, load.step_rows) == 50
    assert load.tokens(50, 2, load.step_rows) == 20
    assert load.tokens(50, 100, load.update_rows) == 40


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_the_cache_has_the_size_of_the_native_engines(tmp_path: Path, family: str) -> None:
    path = save_tiny_model(tmp_path, family, **FAMILIES[family])
    module = tiny_model(family, **FAMILIES[family])
    module.set_attn_implementation(CACHED)
    token = cache_shape(module, page_size=1).page_bytes
    for rows, config in ((100, RolloutConfig(gpu_memory_utilization=0.25)), (5, RolloutConfig(name="hf"))):
        found = count_rollout(
            config, ModelConfig(path=path), actor=EngineChoice(), world_size=1, element=4, load=Load(30, rows, rows)
        )
        share = 0.25 if config.name == "native" else 1.0
        assert found.cache == min(rows, LEAST_SEQUENCES) * 30 * token / share
        assert found.weights == 4 * sum(p.numel() for p in module.parameters())


def test_keys_and_values_in_eight_bits_take_what_the_native_engines_do(tmp_path: Path) -> None:
    """And so more sequences fit, where their number is auto."""
    path, load = save_tiny_model(tmp_path, head_dim=64), Load(4096, 4096, 4096)
    module = tiny_model(head_dim=64)
    module.set_attn_implementation(CACHED)
    shape = replace(cache_shape(module, page_size=1), dtype=torch.bfloat16)
    seats = []
    for name in ("auto", "fp8"):
        found = count_rollout(
            RolloutConfig(kv_cache_dtype=name), ModelConfig(path=path), actor=EngineChoice(), world_size=1, element=2, load=load
        )
        assert found.token_bytes == replace(shape, kept=name).page_bytes
        seats.append(choose_rollout(found, load, free=GIB // 2).max_num_seqs)
    assert seats[1:] == pytest.approx([seats[0] * 256 / 132], abs=2)


def test_a_decoder_shares_weights_in_one_precision_on_one_rank_only(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def shares(config: RolloutConfig | None = None, actor: EngineChoice | None = None, lora: int = 0, **changes: int) -> bool:
        options = {"world_size": 1, "element": 4} | changes
        model = ModelConfig(path=path, lora_rank=lora)
        return count_rollout(config or RolloutConfig(), model, actor=actor, load=Load(30, 4, 4), **options).shares

    fsdp = EngineChoice()
    assert shares(actor=fsdp)
    assert not any([shares(actor=fsdp, element=2), shares(actor=fsdp, world_size=2), shares(actor=fsdp, lora=2), shares()])
    assert not shares(RolloutConfig(name="vllm"), fsdp)
    assert not shares(actor=EngineChoice("megatron"))


def test_a_folder_that_transformers_cannot_build_is_an_error(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "olmoe")
    with pytest.raises(DataError, match="cannot be built as value: Unrecognized configuration class"):
        count(path, head=Head.VALUE)


def large(folder: Path, role: str, tokens: int, load: Load) -> tuple[list[Model], Rollout]:
    """The models of a PPO run of the 1.5B shape on one GPU, with this role for the policy; the critic is the last."""
    Qwen2Config(**SHAPES["1.5b"], max_position_embeddings=4096).save_pretrained(folder)
    model = ModelConfig(path=str(folder))
    policy = ActorRolloutRefConfig(model=model, actor=ActorConfig(ppo_max_token_len_per_gpu=tokens))
    models, rollout = policy_needs(policy, POLICY_ROLES[role], load=load, world_size=1, element=2)
    critic = CriticConfig(model=model, ppo_max_token_len_per_gpu=tokens)
    return [*models, training_needs(critic, load=load, world_size=1, element=2)], rollout


def test_the_line_in_the_docs_is_what_is_said(tmp_path: Path) -> None:
    models, rollout = large(tmp_path, "actor_rollout_ref", 16384, Load(730, 1024, 1024))
    line = describe_plan(models, rollout, plan_memory(models, rollout, 40 * GIB), 40 * GIB)
    assert f"\npool global_pool: {line}\n" in (RESULTS.parents[1] / "docs" / "training.md").read_text()


@pytest.mark.parametrize(
    ("file", "algorithm", "stages"),
    [
        ("step_1.5b_ppo_2026-11-15.json", "ppo", ("values", "update_critic", "update_actor")),
        ("step_1.5b_2026-11-15.json", "grpo", ("update_actor",)),
    ],
)
def test_stages_were_measured_to_take_what_is_counted(tmp_path: Path, file: str, algorithm: str, stages: tuple[str, ...]) -> None:
    """Peaks on an H200 are at most what is counted, and at least 0.93 of it."""
    run = json.loads((RESULTS / file).read_text())
    given, metrics = run["arguments"], run["steps"][algorithm]["metrics"]
    rows = given["prompts"] * given["n"]
    models, rollout = large(tmp_path, "actor_rollout", given["max_tokens"], Load(given["prompt"] + given["response"], rows, rows))
    models = models if algorithm == "ppo" else models[:1]
    plans = plan_memory(models, rollout, 139 * GIB)
    assert [plan.recompute for plan in plans] == ["none"] * len(models)
    counted = stage_bytes(models, rollout, plans)
    for stage in stages:
        measured = metrics[f"perf/max_memory_allocated_gb/{stage}"]
        assert 0.93 <= measured * GIB / counted[stage] <= 1.0, stage


def test_counting_reads_no_weights(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    found = count(path)
    for file in Path(path).glob("*.safetensors"):
        file.unlink()
    assert count(path) == found


OPTIONS: dict[str, Any] = {"load": Load(28, 8, 4), "world_size": 1, "element": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("role", "lora_rank", "expected", "generates"),
    [
        ("actor", 0, {"actor": ("old_log_prob",)}, False),
        ("rollout", 0, {}, True),
        ("actor_rollout", 0, {"actor": ("old_log_prob",)}, True),
        ("ref", 0, {"ref": ("ref",)}, False),
        ("actor_rollout_ref", 0, {"actor": ("old_log_prob",), "ref": ("ref",)}, True),
        ("actor_rollout_ref", 2, {"actor": ("old_log_prob", "ref")}, True),  # the actor without its adapters
    ],
)
def test_a_role_is_counted_with_exactly_its_models(
    path: str, role: str, lora_rank: int, expected: dict[str, tuple[str, ...]], generates: bool
) -> None:
    models, rollout = policy_needs(
        ActorRolloutRefConfig(model=ModelConfig(path=path, lora_rank=lora_rank)), POLICY_ROLES[role], **OPTIONS
    )
    assert {model.name: model.passes for model in models} == expected
    assert {model.name for model in models if model.update} == expected.keys() & {"actor"}
    assert (rollout is not None) is generates
    if rollout is not None:
        assert rollout.source == ("actor" if POLICY_ROLES[role].actor else None)


def test_what_was_decided_is_what_the_configuration_then_says(path: str, tmp_path: Path) -> None:
    """For every decision: counted again, nothing is left to decide and everything is as it was decided."""
    model = ModelConfig(path=path)
    score = ModelConfig(path=save_tiny_model(tmp_path, score_head=True))
    for weights, moments, kind in itertools.product((True, False), (True, False), ("none", "selective", "full")):
        trained, frozen = MemoryPlan(weights, moments, kind), MemoryPlan(moments, False, None)
        config = place_policy(ActorRolloutRefConfig(model=model), {"actor": trained, "ref": frozen})
        (actor, ref), _ = policy_needs(config, POLICY_ROLES["actor_rollout_ref"], **OPTIONS)
        critic = training_needs(place_training(CriticConfig(model=model), trained), **OPTIONS)
        for found in (actor, critic):
            assert (found.param_offload, found.optimizer_offload, list(found.activations)) == (weights, moments, [kind])
        judge = training_needs(place_training(RewardModelConfig(model=score), frozen), **OPTIONS)
        assert (ref.param_offload, judge.param_offload) == (moments, moments)


def test_experts_larger_than_the_memory_here_are_counted(tmp_path):
    """Weights of 1 TiB in one parameter: no machine that tests gives a process that much, not even for a moment."""
    tiny_config("mixtral", hidden_size=2**14, intermediate_size=2**17, num_local_experts=64, num_hidden_layers=1).save_pretrained(
        tmp_path
    )
    built = build(ModelConfig(path=str(tmp_path)), Head.LANGUAGE_MODEL)
    assert max(parameter.nbytes for parameter in built.parameters()) == 2**40
