"""Streams of real engines on tiny models: what comes, in which form, from which thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import FAMILIES
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model, tiny_model

from lockstep.errors import ConfigError, WeightSyncError
from lockstep.workers.rollout.request import Completion, Request, Tokens
from lockstep.workers.rollout.stream import Stream

PARAMS = sampling(max_tokens=12, stop_token_ids=())


def drained(stream: Stream) -> dict[int, Completion]:
    return {answer.index: answer for answer in stream if isinstance(answer, Completion)}


def conversation(engine: Any, turns: int, keep: bool, **changes: Any) -> list[Completion]:
    """Three conversations of some turns, kept in the stream or sent again as whole prompts with the same random numbers."""
    prompts = [torch.arange(2, 2 + length) % 30 + 2 for length in (5, 16, 21)]
    answers: list[Completion] = []
    with engine.open(sampling(max_tokens=6, stop_token_ids=(), **changes)) as stream:
        last: dict[int, int] = {}
        for _ in range(turns):
            for number, prompt in enumerate(prompts):
                new = prompt if number not in last else torch.tensor([7, 8, 9])
                before = last.get(number) if keep else None
                index = stream.add(
                    Request(new if keep or number not in last else prompt, (0, number, 0), keep=keep, continues=before)
                )
                if before is not None:
                    stream.release(before)
                last[number] = index
            found = drained(stream)
            answers += [found[index] for index in last.values()]
            if not keep:
                prompts = [torch.cat([p, found[last[n]].ids, torch.tensor([7, 8, 9])]) for n, p in enumerate(prompts)]
        if keep:
            for index in last.values():
                stream.release(index)
        assert stream.num_running == stream.num_waiting == 0
        assert stream.next(0) is None
    return answers


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_conversation_that_is_kept_gives_what_it_gives_computed_anew(tmp_path: Path, model_type: str) -> None:
    """Greedy, so that positions do not matter. Bit for bit where the C functions compute (llama), else within 2e-5."""
    path = save_tiny_model(tmp_path, model_type, **FAMILIES.get(model_type, {}))
    kept = conversation(make_rollout(path), 3, keep=True, temperature=0.0)
    anew = conversation(make_rollout(path), 3, keep=False, temperature=0.0)
    assert ids_of(kept) == ids_of(anew)
    tolerance = 0.0 if model_type == "llama" else 2e-5
    for mine, theirs in zip(kept, anew, strict=True):
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=tolerance, rtol=0)


def test_with_and_without_the_prefix_cache_the_bits_are_the_same(tmp_path: Path) -> None:
    """A stream shares pages of requests that start alike; `generate` does not."""
    engine = make_rollout(save_tiny_model(tmp_path), max_num_seqs=2)
    start = torch.arange(40) % 30 + 2
    requests = [Request(torch.cat([start[: 40 - i], torch.tensor([3 + i])]), (0, i, 0)) for i in range(7)]
    expected = engine.generate(requests, PARAMS)
    with engine.open(PARAMS) as stream:
        computed = watch_tokens(engine)
        for request in requests:
            stream.add(request)
        found = drained(stream)
        assert stream.num_free_pages < stream.num_pages
    assert sum(computed) < sum(len(r.prompt_ids) + 11 for r in requests)
    for mine, theirs in zip(found.values(), [expected[index] for index in found], strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
        assert torch.equal(mine.log_probs, theirs.log_probs)


def watch_tokens(engine: Any) -> list[int]:
    """How many tokens each pass from now on computes."""
    counts: list[int] = []
    forward = engine.backend.forward

    def watched(batch: Any, logits_at: Any) -> Any:
        counts.append(len(batch.input_ids))
        return forward(batch, logits_at)

    engine.backend.forward = watched
    return counts


def test_a_second_turn_computes_the_last_token_and_the_new_ones(tmp_path: Path) -> None:
    engine = make_rollout(save_tiny_model(tmp_path))
    with engine.open(PARAMS) as stream:
        computed = watch_tokens(engine)
        first = stream.add(Request(torch.arange(2, 27), (0, 0, 0), keep=True))
        drained(stream)
        assert sum(computed) == 25 + 11
        stream.add(Request(torch.tensor([4, 5, 6]), (0, 0, 0), continues=first))
        stream.release(first)
        drained(stream)
        assert sum(computed) == 25 + 11 + 1 + 3 + 11


def test_new_weights_are_used_from_the_next_pass_and_nothing_of_the_old_ones_stays(tmp_path: Path) -> None:
    engine = make_rollout(save_tiny_model(tmp_path))
    request = Request(torch.arange(2, 40) % 30 + 2, (0, 0, 0), keep=True)
    with engine.open(PARAMS) as stream:
        first = stream.add(request)
        before = drained(stream)[first]
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(1.3)
        engine.version += 1
        again, on = stream.add(request), stream.add(Request(torch.tensor([5]), (0, 0, 1), continues=first))
        found = drained(stream)
    assert (before.policy_version, found[again].policy_version) == (0, 1)
    (expected,) = engine.generate([request], PARAMS)
    assert torch.equal(found[again].log_probs, expected.log_probs)
    assert not torch.equal(before.log_probs, expected.log_probs)
    whole = torch.cat([request.prompt_ids, before.ids, torch.tensor([5])])
    with engine.open(PARAMS) as stream:
        scored = drained_of(stream, Request(torch.cat([whole, found[on].ids]), (0, 0, 1), prompt_log_probs=True))
    assert len(found[on].ids) == 12
    assert scored.prompt_log_probs is not None
    torch.testing.assert_close(found[on].log_probs, scored.prompt_log_probs[-12:], atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_requests_have_parameters_seeds_and_log_probs_of_their_own(tmp_path: Path, name: str) -> None:
    path = save_tiny_model(tmp_path)
    engine = make_rollout(path, name)
    prompt = torch.tensor([4, 5, 6])
    own = [
        PARAMS,
        sampling(temperature=0.0, max_tokens=5, stop_token_ids=()),
        sampling(top_k=1, max_tokens=5, stop_token_ids=()),
        sampling(temperature=0.5, seed=11, stop_token_ids=()),
        sampling(temperature=0.0, presence_penalty=50.0, stop_token_ids=()),
    ]
    with engine.open(PARAMS) as stream:
        requests = [Request(prompt, (0, 0, 0), sampling=p, top_log_probs=3, prompt_log_probs=True) for p in own]
        found = [drained_of(stream, request) for request in requests]
    assert found[1].ids.tolist() == found[2].ids.tolist()
    assert len(set(found[4].ids.tolist())) == 12  # nothing is said twice
    with torch.no_grad():
        for params, completion in zip(own, found, strict=True):
            ids = torch.cat([prompt, completion.ids])
            log_probs = (tiny_model()(ids[None]).logits[0] / (params.temperature or 1.0)).log_softmax(-1)
            expected = log_probs[:-1].gather(-1, ids[1:, None])[:, 0]
            torch.testing.assert_close(completion.log_probs, expected[2:], atol=5e-5, rtol=0)
            assert completion.prompt_log_probs is not None
            assert completion.prompt_log_probs[0].isnan()
            torch.testing.assert_close(completion.prompt_log_probs[1:], expected[:2], atol=5e-5, rtol=0)
            tops = [*(completion.prompt_top_log_probs or []), *(completion.top_log_probs or [])]
            assert tops[0] == []
            for place, top in enumerate(tops[1:]):
                values, order = log_probs[place].topk(3)
                assert [token for token, _ in top] == order.tolist()
                assert [value for _, value in top] == pytest.approx(values.tolist(), abs=5e-5)
            for token, value, top in zip(completion.ids.tolist(), completion.log_probs.tolist(), tops[3:], strict=True):
                assert dict(top).get(token, value) == value  # to the bit


def drained_of(stream: Stream, request: Request) -> Completion:
    index = stream.add(request)
    return drained(stream)[index]


@pytest.mark.parametrize("name", ["native", "hf"])
def test_tokens_are_told_as_they_come_and_are_those_of_the_completion(tmp_path: Path, name: str) -> None:
    with make_rollout(save_tiny_model(tmp_path), name).open(PARAMS) as stream:
        for request in make_requests(4):
            stream.add(Request(request.prompt_ids, request.key, streams=True, keep=True))
        pieces: dict[int, list[int]] = {}
        for answer in stream:
            if isinstance(answer, Tokens):
                pieces.setdefault(answer.index, []).extend(answer.ids.tolist())
            else:
                assert pieces[answer.index] == answer.ids.tolist()
        assert sorted(pieces) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["native", "hf"])
def test_what_can_never_be_served_is_an_error_at_once_and_harms_nobody(tmp_path: Path, name: str) -> None:
    with make_rollout(save_tiny_model(tmp_path), name).open(PARAMS, num_tokens=64) as stream:
        good = stream.add(Request(torch.tensor([3, 4]), (0, 0, 0)))
        bad = {
            stream.add(Request(torch.tensor([3, 99]), (0, 1, 0))): "the model knows 0 to 31",
            stream.add(Request(torch.tensor([3]), (0, 1, 0), top_log_probs=21)): "top_log_probs=21; it must be between 0 and 20",
            stream.add(Request(torch.tensor([3]), (0, 1, 0), stop=("x",))): "stop strings need the tokenizer",
            stream.add(Request(torch.tensor([3]), (0, 1, 0), continues=good)): "it continues request 0, which was not kept",
            stream.add(Request(torch.tensor([3]), (0, 1, 0), continues=77)): "it continues request 77",
        }
        for index, reason in bad.items():
            answer = stream.next()
            assert isinstance(answer, Completion)
            assert answer.index == index
            assert reason in str(answer.error)
        (completion,) = drained(stream).values()
        assert (completion.index, completion.finish_reason) == (good, "length")


def test_requests_come_from_other_threads_and_closing_wakes_the_one_that_waits(tmp_path: Path) -> None:
    engine = make_rollout(save_tiny_model(tmp_path))
    expected = ids_of(engine.generate(make_requests(8), PARAMS))
    stream = engine.open(PARAMS)
    found: dict[int, Completion] = {}
    all_here, enough = threading.Event(), threading.Event()

    def serve() -> None:
        while (answer := stream.next()) is not None:
            assert isinstance(answer, Completion)
            found[answer.index] = answer
            all_here.set() if len(found) == 8 else None
        enough.set()

    threading.Thread(target=serve, daemon=True).start()
    order: dict[int, int] = {}
    adders = [threading.Thread(target=lambda i=i, r=r: order.update({stream.add(r): i})) for i, r in enumerate(make_requests(8))]
    for adder in adders:
        adder.start()
    assert all_here.wait(60)
    stream.close()
    assert enough.wait(60)
    assert {i: found[index].ids.tolist() for index, i in order.items()} == dict(enumerate(expected))
    with pytest.raises(RuntimeError, match="closed"):
        stream.add(make_requests(1)[0])
    assert ids_of(engine.generate(make_requests(8), PARAMS)) == expected


def test_weights_that_are_not_whole_open_nothing_and_an_open_stream_has_the_pages(tmp_path: Path) -> None:
    engine = make_rollout(save_tiny_model(tmp_path))
    stream = engine.open(PARAMS)
    for call in (engine.sleep, lambda: engine.open(PARAMS), lambda: engine.generate(make_requests(1), PARAMS)):
        with pytest.raises(RuntimeError, match="has an open stream"):
            call()
    stream.add(make_requests(1)[0])
    engine._broken = "the update failed"
    with pytest.raises(WeightSyncError, match="the update failed"):
        stream.next()
    assert stream.next() is None  # it is closed now
    with pytest.raises(WeightSyncError, match="the update failed"):
        engine.open(PARAMS)
    engine._broken = None
    engine.sleep()


def test_sampling_parameters_out_of_range_name_themselves() -> None:
    with pytest.raises(ConfigError, match="sampling.presence_penalty=200"):
        sampling(presence_penalty=200.0)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_prompt_that_is_not_finite_leaves_nothing_to_those_that_start_like_it(tmp_path: Path, model_type: str) -> None:
    """Tokens before the one that is not finite are computed together with it, and their pages would be shared."""
    changes = FAMILIES[model_type] | {"tie_word_embeddings": False, "max_position_embeddings": 256}
    path, start = save_tiny_model(tmp_path, model_type, **changes), torch.arange(64) % 28 + 2
    params = sampling(temperature=0.0, max_tokens=4, stop_token_ids=())
    clean = Request(torch.cat([start, torch.tensor([3, 4])]), (0, 1, 0))
    expected = make_rollout(path).generate([clean], params)[0]
    engine = make_rollout(path)
    engine.module.model.embed_tokens.weight.data[31] = torch.nan
    assert 31 not in expected.ids.tolist()
    with engine.open(params) as stream:
        stream.add(Request(torch.cat([start, torch.tensor([5, 31])]), (0, 0, 0)))
        assert drained(stream)[0].finish_reason == "error"
        stream.add(clean)
        found = drained(stream)[1]
    assert (found.finish_reason, found.ids.tolist()) == ("length", expected.ids.tolist())
