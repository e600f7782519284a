import pytest
import torch
from helpers.tiny import tiny_model

from lockstep.errors import WeightSyncError
from lockstep.workers.weight_sync.module import copy_weights


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_copied_weights_make_the_same_model(tied: bool) -> None:
    source, target = tiny_model(seed=1, tie_word_embeddings=tied), tiny_model(seed=2, tie_word_embeddings=tied)
    with torch.no_grad():
        copy_weights(target, source.named_parameters())
    ids = torch.arange(2, 9)[None]
    assert torch.equal(target(ids).logits, source(ids).logits)
    assert (target.lm_head.weight is target.model.embed_tokens.weight) is tied


def test_a_copy_that_leaves_a_parameter_out_is_refused() -> None:
    model = tiny_model()
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters() if name != "model.norm.weight"]
    with pytest.raises(WeightSyncError, match=r"left 1 parameters out, first \['model.norm.weight'\]"):
        copy_weights(model, weights)
