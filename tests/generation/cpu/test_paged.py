from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model

from lockstep.generation.cpu import fused, paged
from lockstep.workers.rollout.base import Request


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_pages_are_attended_to_alike_with_and_without_the_compiled_function(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths; log-probs within 2e-5."""
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type])
    requests, params = make_requests(9), sampling(stop_token_ids=(), max_tokens=40)
    expected = make_rollout(path).generate(requests, params)
    for user in (paged, fused):
        monkeypatch.setattr(user, "library", lambda: None)
    rollout = make_rollout(path)
    rollout.check()
    plain = rollout.generate(requests, params)
    assert ids_of(plain) == ids_of(expected)
    for mine, theirs in zip(plain, expected, strict=True):
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_request_that_is_not_finite_harms_no_request_that_gets_its_pages(
    tmp_path: Path, model_type: str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that run after it in the same call nor those of later calls, with and without the compiled function."""
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type] | {"tie_word_embeddings": False})
    requests = [Request(torch.tensor([3 + i, 4]), (0, i, 0), max_tokens=6) for i in range(4)]
    params = sampling(temperature=0.0, stop_token_ids=())
    expected = ids_of(make_rollout(path, batch_invariant=invariant).generate(requests, params))
    bad = next(token for token in range(31, 0, -1) if all(token not in ids for ids in expected))
    poisoned = Request(torch.tensor([5] * 9 + [bad] * 11), (0, 9, 0), max_tokens=6)
    for compiled in (True, False):
        if not compiled:
            for user in (paged, fused):
                monkeypatch.setattr(user, "library", lambda: None)
        rollout = make_rollout(path, batch_invariant=invariant, max_num_seqs=2)
        rollout.module.model.embed_tokens.weight.data[bad] = torch.nan
        first, *others = rollout.generate([poisoned, *requests], params)
        assert first.finish_reason == "error"
        assert ids_of(others) == expected
        assert ids_of(rollout.generate(requests, params)) == expected
