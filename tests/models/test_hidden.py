"""Hidden states handed out of a model, against the logits that it makes itself."""

from functools import partial

import pytest
import torch
from helpers.families import FAMILIES
from helpers.tiny import tiny_model
from torch import Tensor, nn

from lockstep.models.attention import PACKED, PackedLayout
from lockstep.models.chunked_head import chunked_log_probs
from lockstep.models.hidden import hand_out_hidden, logits_are_the_layers
from lockstep.models.outputs import logits_log_probs

PLAIN_LOGITS = {family: family not in ("gemma2",) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_changes_its_logits_afterwards_is_found_out(family: str) -> None:
    model = tiny_model(family, **FAMILIES[family])
    model.set_attn_implementation(PACKED)
    assert hand_out_hidden(model)
    assert logits_are_the_layers(model, model.get_output_embeddings(), torch.device("cpu")) == PLAIN_LOGITS[family]


@pytest.mark.parametrize("changes", [{"logits_scaling": 4.0}, {"logits_scaling": 1.0}])
def test_scaled_logits_are_found_out(changes: dict[str, float]) -> None:
    model = tiny_model("granite", **changes)
    model.set_attn_implementation(PACKED)
    assert hand_out_hidden(model)
    layer = model.get_output_embeddings()
    assert logits_are_the_layers(model, layer, torch.device("cpu")) == (changes["logits_scaling"] == 1.0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt_neox"])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_a_model_gives_the_same_numbers_and_gradients_with_and_without_logits(family: str, entropy_grad: bool) -> None:
    """float32: 1e-5 of the largest gradient. qwen3 ties its embeddings, phi's head has a bias."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 32, (1, 11), generator=generator)
    positions = torch.cat([torch.arange(7), torch.arange(4)])[None]
    predict_at = torch.tensor([2, 3, 4, 5, 8, 9])
    targets, weights = ids[0, predict_at + 1], torch.randn(2, 6, generator=generator)
    inputs = {"input_ids": ids, "position_ids": positions, "layout": PackedLayout(torch.tensor([7, 4])), "use_cache": False}

    def run(without_logits: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        model = tiny_model(family, **FAMILIES[family])
        model.set_attn_implementation(PACKED)
        if without_logits:
            hand_out_hidden(model)
            read = partial(chunked_log_probs, targets, 0.7, entropy_grad)
            log_probs, entropy, _ = model(**inputs, read=read, read_at=predict_at)
        else:
            logits = model(**inputs, logits_to_keep=predict_at).logits[0]
            log_probs, entropy, _ = logits_log_probs(logits, targets, 0.7, entropy_grad)
        assert entropy.requires_grad == entropy_grad
        (weights[0] * log_probs + weights[1] * entropy).sum().backward()
        return log_probs.detach(), entropy.detach(), [p.grad for p in model.parameters()]

    mine, want = run(True), run(False)
    torch.testing.assert_close(mine[0], want[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(mine[1], want[1], atol=1e-5, rtol=0)
    for a, b in zip(mine[2], want[2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * b.abs().max().item() + 1e-7, rtol=0)


def test_the_model_still_gives_logits_to_who_does_not_read() -> None:
    model = tiny_model("llama")
    ids = torch.arange(2, 9)[None]
    before, name = model(input_ids=ids).logits, type(model).__name__
    assert hand_out_hidden(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert type(model).__name__ == name


def test_an_output_layer_that_is_not_plain_keeps_its_logits() -> None:
    class Other(nn.Linear):
        pass

    model = tiny_model("llama")
    model.get_output_embeddings().__class__ = Other
    assert not hand_out_hidden(model)
