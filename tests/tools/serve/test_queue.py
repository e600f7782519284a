"""The queue between clients and the engine: full queues, engines that break, changes of weights, the end. The engine is a script."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from helpers.serving import ASK, HANG_S, completion, in_thread

from lockstep.tools.serve.queue import RequestQueue
from lockstep.tools.serve.schema import EngineBroken, ShuttingDown


def test_a_full_queue_is_said_and_ends_nothing_else(serve, script):
    with serve() as client:
        waiting = [in_thread(client.complete, **ASK) for _ in range(2)]
        indices = [script.added.get(timeout=HANG_S)[0] for _ in waiting]
        response = client.open("POST", "/v1/completions", ASK)
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert json.loads(response.read())["error"]["code"] == "queue_full"
        assert client.post("/v1/completions", ASK | {"n": 3})[0] == 400  # never, however long it waits
        for index in indices:
            script.answer(completion(index))
        assert [future.result(HANG_S)["choices"][0]["text"] for future in waiting] == ["ab", "ab"]
        again = in_thread(client.complete, **ASK)
        script.answer(completion(script.added.get(timeout=HANG_S)[0]))
        assert again.result(HANG_S)["choices"][0]["text"] == "ab"
        assert client.gauge("requests_open") == 0


def test_a_broken_engine_answers_all_and_health_says_so(serve, script, capsys):
    with serve() as client:
        whole = in_thread(client.post, "/v1/completions", ASK)
        script.added.get(timeout=HANG_S)
        response = client.open("POST", "/v1/completions", ASK | {"stream": True})
        script.answer(ZeroDivisionError("in the engine"))
        status, body = whole.result(HANG_S)
        assert (status, body["error"]["code"]) == (500, "engine_broken")
        assert "in the engine" in body["error"]["message"]
        assert response.status == 200  # it had been sent
        assert json.loads(response.read().decode().removeprefix("data: "))["error"]["code"] == "engine_broken"
        assert client.post("/v1/completions", ASK)[0] == 500
        status, body = client.get("/health")
        assert (status, body["status"]) == (503, "broken")
        assert client.gauge("engine_up") == 0
    assert "ZeroDivisionError" in capsys.readouterr().err


async def submitted(queue_):
    """A call of one request, which the engine has."""
    call = queue_.admit(1)
    await call.submit([None])
    return call


async def start_change(queue_):
    """A change of the engine that has been asked for, and a call that waits for it."""
    tasks = [asyncio.ensure_future(queue_.change(lambda: None)), asyncio.ensure_future(submitted(queue_))]
    await asyncio.sleep(0)
    return tasks


async def refused(tasks):
    """Whether all of these raise EngineBroken, and none waits for ever."""
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
    return all(isinstance(one, EngineBroken) for one in ended)


def test_newer_weights_for_a_broken_engine_hold_up_no_request(script, capsys):
    async def break_and_change():
        queue_ = RequestQueue(lambda: script, 10)
        await submitted(queue_)  # in flight, so that the first change waits
        tasks = await start_change(queue_)
        script.answer(ZeroDivisionError("in the engine"))
        assert await refused(tasks)
        assert await refused(await start_change(queue_))
        await queue_.close()

    asyncio.run(break_and_change())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_change_that_fails_breaks_the_engine(script, capsys):
    async def change():
        queue_ = RequestQueue(lambda: script, 10)
        with pytest.raises(EngineBroken, match="ZeroDivisionError"):
            await asyncio.wait_for(queue_.change(lambda: 1 // 0), HANG_S)
        assert await refused([submitted(queue_)])
        await queue_.close()

    asyncio.run(change())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_shutting_down_ends_what_the_engine_computes_at_once(script):
    async def give_up():
        queue_ = RequestQueue(lambda: script, 10)
        call = await submitted(queue_)
        queue_.give_up()
        assert script.aborted.get(timeout=0) == 0
        with pytest.raises(ShuttingDown):
            await call.next()
        await queue_.close()

    asyncio.run(give_up())


def test_who_still_waits_when_the_server_ends_is_told(serve, script, monkeypatch):
    monkeypatch.setattr("lockstep.tools.serve.GRACE_S", 0.05)
    with serve() as client:
        whole = in_thread(client.post, "/v1/completions", ASK)
        streamed = in_thread(lambda: client.open("POST", "/v1/completions", ASK | {"stream": True}).read())
        indices = {script.added.get(timeout=HANG_S)[0] for _ in range(2)}
    status, body = whole.result(HANG_S)
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    last = streamed.result(HANG_S).decode().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert {script.aborted.get(timeout=HANG_S) for _ in range(2)} == indices


def test_threads_of_a_server_end_with_it(serve):
    before = set(threading.enumerate())
    with serve() as client:
        assert client.post("/tokenize", {"prompt": "a"})[0] == 200
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(HANG_S)
    assert not [thread.name for thread in started if thread.is_alive()]
