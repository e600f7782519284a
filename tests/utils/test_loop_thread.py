import asyncio
import threading
import time

from lockstep.utils.loop_thread import LoopThread


async def end(loop):
    loop.stop()


def test_coroutines_start_in_order_and_their_results_come_back():
    loop = LoopThread("test-loop", 0.05)
    started = []

    async def work(number):
        started.append(number)
        await asyncio.sleep(0.01 * (5 - number))
        return number

    futures = [loop.submit(work(number)) for number in range(5)]
    assert [future.result(10) for future in futures] == list(range(5))
    assert started == list(range(5))
    loop.submit(end(loop))


def test_a_blocked_loop_is_silent_until_it_runs_again():
    loop = LoopThread("test-loop", 0.05)
    release = threading.Event()

    async def block():
        release.wait(30)

    assert loop.answers(within_s=10)
    future = loop.submit(block())
    while loop.silent_s < 0.5:
        time.sleep(0.05)
    assert not loop.answers(within_s=0.1)
    release.set()
    future.result(10)
    assert loop.answers(within_s=10)
    while loop.silent_s > 0.3:
        time.sleep(0.05)
    loop.submit(end(loop))


def test_stopping_ends_the_thread():
    before = set(threading.enumerate())
    loop = LoopThread("test-loop", 0.05)
    (thread,) = set(threading.enumerate()) - before
    loop.submit(end(loop))
    thread.join(10)
    assert not thread.is_alive()
    assert loop.is_closed
