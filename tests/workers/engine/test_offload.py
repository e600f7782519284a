"""Memory that moves to the host and back under tensors that stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.workers.engine.offload import Offload, move_state


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_tensors_and_their_views_are_the_same_objects_with_the_same_values_in_each_use() -> None:
    flat = torch.arange(6.0)
    view, other = flat[2:].view(2, 2), torch.tensor([7, 8])
    offload = Offload(lambda: [flat, view, other], list)
    offload.to_host()
    assert memory(flat) == memory(view) == memory(other) == 0
    with offload.in_use(), offload.in_use():
        assert torch.equal(flat, torch.arange(6.0))
        assert torch.equal(view, torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
        assert torch.equal(other, torch.tensor([7, 8]))
        view.fill_(1.0)
        offload.changed = True
    assert memory(flat) == 0
    with offload.in_use():
        assert torch.equal(flat, torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]))


def test_what_did_not_change_is_not_copied_again() -> None:
    weight = torch.zeros(3)
    offload = Offload(lambda: [weight], list)
    offload.to_host()
    with offload.in_use():
        weight.fill_(1.0)  # nobody says so
    with offload.in_use():
        assert torch.equal(weight, torch.zeros(3))


def test_gradients_that_come_and_go_move_along() -> None:
    weight, gradients = torch.zeros(3), []
    offload = Offload(lambda: [weight], lambda: gradients)
    offload.to_host()
    with offload.in_use():
        gradients.append(torch.ones(3))
    assert memory(gradients[0]) == 0
    with offload.in_use():
        assert torch.equal(gradients.pop(), torch.ones(3))


def test_the_memory_goes_back_when_a_use_fails() -> None:
    weight = torch.zeros(3)
    offload = Offload(lambda: [weight], list)
    offload.to_host()
    with pytest.raises(KeyError), offload.in_use():
        raise KeyError
    assert memory(weight) == 0


def test_the_state_moves_and_the_count_of_steps_stays() -> None:
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (2, 3)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    sum(p.sum() for p in parameters).backward()
    optimizer.step()
    move_state(optimizer, torch.device("meta"))
    for state in optimizer.state.values():
        assert {name: value.device.type for name, value in state.items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }
