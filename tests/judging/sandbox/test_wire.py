from __future__ import annotations

import collections
import enum
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.judging.sandbox.wire import decode, encode, to_frame

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.frozensets(st.integers() | st.text(), max_size=4)
        | st.sets(st.integers(), max_size=4)
    ),
    max_leaves=20,
)


def exactly(value):
    """A form in which values of different types differ too."""
    if isinstance(value, list | tuple):
        return type(value), [exactly(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exactly(k), exactly(v)) for k, v in value.items()]
    return type(value), value, math.copysign(1, value) if isinstance(value, float) else None


@settings(deadline=None, max_examples=60)
@given(plain)
def test_a_value_comes_back_as_it_was(value):
    raw = encode(value)
    assert raw.isascii()
    assert exactly(decode(raw)) == exactly(value)
    assert to_frame(value) == b"%08x" % len(raw) + raw


def test_what_text_cannot_hold_and_numbers_out_of_range_come_back_too():
    for value in ("\ud800", "\0\n\\x41", 10**5000, -(10**5000), float("inf"), bytearray(b"\xff"), int, [bool, dict]):
        assert decode(encode(value)) == value
    assert math.isnan(decode(encode(math.nan)))


def test_subclasses_become_their_base_whatever_they_claim():
    class Liar(int):
        def __eq__(self, other):
            return True

        def __index__(self):
            return 7

        __hash__ = int.__hash__

    Point = collections.namedtuple("Point", "x y")
    Colour = enum.IntEnum("Colour", "RED")
    assert not decode(encode(Liar(3))) == 4  # noqa: SIM201
    assert exactly(decode(encode([Point(1, 2), Colour.RED, collections.Counter("aa")]))) == exactly([(1, 2), 1, {"a": 2}])


def test_other_objects_are_exported_by_number_or_refused():
    objects = []
    raw = encode([1, len, print], lambda value: objects.append(value) or len(objects) - 1)
    assert decode(raw, objects.__getitem__) == [1, len, print]
    with pytest.raises(TypeError, match="builtin_function_or_method"):
        encode([1, len])


@settings(deadline=None)
@given(st.binary(max_size=40) | plain.map(encode).flatmap(lambda raw: st.integers(0, len(raw)).map(lambda cut: raw[:cut] + b"l")))
def test_malformed_input_is_a_value_error(raw):
    try:
        value = decode(raw)
    except ValueError:
        return
    encode(value)  # what can be read is a plain value


def test_depth_and_builtins_that_are_no_types_are_value_errors():
    for raw in (b"l1;" * 100_000 + b"N", b"yeval;", b"y__import__;", b"h0;", b"s-1;a", b"i;", b"l9999999999;", b"e1;l0;"):
        with pytest.raises(ValueError):
            decode(raw)
