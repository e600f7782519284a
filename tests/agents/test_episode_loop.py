from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future

import pytest
import torch

from lockstep.agents import episode_loop
from lockstep.agents.episode_loop import Encoding, EngineCall, EpisodeLoop
from lockstep.agents.hosts import EnvironmentCall, EnvironmentFailed, ThreadHost
from lockstep.workers.rollout.request import Completion, Request

REQUEST = Request(torch.tensor([1]), (0, 0, 0))


class FakeStream:
    """Answers a request after as many passes as its first token says."""

    poll_s = 0.0

    def __init__(self):
        self.left, self.answers, self.passes = {}, deque(), []

    @property
    def has_answers(self):
        return bool(self.answers)

    def add(self, request):
        index = len(self.left)
        self.left[index] = int(request.prompt_ids[0])
        return index

    def next(self, timeout_s=None):
        if not self.answers:
            running = [index for index, left in self.left.items() if left > 0]
            self.passes.append(len(running))
            for index in running:
                self.left[index] -= 1
                if not self.left[index]:
                    self.answers.append(Completion(index, torch.tensor([7]), torch.zeros(1), "stop", 0))
        return self.answers.popleft() if self.answers else None


class FakeTemplate:
    tokenizer = "one"

    def __init__(self):
        self.batches = []

    def encode(self, texts):
        self.batches.append(list(texts))
        return [[len(text)] for text in texts]


def request(passes):
    return Request(torch.tensor([passes]), (0, 0, 0))


def test_every_coroutine_gets_its_own_answers_however_many_run_at_once():
    for at_once in (1, 3, 100):
        stream, template, found = FakeStream(), FakeTemplate(), {}

        async def play(number, template=template, found=found):
            ids = await Encoding(template, "x" * number)
            index, completion = await EngineCall(request(1 + number % 3))
            found[number] = ids, index == completion.index

        EpisodeLoop(stream).run((play(number) for number in range(40)), at_once)
        assert found == {number: ([number], True) for number in range(40)}
        assert max(map(len, template.batches)) == min(at_once, 40)  # texts that are there together are encoded together
        assert max(stream.passes) <= at_once


def test_when_a_whole_batch_ends_a_turn_the_first_are_computed_while_others_wait_for_the_interpreter():
    stream = FakeStream()

    async def play():
        await EngineCall(request(1))
        await EngineCall(request(1))

    EpisodeLoop(stream).run((play() for _ in range(64)), 64)
    assert stream.passes == [64, 16, 16, 16, 16]


def test_an_environment_that_is_late_is_left_and_its_answer_is_taken_for_no_other():
    host, late, heard = ThreadHost(0.01), Future(), []

    async def play():
        with pytest.raises(EnvironmentFailed, match="did not answer"):
            await EnvironmentCall(host, late, 0.01)
        following = Future()
        late.set_result("too late")
        heard.append("waits")
        following_call = EnvironmentCall(host, following, None)
        other.append(following)
        heard.append(await following_call)

    async def answers():
        while not other:
            await EngineCall(request(1))
        for _ in range(3):
            await EngineCall(request(1))
        assert heard == ["waits"]
        other[0].set_result("in time")

    other: list[Future] = []
    EpisodeLoop(FakeStream()).run(iter([play(), answers()]), 2)
    assert heard == ["waits", "in time"]


def test_what_one_raises_ends_the_run_and_closes_the_others():
    closed = []

    async def waits():
        try:
            await EngineCall(request(1000))
        finally:
            closed.append(True)

    async def breaks():
        await EngineCall(request(2))
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        EpisodeLoop(FakeStream()).run(iter([waits(), breaks(), waits()]), 3)
    assert closed == [True, True]


def test_environments_that_answer_at_once_are_computed_together(monkeypatch):
    monkeypatch.setattr(episode_loop, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(episode_loop, "_QUICK_S", 60.0)
    stream, template = FakeStream(), FakeTemplate()

    async def play(number):
        await EngineCall(request(1))
        await EnvironmentCall(ThreadHost(60.0), answered_soon(), None)
        await Encoding(template, "x" * number)
        await EngineCall(request(1))

    EpisodeLoop(stream).run((play(number) for number in range(9)), 9)
    assert [len(batch) for batch in template.batches] == [9]
    assert stream.passes == [9, 9]


def test_passes_go_on_while_slow_environments_are_waited_for(monkeypatch):
    """Nobody is quick here: with patience, this would take minutes."""
    monkeypatch.setattr(episode_loop, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(episode_loop, "_QUICK_S", 0.0)
    futures = [Future() for _ in range(3)]

    class Answering(FakeStream):
        def next(self, timeout_s=None):
            if len(self.passes) in (5, 10, 15) and not futures[len(self.passes) // 5 - 1].done():
                futures[len(self.passes) // 5 - 1].set_result(None)
            return super().next(timeout_s)

    stream = Answering()

    async def play(number):
        await EnvironmentCall(ThreadHost(60.0), answered_soon(), None)
        if number < 3:
            await EnvironmentCall(ThreadHost(60.0), futures[number], None)
        else:
            await EngineCall(request(30))

    started = time.monotonic()
    EpisodeLoop(stream).run((play(number) for number in (3, 0, 1, 2)), 4)
    assert len(stream.passes) == 30
    assert time.monotonic() - started < 60.0


def answered_soon():
    future = Future()
    threading.Thread(target=future.set_result, args=(None,)).start()
    return future
