# ruff: noqa: RUF001  (the characters are meant)
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.utils.characters import to_ascii


def test_other_forms_become_ascii_and_other_characters_stay():
    assert to_ascii("Ａ（１） −5\u00a0–\u200b6 ‘x’ é π \ud800") == "A(1) -5 -6 'x' é π \ud800"


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_stays_as_it_is(text):
    assert to_ascii(text) == text
