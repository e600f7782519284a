from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model

from lockstep.generation.cpu import fused_backend, paged_attention
from lockstep.generation.cpu.kernels import Library, Pages, library
from lockstep.workers.rollout.request import Request


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_pages_are_attended_to_alike_with_and_without_the_compiled_function(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths; log-probs within 2e-5."""
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type])
    requests = make_requests(9)
    params = sampling(stop_token_ids=(), max_tokens=40)
    expected = make_rollout(path).generate(requests, params)
    for user in (paged_attention, fused_backend):
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
            for user in (paged_attention, fused_backend):
                monkeypatch.setattr(user, "library", lambda: None)
        rollout = make_rollout(path, batch_invariant=invariant, max_num_seqs=2)
        rollout.module.model.embed_tokens.weight.data[bad] = torch.nan
        first, *others = rollout.generate([poisoned, *requests], params)
        assert first.finish_reason == "error"
        assert ids_of(others) == expected
        assert ids_of(rollout.generate(requests, params)) == expected


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "slots"),
    [(4, 2, 8, 3), (3, 2, 8, 4), (3, 1, 8, 3), (3, 2, 16, 3)],
    ids=["more keys", "more slots", "fewer heads", "larger heads"],
)
def test_keys_that_do_not_fit_the_pages_are_not_stored(tokens: int, heads: int, dim: int, slots: int) -> None:
    """The C function writes where the numbers lead it."""
    pages = Pages(torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8))
    new = torch.ones(tokens, heads, dim)
    with pytest.raises(ValueError, match=rf"\[{tokens}, {heads}, {dim}\].*{slots} slots.*2 heads of 8"):
        paged_attention.store(compiled(), new, new, torch.arange(slots), pages)
    assert not pages.keys.any()


@pytest.mark.parametrize("slots", [[0, 32], [-1, 3]])
def test_slots_outside_the_pages_are_not_written(slots: list[int]) -> None:
    pages = Pages(torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8))
    new = torch.ones(2, 2, 8)
    with pytest.raises(ValueError, match=f"slots {slots[0]} to {slots[1]} are outside 2 pages of 16"):
        paged_attention.store(compiled(), new, new, torch.tensor(slots), pages)
    paged_attention.store(compiled(), new, new, torch.tensor([0, 31]), pages)
    assert pages.keys.sum() == pages.values.sum() == new.sum()


def compiled() -> Library:
    found = library()
    if found is None:
        pytest.skip("needs a C compiler")
    return found
