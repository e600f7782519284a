from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model

from lockstep.workers.rollout.native import paged
from lockstep.workers.rollout.native.cpu import fused


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_pages_are_attended_to_alike_with_and_without_the_compiled_function(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths, so that the PyTorch way makes more than one block; log-probs within 2e-5."""
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
