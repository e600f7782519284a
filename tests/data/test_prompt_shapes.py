from __future__ import annotations

import unicodedata
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.prompt_shapes import prompt_shapes

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT}), min_size=1, max_size=4)
KIND = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@given(prompts=st.lists(MESSAGES, min_size=1, max_size=12), skip=st.integers(0, 11))
def test_message_lists_have_their_roles_and_at_least_the_bytes_of_every_normal_form(prompts, skip):
    skip = min(skip, len(prompts) - 1)
    shapes = prompt_shapes(pa.array(prompts, KIND)[skip:])  # a slice, as a reader's batch may be one
    assert not shapes.needs_look.any()
    for prompt, kind, num_bytes in zip(prompts[skip:], shapes.roles, shapes.num_bytes, strict=True):
        assert shapes.role_lists[kind] == tuple(message["role"] for message in prompt)
        text = "".join(message["content"] for message in prompt)
        assert all(len(unicodedata.normalize(form, text).encode()) <= num_bytes for form in ("NFC", "NFD"))
        if text.isascii():
            assert num_bytes == len(text)


def test_the_bound_holds_for_every_character():
    # No character from 0x30000 on has another normal form than itself.
    characters = [chr(code) for code in range(1, 0x30000) if not 0xD800 <= code <= 0xDFFF]
    sizes = prompt_shapes(pa.array(characters)).num_bytes
    longest = [max(len(unicodedata.normalize(form, c).encode()) for form in ("NFC", "NFD")) for c in characters]
    assert all(size >= length for size, length in zip(sizes.tolist(), longest, strict=True))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_strings_have_sizes_and_empty_ones_need_a_look(kind):
    shapes = prompt_shapes(pa.array(["abc", "", "d", None], pa.string()).cast(kind))
    assert shapes.num_bytes.tolist() == [3, 0, 1, 0]
    assert shapes.needs_look.tolist() == [False, True, False, True]
    assert shapes.roles.tolist() == [-1] * 4


GOOD = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "odd",
    [
        [],
        None,
        [{"role": "user", "content": None}],
        [{"role": None, "content": "x"}],
        [None],
        [{"role": "user", "content": "x", "name": "me"}],
    ],
)
def test_a_row_that_is_not_just_roles_and_text_needs_a_look_and_its_neighbours_do_not(odd: Any):
    assert prompt_shapes(pa.array([GOOD, odd, GOOD])).needs_look.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "prompts",
    [
        ["text", GOOD],
        [GOOD, 3],
        ["half a character \ud800"],
        [[{"role": "user"}]],
        [[{"role": "user", "content": [{"type": "text", "text": "x"}]}]],
        [["x"]],
        [3],
        pa.array([b"\xff"], pa.binary()).view(pa.string()),
    ],
)
def test_what_arrow_cannot_read_needs_a_look(prompts: Any):
    assert prompt_shapes(prompts).needs_look.all()
