"""What answers show of the engine's completions. The engine is a script."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.serving import HANG_S, byte_tokenizer, completion, in_thread

from lockstep.workers.rollout.request import Tokens


@pytest.mark.parametrize("stream", [False, True])
def test_no_more_likely_tokens_are_shown_than_were_asked_for(serve, script, stream):
    """Engines may give one more, and numbers that JSON does not have."""
    ids = byte_tokenizer().encode("abcde")
    log_probs = [0.0, -math.inf, -2.0, -3.0, -4.0]
    likely = [list(zip(order, log_probs, strict=True)) for order in (ids, [ids[1], ids[0], *ids[2:]])]
    with serve() as client:
        for path, body in (
            ("/v1/completions", {"prompt": "a", "logprobs": 3}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3}),
        ):
            ask = client.events if stream else client.post
            answer = in_thread(ask, path, **body) if stream else in_thread(ask, path, body)
            index = script.added.get(timeout=HANG_S)[0]
            if stream:
                script.answer(Tokens(index, torch.tensor(ids[:2]), torch.zeros(2), likely))
            script.answer(completion(index, top_log_probs=likely))
            found = answer.result(HANG_S)
            choices = [event["choices"][0] for event in found] if stream else found[1]["choices"]
            log_probs = next(choice["logprobs"] for choice in choices if choice["logprobs"])
            if "content" in log_probs:
                shown = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in log_probs["content"]]
            else:
                shown = [list(top.items()) for top in log_probs["top_logprobs"]]
            assert shown == [[("a", 0.0), ("c", -2.0)], [("b", 0.0), ("c", -2.0)]]


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_cut_only_where_the_engine_stopped(serve, script, stream):
    """With special tokens left out, "ad" is in the text; the engine saw "a<end>d"."""
    with serve() as client:
        body = {"prompt": "a", "stop": ["ad"], "ignore_eos": True}
        answer = in_thread(client.events, "/v1/completions", **body) if stream else in_thread(client.complete, **body)
        index = script.added.get(timeout=HANG_S)[0]
        done = completion(index, "length", "xa<end>dy")
        if stream:
            script.answer(Tokens(index, done.ids, done.log_probs))
        script.answer(done)
        found = answer.result(HANG_S)
        text = "".join(choice["text"] for event in (found if stream else [found]) for choice in event["choices"])
        assert text == "xady"
