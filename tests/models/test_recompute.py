import math

import pytest
import torch
from helpers.tiny import tiny_model
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.models.attention import PACKED, PackedLayout
from lockstep.models.fast_layers import has_fast_layers, install_fast_layers, takes_float_residual
from lockstep.models.recompute import KINDS, activation_bytes, apply_recompute, choose_recompute, free_memory

IDS = torch.arange(2, 22)[None]


def train(kind: str) -> tuple[int, list[Tensor]]:
    """Numbers that are kept for the backward pass, beside the parameters; and the gradients."""
    model = tiny_model("llama", hidden_size=32, intermediate_size=128)
    model.set_attn_implementation(PACKED)
    apply_recompute(model, kind)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = model.model(input_ids=IDS, position_ids=IDS - 2, use_cache=False, layout=PackedLayout(torch.tensor([20])))
        loss = hidden.last_hidden_state.square().sum()
    loss.backward()
    return sum(kept.values()), [p.grad for p in model.model.parameters()]


def test_more_recomputation_keeps_less_and_changes_no_gradient() -> None:
    kept, gradients = zip(*(train(kind) for kind in KINDS), strict=True)
    assert kept[0] > 1.5 * kept[1] > 1.5 * kept[2]
    for other in gradients[1:]:
        for mine, want in zip(other, gradients[0], strict=True):
            assert torch.equal(mine, want)


def test_layers_that_are_recomputed_keep_their_fast_form_and_their_float32_residual() -> None:
    model = tiny_model("llama")
    apply_recompute(model, "full")
    assert [takes_float_residual(layer) for layer in model.model.layers] == [True, True]
    assert has_fast_layers(model)
    assert install_fast_layers(model)


def test_auto_takes_the_least_recomputation_that_fits() -> None:
    model = tiny_model("llama")
    state = 16 * sum(p.numel() for p in model.parameters())

    def chosen(kind: str, slack: int) -> str:
        room = activation_bytes(kind, 1000, layers=2, hidden=32, intermediate=48, element=4)
        return choose_recompute(model, 1000, state // 2 + math.ceil(room / 0.6) + slack, world_size=2, element=4)

    assert [chosen(kind, 2) for kind in KINDS] == list(KINDS)
    assert [chosen(kind, -2) for kind in KINDS] == ["selective", "full", "full"]
    assert choose_recompute(model, None, 1 << 60, 1, 4) == "full"


def test_what_does_not_learn_leaves_more_room() -> None:
    model = tiny_model("llama")
    size = sum(p.numel() for p in model.parameters())
    free = 4 * size + math.ceil(activation_bytes("none", 1000, layers=2, hidden=32, intermediate=48, element=2) / 0.6) + 2
    assert choose_recompute(model, 1000, free, 1, element=2) != "none"
    model.requires_grad_(False)
    assert choose_recompute(model, 1000, free, 1, element=2) == "none"


def test_what_a_model_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="enable_gradient_checkpointing=false"):
        apply_recompute(model, "full")
    for layer in model.model.layers:
        layer.feed_forward = layer.mlp
        del layer.mlp
    with pytest.raises(ConfigError, match="recompute=full"):
        apply_recompute(model, "selective")
    assert choose_recompute(model, 1, 1 << 40, 1, 4) == "none"


def test_this_machine_has_memory() -> None:
    assert 0 < free_memory(torch.device("cpu")) < 1 << 50
