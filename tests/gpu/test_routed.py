"""What routers choose on a GPU is kept with each completion (router_replay), and used by the trainer."""

import pytest
import torch
import torch.distributed as dist
from helpers.mixtures import MIXTURES, chosen_experts
from helpers.rollouts import PAD, ids_of, sampling
from helpers.sampled import gap
from helpers.tiny import save_tiny_model, tiny_model

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig
from lockstep.errors import ConfigError
from lockstep.generation.engine import NativeRollout
from lockstep.generation.gpu import backend as gpu_backend
from lockstep.generation.gpu.backend import GPUBackend
from lockstep.models.load import Head, load_model, share_structure
from lockstep.models.packing import Budget
from lockstep.models.routers import NOT_RECORDED
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.fsdp import make as fsdp_make
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.rollout.base import response_columns
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.rollout.request import Request

WIDE = {"hidden_size": 128, "head_dim": 32}


def rollout(path, dtype=torch.bfloat16, replays=True, **config):
    model = load_model(ModelConfig(path=path), Head.LANGUAGE_MODEL, seed=0).to("cuda", dtype)
    module = share_structure(model, NativeRollout.attention)
    return make_rollout(module, RolloutConfig(router_replay=replays, **config), PAD)


def groups():
    """Three samples of each of four prompts, one longer than a page."""
    prompts = [torch.arange(2, 2 + length) % 30 + 2 for length in (1, 5, 63, 70)]
    return [Request(prompt, (3, number, sample)) for number, prompt in enumerate(prompts) for sample in range(3)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("pages", [None, 9])
def test_every_token_has_its_experts(tmp_path, monkeypatch, family, pages):
    """Nearly always those of float32; prompts in pieces and shared; with few pages samples are preempted. Tokens are those without."""
    if pages is not None:
        monkeypatch.setattr(GPUBackend, "most_pages", lambda self: pages)
    changes = MIXTURES[family] | WIDE | {"max_position_embeddings": 256}
    path = save_tiny_model(tmp_path, family, **changes)
    requests, params = groups(), sampling(stop_token_ids=(1, 9), max_tokens=40)
    config = {"max_num_batched_tokens": 48, "max_num_seqs": 8}
    completions = rollout(path, **config).generate(requests, params)
    assert ids_of(completions) == ids_of(rollout(path, replays=False, **config).generate(requests, params))
    model = tiny_model(family, **changes)
    same = []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.cat([request.prompt_ids, completion.ids])
        assert completion.experts is not None
        assert completion.experts.shape == (len(ids), 4)
        assert (completion.experts[-1] == NOT_RECORDED).all()
        assert (completion.experts[:-1] >= 0).all()
        want, got = (x[:-1].view(-1, 2, 2).sort(-1).values for x in (chosen_experts(model, ids), completion.experts))
        same.append((want == got).all(-1).float().flatten())
    assert torch.cat(same).mean() > 0.95


def log_prob_gap(path, requests, completions, replays):
    """|trainer in float32 - sampler| of each token."""
    columns = response_columns(completions).select(["responses", "rollout_log_probs", *(["experts"] if replays else [])], [])
    data = DataProto.from_dict({"prompts": Ragged.from_rows([request.prompt_ids for request in requests])}).union(columns)
    spec = EngineSpec(
        model=ModelConfig(path=path), head=Head.LANGUAGE_MODEL, optim=OptimConfig(), total_updates=1,
        device=torch.device("cuda", 0), seed=7,
    )  # fmt: skip
    choice = EngineChoice("fsdp2")
    choice.fsdp_config.dtype = "float32"
    found = make_engine(choice, spec).forward(data, Budget(4_000)).ragged("log_probs").values.cpu()
    return (found - data.ragged("rollout_log_probs").values).abs()


def test_log_probs_are_closer_to_a_float32_trainers_with_the_samplers_experts(tmp_path):
    changes = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
    path = save_tiny_model(tmp_path, "qwen3_moe", **changes, **WIDE, max_position_embeddings=256)
    requests = groups()
    completions = rollout(path, max_num_seqs=16).generate(requests, sampling(stop_token_ids=(), max_tokens=60))
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        without, with_experts = (log_prob_gap(path, requests, completions, replays) for replays in (False, True))
    finally:
        dist.destroy_process_group()
    print(
        f"gap {without.mean():.4f}, max {without.max():.3f}; with the sampler's {with_experts.mean():.4f}, {with_experts.max():.3f}"
    )
    assert with_experts.max() < 0.5 * without.max()
    assert with_experts.mean() < without.mean()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_trainer_and_sampler_round_alike(tmp_path, monkeypatch, family):
    """In bfloat16 on both sides routers seldom disagree, which they do where both are transformers' layers."""
    changes = {
        "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        "qwen3_moe": {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 128,
            "head_dim": 64,
            "norm_topk_prob": True,
        },
    }[family]
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = save_tiny_model(tmp_path / "model", family, **shape, **changes)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own = gap(path, {})
        monkeypatch.setattr(fsdp_make, "install_fast_layers", lambda model: False)
        monkeypatch.setattr(gpu_backend, "is_fusable", lambda config, mixtures: False)
        generic = gap(path, {})
    finally:
        dist.destroy_process_group()
    print(f"gap {family}: {own:.5f}, of transformers' layers {generic:.5f}")
    assert own < 0.2 * generic


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"routers of olmoe chose on a CPU only"):
        rollout(save_tiny_model(tmp_path / "a", "olmoe", **MIXTURES["olmoe"]))
    engine = rollout(save_tiny_model(tmp_path / "b", "mixtral", **MIXTURES["mixtral"]), torch.float32)
    with pytest.raises(ConfigError, match=r"router_replay=true on a GPU is for Mixtral and Qwen3-MoE in bfloat16"):
        engine.generate(groups()[:1], sampling())
