import pickle
import threading

import pytest

from lockstep.single_controller.base.channel import inbox


def test_messages_of_several_senders_arrive_and_none_is_handled_after_the_block():
    received, enough = [], threading.Event()

    def handle(message):
        received.append(message)
        if len(received) == 20:
            enough.set()

    with inbox("127.0.0.1", handle) as send:
        senders = [pickle.loads(pickle.dumps(send)) for _ in range(2)]
        for i in range(10):
            for number, sender in enumerate(senders):
                sender((number, i))
        assert enough.wait(10)
    assert sorted(received) == [(number, i) for number in range(2) for i in range(10)]
    for sender in senders:
        for _ in range(3):
            sender("late")  # the driver is gone: no error, no effect
    assert len(received) == 20


def test_a_message_that_cannot_be_handled_ends_neither_the_driver_nor_the_sender():
    with inbox("127.0.0.1", lambda message: 1 / 0) as send:
        send("one")
        send("two")


def test_the_block_ends_when_its_body_raises():
    with pytest.raises(KeyError), inbox("127.0.0.1", print):
        raise KeyError
