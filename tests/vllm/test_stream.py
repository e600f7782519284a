"""Streams of real vLLM against those of the native engine, float32: greedy tokens, log-probs within 1e-4."""

import pytest
import torch
from helpers.rollouts import make_rollout, sampling
from helpers.vllm_engines import needs_vllm, text

from lockstep.backends.vllm.engine import VLLMRollout
from lockstep.workers.rollout.request import Completion, Request, Tokens
from lockstep.workers.rollout.stream import Stream

pytestmark = needs_vllm


def life(stream: Stream) -> tuple[dict[int, Completion], dict[int, list[int]]]:
    """Requests of every kind, one of which continues another, and one that is aborted."""
    greedy = sampling(temperature=0.0, max_tokens=12, stop_token_ids=())
    first = stream.add(Request(torch.arange(2, 20), (0, 0, 0), keep=True, streams=True))
    stream.add(Request(torch.tensor([5, 6, 7]), (0, 1, 0), sampling=greedy, top_log_probs=3, prompt_log_probs=True))
    stream.add(Request(torch.tensor([5, 99]), (0, 2, 0)))
    long = stream.add(Request(torch.tensor([8]), (0, 3, 0), max_tokens=450, streams=True))
    found: dict[int, Completion] = {}
    pieces: dict[int, list[int]] = {}

    def note(answer: Completion | Tokens) -> None:
        if isinstance(answer, Tokens):
            pieces.setdefault(answer.index, []).extend(answer.ids.tolist())
            if answer.index == long:
                stream.abort(long)
        else:
            found[answer.index] = answer

    for answer in stream:
        note(answer)
    stream.add(Request(torch.tensor([4, 4]), (0, 0, 0), continues=first, prompt_log_probs=True))
    stream.release(first)
    for answer in stream:
        note(answer)
    return found, pieces


def test_a_stream_gives_what_the_native_engines_gives(engine: VLLMRollout, path: str) -> None:
    params = sampling(temperature=0.0, max_tokens=10, stop_token_ids=())
    with engine.open(params) as stream:
        mine, pieces = life(stream)
        assert stream.next(0) is None
    with make_rollout(path, decode_text=text).open(params) as stream:
        theirs, _ = life(stream)
    assert sorted(mine) == sorted(theirs) == [0, 1, 2, 3, 4]
    assert mine[3].finish_reason == "abort"
    assert 0 < len(mine[3].ids) < 450
    for index in (0, 1, 2, 4):
        a, b = mine[index], theirs[index]
        assert (a.ids.tolist(), a.finish_reason, a.error) == (b.ids.tolist(), b.finish_reason, b.error)
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-4, rtol=0)
    for index in (1, 4):
        torch.testing.assert_close(mine[index].prompt_log_probs, theirs[index].prompt_log_probs, atol=1e-4, rtol=0, equal_nan=True)
    (tops, expected) = (completion[1].top_log_probs for completion in (mine, theirs))
    assert tops is not None
    assert len(tops) == 12
    for own, other in zip(tops, expected or [], strict=True):
        assert [token for token, _ in own] == [token for token, _ in other]
        assert [value for _, value in own] == pytest.approx([value for _, value in other], abs=1e-4)
    for index in (0, 3):
        assert pieces[index] == mine[index].ids.tolist()
