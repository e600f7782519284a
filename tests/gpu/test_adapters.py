"""Adapters beside the weights (LoRA) on a GPU: the fused kernel against the layers themselves, and the sampler against the trainer."""

import pytest
import torch
import torch.distributed as dist
from helpers.rollouts import PAD, sampling
from helpers.tiny import save_tiny_model
from torch import nn

pytest.importorskip("triton")
pytest.importorskip("peft")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig
from lockstep.models import adapted
from lockstep.models.adapted import AdaptedLinear
from lockstep.models.cached_attention import CACHED
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.rollout.base import Request
from lockstep.workers.rollout.native.gpu.few_rows import partial_products
from lockstep.workers.rollout.native.gpu.fused import _joined
from lockstep.workers.rollout.native.gpu.low_rank import adapted_product
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.weight_sync.shared import SharedWeights


def joined_layers(sizes, rank, bias):
    """Adapted layers of 256 inputs whose tensors lie as `fuse_projections` lays them."""
    whole = torch.randn(sum(sizes) + rank * len(sizes), 256, device="cuda").bfloat16() / 16
    ups = 0.1 * torch.randn(sum(sizes), rank, device="cuda").bfloat16()
    biases = torch.randn(sum(sizes), device="cuda").bfloat16()
    weights, downs = whole.split([*sizes, rank * len(sizes)])[:-1], whole[sum(sizes) :].split(rank)
    layers = []
    for weight, down, up, one in zip(weights, downs, ups.split(sizes), biases.split(sizes), strict=True):
        linear = nn.Linear(1, 1, bias=bias, device="meta")
        linear.in_features, linear.out_features = 256, len(weight)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.bias = nn.Parameter(one, requires_grad=False) if bias else None
        layer = AdaptedLinear(linear, rank, 1.5)
        layer.lora_A, layer.lora_B = nn.Parameter(down, requires_grad=False), nn.Parameter(up, requires_grad=False)
        layers.append(layer)
    return layers


@pytest.mark.parametrize("rows", [1, 16, 33, 500])
@pytest.mark.parametrize("rank", [3, 8, 16, 64])
@pytest.mark.parametrize("kind", ["qkv", "gated", "one"])
@torch.no_grad()
def test_one_product_and_one_kernel_make_all_layers(rows, rank, kind):
    """Against float64, within what bfloat16 leaves."""
    torch.manual_seed(rows + rank)
    layers = joined_layers({"qkv": [256, 64, 64], "gated": [384, 384], "one": [256]}[kind], rank, bias=kind == "qkv")
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    product = partial_products if rows <= 32 else torch.nn.functional.linear
    got = adapted_product(x, layers, _joined, product, gated=kind == "gated")
    assert got is not None
    want = [layer.double()(x.double()) for layer in layers]
    whole = torch.nn.functional.silu(want[0]) * want[1] if kind == "gated" else torch.cat(want, 1)
    torch.testing.assert_close(got.double(), whole, atol=0.05, rtol=0.02)


def gap(path, model, save=None):
    """Mean difference of sampler and trainer in bfloat16, with adapters that do something; saves the model that they make."""
    spec = EngineSpec(
        model=ModelConfig(path=path, **model), head=Head.LANGUAGE_MODEL, optim=OptimConfig(), total_updates=1,
        device=torch.device("cuda", 0), seed=7, decoder_attention=CACHED,
    )  # fmt: skip
    choice = EngineChoice("fsdp2")
    choice.fsdp_config.dtype = "bfloat16"
    engine = make_engine(choice, spec)
    torch.manual_seed(3)
    for name, tensor in engine.decoder_weights():
        if name.endswith(".lora_B"):
            tensor.detach().copy_(0.01 * torch.randn(tensor.shape, device="cuda"))
    if save is not None:
        engine.save(save)
    shared = SharedWeights(engine, torch.bfloat16)
    prompts = [torch.arange(2 + i % 9, 9 + i % 9) for i in range(96)]
    with shared.borrowed():
        rollout = make_rollout(shared.decoder, RolloutConfig(max_num_seqs=64), PAD)
        rollout.own_weights = shared.keeps_copy
        done = rollout.generate([Request(p, (0, i, 0)) for i, p in enumerate(prompts)], sampling(max_tokens=40, stop_token_ids=()))
    rows = {"prompts": Ragged.from_rows(prompts), "responses": Ragged.from_rows([c.ids for c in done])}
    trained = engine.forward(DataProto.from_dict(rows), Budget(8192)).ragged("log_probs").values.cpu()
    return float((trained - torch.cat([c.log_probs for c in done])).abs().mean())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_gap_of_sampler_and_trainer_is_that_without_adapters(tmp_path, family, monkeypatch):
    """That of the same model trained whole. Adapters beside the weights are not the default on a GPU: see docs/generation_gpu.md."""
    monkeypatch.setattr(adapted, "BESIDE", ("cpu", "cuda"))
    path = save_tiny_model(
        tmp_path / "model", family, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2
    )
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        beside = gap(path, {"lora_rank": 8, "lora_alpha": 16}, tmp_path / "whole")
        plain = gap(str(tmp_path / "whole"), {})
    finally:
        dist.destroy_process_group()
    print(f"gap {family}: plain {plain:.6f}, adapters {beside:.6f}")
    assert beside <= 1.1 * plain
