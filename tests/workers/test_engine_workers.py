"""The two worker classes in one process, through a LocalWorkerGroup."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.distributed import run_distributed
from helpers.groups import TIMEOUTS
from helpers.rollouts import make_requests, sampling
from helpers.tiny import save_tiny_model, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.kl import make_kl_controller
from lockstep.algorithms.rows import Rows
from lockstep.config.actor_rollout_ref import ActorConfig, ActorRolloutRefConfig, RolloutConfig
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.critic import CriticConfig
from lockstep.config.engine import FSDPConfig, ModelConfig, OptimConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.embedded.task import make_tokenizer
from lockstep.errors import NumericalError
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.ppo import stages
from lockstep.trainer.ppo.algorithm import Estimation
from lockstep.trainer.ppo.roles import WeightExchange
from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from lockstep.workers.training_worker import on_last_token
from lockstep.workers.weight_sync.source import SharedWeights

TEMPERATURE = 0.8


def policy_config(path: str, **rollout: Any) -> ActorRolloutRefConfig:
    return ActorRolloutRefConfig(
        model=ModelConfig(path=path),
        actor=ActorConfig(optim=OptimConfig(lr=1e-2)),
        rollout=RolloutConfig(temperature=TEMPERATURE, **rollout),
    )


def policy_class(path: str, role: str, **rollout: Any) -> ClassWithInitArgs:
    return ClassWithInitArgs(
        ActorRolloutRefWorker,
        policy_config(path, **rollout),
        role,
        seed=1,
        pad_token_id=0,
        total_updates=10,
        max_response_length=12,
    )


@contextmanager
def workers(**classes: ClassWithInitArgs) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The views of the roles, and the workers behind them; models are loaded."""
    with LocalWorkerGroup(ResourcePool([1]), classes, **TIMEOUTS) as group:
        roles = group.spawn()
        for role in roles.values():
            role.init_model()
        yield roles, group._host.workers


def prompts() -> DataProto:
    requests = make_requests(6)
    return DataProto.from_dict(
        {"prompts": Ragged.from_rows([request.prompt_ids for request in requests])},
        {"index": [request.key[1] for request in requests], "sample": [request.key[2] for request in requests]},
    )


def generate(role: Any, step: int = 3) -> DataProto:
    batch = prompts()
    return batch.union(role.generate_sequences(batch, sampling(temperature=TEMPERATURE), step))


def denominators_of(batch: DataProto) -> Denominators:
    mask = batch.ragged("response_mask")
    return Denominators.of(mask.values, Rows(mask.lengths))


def learn(role: Any, batch: DataProto) -> dict[str, float]:
    """One update that makes the batch's responses likelier or less likely by turns."""
    responses = batch.ragged("responses")
    signs = torch.cat([torch.full((int(n),), (-1.0) ** i) for i, n in enumerate(responses.lengths)])
    rows = batch.select(["prompts", "responses", "response_mask"], [])
    rows.set("advantages", responses.like(signs))
    rows.set("old_log_probs", batch.ragged("rollout_log_probs"))
    return values(merge_metrics(role.update_actor(rows, denominators_of(batch))))


@pytest.mark.parametrize(
    ("role", "parts"),
    [
        ("actor", {"actor"}),
        ("rollout", {"rollout"}),
        ("actor_rollout", {"actor", "rollout"}),
        ("ref", {"ref"}),
        ("actor_rollout_ref", {"actor", "rollout", "ref"}),
    ],
)
def test_a_role_builds_exactly_its_parts(tmp_path: Path, role: str, parts: set[str]) -> None:
    path = save_tiny_model(tmp_path)
    with workers(policy=policy_class(path, role)) as (_, inside):
        worker = inside["policy"]
        assert {part for part in ("actor", "rollout", "ref") if hasattr(worker, part)} == parts
        if "rollout" in parts:
            assert isinstance(getattr(worker.rollout.borrowed, "__self__", None), SharedWeights) is ("actor" in parts)
        if "ref" in parts:
            assert not any(parameter.requires_grad for parameter in worker.ref.engine.module.parameters())


def test_the_engine_is_called_by_the_workers_method_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the trainer's call and the engine's method: the group's one frame and the worker's method."""
    with workers(policy=policy_class(save_tiny_model(tmp_path), "actor_rollout")) as (roles, inside):
        batch = generate(roles["policy"])
        engine, stacks = inside["policy"].actor.engine, []
        forward_backward = engine.forward_backward

        def watched(*args: Any) -> Any:
            stacks.append([frame.name for frame in reversed(traceback.extract_stack()[:-1])][:3])
            return forward_backward(*args)

        monkeypatch.setattr(engine, "forward_backward", watched)
        learn(roles["policy"], batch)
    assert stacks == [["update_actor", "call", "learn"]]


def test_a_role_that_is_not_known_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="role='teacher' is not known"):
        policy_class("nowhere", "teacher")()
    with pytest.raises(ValueError, match="role='judge' is not known"):
        TrainingWorker(CriticConfig(), "judge", seed=0)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_a_hybrid_worker_generates_what_its_actor_then_says(tmp_path: Path, name: str) -> None:
    """Sampled log-probs are the actor's within 2e-5, before and after an update; the reference stays where it was."""
    path = save_tiny_model(tmp_path)
    with workers(policy=policy_class(path, "actor_rollout_ref", name=name)) as (roles, inside):
        policy = roles["policy"]
        reference = None
        for version in (0, 1):
            batch = generate(policy)
            log_probs = policy.compute_log_prob(batch)
            assert set(log_probs.columns) == {"old_log_probs", "entropys"}
            torch.testing.assert_close(
                batch.ragged("rollout_log_probs").values, log_probs.ragged("old_log_probs").values, atol=2e-5, rtol=0
            )
            assert inside["policy"].rollout.engine.version == version
            assert set(batch.non_tensor_batch["finish_reason"]) <= {"stop", "length"}
            assert batch.ragged("response_mask").values.all()
            reference = reference if reference is not None else batch
            metrics = learn(policy, batch)
            assert metrics["actor/lr"] == 1e-2
            assert metrics["actor/grad_norm"] > 0
            assert abs(metrics["actor/ppo_kl"]) < 1e-5, "the first update of a batch starts where it was sampled"
        assert reference is not None
        ref = policy.compute_ref_log_prob(reference).ragged("ref_log_prob").values
        torch.testing.assert_close(ref, reference.ragged("rollout_log_probs").values, atol=2e-5, rtol=0)
        moved = policy.compute_log_prob(reference).ragged("old_log_probs").values
        assert (moved - ref).abs().max() > 1e-2


def test_a_rollout_of_its_own_follows_the_actor(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    with workers(
        actor=policy_class(path, "actor"), rollout=policy_class(path, "rollout"), hybrid=policy_class(path, "actor_rollout")
    ) as (
        roles,
        inside,
    ):
        actor, rollout, hybrid = (roles[name] for name in ("actor", "rollout", "hybrid"))
        before = generate(rollout)
        assert before.ragged("responses").equal(generate(hybrid).ragged("responses"))
        learn(actor, before)
        learn(hybrid, before)
        assert generate(rollout).ragged("responses").equal(before.ragged("responses"))
        WeightExchange(actor, rollout, RolloutConfig(), same_process=True, cuda=False).sync()
        after = generate(rollout)
        assert not after.ragged("responses").equal(before.ragged("responses"))
        assert after.ragged("responses").equal(generate(hybrid).ragged("responses"))
        assert inside["rollout"].rollout.engine.version == 1


def test_a_policy_checkpoint_restores_generation(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    with workers(policy=policy_class(path, "actor_rollout")) as (roles, _):
        policy = roles["policy"]
        before = generate(policy)
        policy.save_checkpoint(str(tmp_path / "saved"))
        learn(policy, before)
        assert not generate(policy).ragged("responses").equal(before.ragged("responses"))
        policy.load_checkpoint(str(tmp_path / "saved"))
        assert generate(policy).ragged("responses").equal(before.ragged("responses"))


def test_a_request_that_fails_is_an_empty_response_and_a_batch_of_them_an_error(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    with workers(policy=policy_class(path, "actor_rollout")) as (roles, _):
        batch = prompts()
        rows = list(batch.ragged("prompts").rows())
        rows[2] = torch.tensor([99])
        batch.set("prompts", Ragged.from_rows(rows))
        out = roles["policy"].generate_sequences(batch, sampling(temperature=TEMPERATURE), 3)
        assert out.non_tensor_batch["finish_reason"][2] == "error"
        for name in ("responses", "response_mask", "rollout_log_probs"):
            lengths = out.ragged(name).lengths.tolist()
            assert lengths[2] == 0
            assert all(length > 0 for row, length in enumerate(lengths) if row != 2)
        batch = batch.union(out)
        assert roles["policy"].compute_log_prob(batch).ragged("old_log_probs").lengths[2] == 0
        learn(roles["policy"], batch)
        batch.set("prompts", Ragged.from_rows([[99]] * 6))
        with pytest.raises(NumericalError, match=r"no request of the batch has a response; the first: request \(3, 10, 0\)"):
            roles["policy"].generate_sequences(batch.select(["prompts"]), sampling(), 3)


def test_stop_strings_use_the_models_tokenizer(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    tokenizer = make_tokenizer()
    with workers(policy=policy_class(path, "actor_rollout", stop=["never there"])) as (roles, _):
        free = roles["policy"].generate_sequences(prompts(), sampling(stop_token_ids=()), 3).ragged("responses").rows()
        target = tokenizer.decode(free[0].tolist()[3:5])
        params = sampling(stop_token_ids=(), stop=(target,))
        stopped = roles["policy"].generate_sequences(prompts(), params, 3)
    text = tokenizer.decode(stopped.ragged("responses").rows()[0].tolist())
    assert text.endswith(target)
    assert len(stopped.ragged("responses").rows()[0]) <= 5
    assert stopped.non_tensor_batch["finish_reason"][0] == "stop"


@pytest.mark.usefixtures("nothing_frozen")
def test_a_worker_leaves_what_is_loaded_out_of_its_collections(tmp_path: Path) -> None:
    with workers(policy=policy_class(save_tiny_model(tmp_path), "actor_rollout")) as (roles, there):
        module = there["policy"].actor.engine.module
        assert any(one is module for one in gc.get_objects())
        roles["policy"].freeze_objects()
        assert not any(one is module for one in gc.get_objects())


def living_tensors() -> tuple[int, int]:
    """How many tensors this process has, and their bytes, each storage once."""
    gc.collect()
    count, storages = 0, {}
    for thing in gc.get_objects():
        # Not isinstance: it asks lazy modules for their class, which loads them.
        if type(thing) in (torch.Tensor, torch.nn.Parameter, DTensor) and not thing.is_meta:
            count += 1
            local = thing.to_local() if type(thing) is DTensor else thing
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return count, sum(storages.values())


def falls_to(most: int) -> bool:
    """Whether tensors have so many bytes soon: a thread of gloo's lets go of those of a collective a moment after it has ended."""
    deadline = time.monotonic() + 10.0
    while living_tensors()[1] > most:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("keep", "offload", "switches"),
    [(False, False, 200), (False, True, 200), (True, False, 20)],
    ids=["cache given back", "weights and moments offloaded", "cache kept"],
)
def test_two_hundred_switches_between_generating_and_updating_take_no_memory(
    tmp_path: Path, keep: bool, offload: bool, switches: int
) -> None:
    """Live tensors after the third switch and after the last: within 20 of 250, and within 1 KiB, where the weights have 70. In the second
    half the process itself grows by less than 4 MiB (the allocator settles): 40 KiB a switch, where a copy of the weights would be 70."""
    path = save_tiny_model(tmp_path)
    params = sampling(temperature=TEMPERATURE, max_tokens=3)
    policy = policy_class(path, "actor_rollout", free_cache_engine=not keep)
    policy.args[0].actor.fsdp_config = FSDPConfig(param_offload=offload, optimizer_offload=offload)
    process = psutil.Process()
    with workers(policy=policy) as (roles, inside):
        worker = inside["policy"]
        tensors, resident = [], []
        for switch in range(switches):
            batch = prompts().slice(0, 2)
            batch = batch.union(roles["policy"].generate_sequences(batch, params, switch))
            assert (worker.rollout.engine.backend.num_pages > 0) is keep
            assert all(parameter.is_meta for parameter in worker.rollout.engine.module.parameters())
            learn(roles["policy"], batch)
            if switch in (2, switches - 1):
                tensors.append(living_tensors())
            if switch in (switches // 2, switches - 1):
                resident.append(process.memory_info().rss)
        assert worker.rollout.engine.version == switches
    (first_count, first_bytes), (last_count, last_bytes) = tensors
    assert abs(last_count - first_count) < 20
    assert abs(last_bytes - first_bytes) < 1024
    assert resident[1] - resident[0] < 4 << 20


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_sharded_ranks_generate_their_shares_and_give_the_gathered_weights_back(tmp_path: Path, strategy: str) -> None:
    """Two ranks generate what one does, before and after an update; whole weights and cache exist only while they generate."""
    path = save_tiny_model(tmp_path)
    config = policy_config(path)
    config.actor.strategy = strategy

    def rank() -> tuple[list[list[int]], list[bool]]:
        # Not through a worker group: the process group exists already.
        worker = ActorRolloutRefWorker(config, "actor_rollout", seed=1, pad_token_id=0, total_updates=10, max_response_length=12)
        worker.init_model()
        number, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        released, found = [], []
        for step in (3, 4):
            rows = prompts()
            share = rows.select_idxs(list(range(number, len(rows), count)))
            _, before = living_tensors()
            out = worker.generate_sequences(share, sampling(temperature=TEMPERATURE), step)
            found += [row.tolist() for row in out.ragged("responses").rows()]
            del out
            released.append(falls_to(before + 4096))
            released.append(worker.rollout.engine.backend.num_pages == 0)
        return found, released

    ((whole, fine),) = run_distributed(rank, 1)
    shares = run_distributed(rank, 2)
    half = len(whole) // 2
    for step in range(2):
        expected = whole[step * half : (step + 1) * half]
        for number, (found, released) in enumerate(shares):
            assert found[step * 3 : (step + 1) * 3] == expected[number::2]
            assert all(released)
    assert all(fine)


def test_a_critic_computes_values_and_learns_them(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    config = CriticConfig(model=ModelConfig(path=path), optim=OptimConfig(lr=1e-2), cliprange_value=100.0)
    batch = prompts()
    responses = Ragged.from_rows([torch.arange(2, 2 + n) for n in (3, 1, 0, 4, 2, 5)])
    batch.set("responses", responses)
    batch.set("response_mask", responses.like(torch.ones_like(responses.values)))
    batch.set("returns", responses.like(torch.linspace(-1, 1, len(responses.values))))
    critic = ClassWithInitArgs(TrainingWorker, config, "critic", seed=1, total_updates=10)
    with workers(critic=critic) as (roles, _):
        losses = []
        for _ in range(8):
            values_now = roles["critic"].compute_values(batch)
            assert set(values_now.columns) == {"values"}
            batch.set("values", values_now.ragged("values"))
            expected = 0.5 * (batch.ragged("values").values - batch.ragged("returns").values).square().mean().item()
            metrics = values(merge_metrics(roles["critic"].update_critic(batch, denominators_of(batch))))
            assert metrics["critic/vf_loss"] == pytest.approx(expected, rel=1e-4)
            losses.append(expected)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("skips", [False, True], ids=["stops", "skips"])
def test_values_that_come_with_an_update_are_those_of_a_pass_before_it(tmp_path: Path, skips: bool) -> None:
    """Two critics of one model take three steps, one with a pass for the values before each, in micro-batches of two rows: values and
    losses within 1e-6, in float32."""
    config = CriticConfig(
        model=ModelConfig(path=save_tiny_model(tmp_path)), optim=OptimConfig(lr=1e-2), ppo_micro_batch_size_per_gpu=2
    )
    batch, discounts = prompts(), (0.95, 0.9)
    responses = Ragged.from_rows([torch.arange(2, 2 + n) for n in (3, 1, 0, 4, 2, 5)])
    batch.set("responses", responses)
    batch.set("response_mask", responses.like(torch.tensor([1, 0, 1] + [1] * 12)))
    batch.set("token_level_scores", on_last_token(torch.linspace(-1, 1, 6), responses))
    estimation = Estimation.of(AlgorithmConfig(gamma=discounts[0], lam=discounts[1]))
    assert estimation.of_values == discounts
    classes = {name: ClassWithInitArgs(TrainingWorker, config, "critic", seed=1, total_updates=10) for name in ("one", "two")}
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["index"]
    with workers(**classes) as (roles, hosted):
        for worker in hosted.values():
            worker.skips_nonfinite = skips
        for _ in range(3):
            one, two = (batch.select_idxs(range(6)) for _ in range(2))
            stages.shape_rewards(one, estimation, make_kl_controller("fixed", 0.0, 0.1, 1000))
            found = stages.learn_values(roles["one"], one, estimation)
            stages.values(roles["two"], two)
            stages.shape_rewards(two, estimation, make_kl_controller("fixed", 0.0, 0.1, 1000))
            stages.estimate(two, estimation)
            wanted = stages.update_critic(roles["two"], two, [torch.arange(6)])
            torch.testing.assert_close(one.ragged("values").values, two.ragged("values").values, rtol=0, atol=1e-6)
            for name in ("critic/vf_loss", "critic/grad_norm", "critic/vpred_mean", "critic/vf_clipfrac"):
                assert found[name] == pytest.approx(wanted[name], abs=1e-6), name
            assert "metrics" not in one.meta_info


def reward_model(path: str) -> ClassWithInitArgs:
    return ClassWithInitArgs(TrainingWorker, RewardModelConfig(model=ModelConfig(path=path)), "rm", seed=1)


def test_a_reward_model_scores_the_conversation_in_its_own_template(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, score_head=True)
    data = DataProto.from_dict(
        {"responses": Ragged.from_rows([[9, 9, 9], [], [9]], dtype=torch.int64)},
        {
            "raw_prompt": [[{"role": "user", "content": "abc"}], "abc", "dd"],
            "response_text": ["cba", "cba", "dd"],
        },
    )
    with workers(rm=reward_model(path)) as (roles, _):
        scores = roles["rm"].compute_rm_score(data).ragged("rm_scores")
    tokenizer, model = make_tokenizer(), AutoModelForSequenceClassification.from_pretrained(path)
    texts = ["<user>abc<assistant>cba<eos>", "<user>abc<assistant>cba<eos>", "<user>dd<assistant>dd<eos>"]
    with torch.no_grad():
        expected = [model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in texts]
    assert scores[0].tolist() == pytest.approx([0, 0, expected[0]], abs=1e-5)
    assert scores[1].tolist() == []
    assert scores[2].tolist() == pytest.approx([expected[2]], abs=1e-5)


def test_rendering_without_a_chat_template_joins_the_texts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tiny_model(score_head=True).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with workers(rm=reward_model(str(tmp_path))) as (_, inside):
        render = inside["rm"].render
        assert render("ab", "c") == tokenizer("abc<eos>")["input_ids"]
        messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "d"}]
        assert render(messages, "c") == tokenizer("ab\ndc<eos>")["input_ids"]
        assert messages == [{"role": "user", "content": "ab"}, {"role": "user", "content": "d"}]


def test_rendering_leaves_the_prompt_as_it_was(tmp_path: Path) -> None:
    with workers(rm=reward_model(save_tiny_model(tmp_path, score_head=True))) as (_, inside):
        messages = [{"role": "user", "content": "ab"}]
        assert inside["rm"].render(messages, "c") == make_tokenizer()("<user>ab<assistant>c<eos>")["input_ids"]
        assert messages == [{"role": "user", "content": "ab"}]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_a_score_lies_on_the_last_token_of_its_row(lengths: list[int]) -> None:
    scores = torch.arange(1, len(lengths) + 1).double()
    column = on_last_token(scores, Ragged.from_rows([[7] * n for n in lengths], dtype=torch.int64))
    expected = [[0.0] * (n - 1) + [float(i + 1)] if n else [] for i, n in enumerate(lengths)]
    assert [row.tolist() for row in column.rows()] == expected
    assert column.values.dtype == torch.float32


def test_the_reference_of_a_policy_with_adapters_is_the_policy_without_them(tmp_path: Path) -> None:
    """No second model is made; the sampler's log-probs are those of the merged weights, within 2e-5."""
    path = save_tiny_model(tmp_path)
    adapted, plain = policy_class(path, "actor_rollout_ref"), policy_class(path, "ref")
    adapted.args[0].model = ModelConfig(path=path, lora_rank=4, lora_alpha=8)
    with workers(policy=adapted, reference=plain) as (roles, inside):
        policy = roles["policy"]
        assert inside["policy"].ref.engine is inside["policy"].actor.engine
        batch = generate(policy)
        for _ in range(2):
            learn(policy, batch)
        again = generate(policy)
        own, reference = policy.compute_log_prob(again), policy.compute_ref_log_prob(again)
        wanted = roles["reference"].compute_ref_log_prob(again)
    torch.testing.assert_close(again.ragged("rollout_log_probs").values, own.ragged("old_log_probs").values, atol=2e-5, rtol=0)
    torch.testing.assert_close(reference.ragged("ref_log_prob").values, wanted.ragged("ref_log_prob").values, atol=2e-5, rtol=0)
    assert (own.ragged("old_log_probs").values - reference.ragged("ref_log_prob").values).abs().max() > 1e-3
