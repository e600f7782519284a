"""The text of a response: the same whole as in pieces, never half a character, never a part of a stop string."""

from __future__ import annotations

import pytest
from helpers.serving import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.tools.serve.text import ResponseText, Vocabulary


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(byte_tokenizer())


texts = st.text(alphabet="ab \n\u00e9\u20ac\U0001f600", max_size=12)


@given(
    text=texts,
    stops=st.lists(texts.filter(bool), max_size=3),
    cuts=st.lists(st.integers(1, 4)),
    skips=st.booleans(),
    ends=st.booleans(),
)
def test_pieces_are_the_whole_text_up_to_the_stop(vocabulary, text, stops, cuts, skips, ends):
    ids = vocabulary.tokenizer.encode(text + "<turn>" * ends)
    shown = text + "<turn>" * (ends and not skips)
    first = min((end for end in range(len(shown) + 1) if shown[:end].endswith(tuple(stops))), default=None)
    stop = "" if first is None else max((stop for stop in stops if shown[:first].endswith(stop)), key=len)
    wanted = shown if first is None else shown[: first - len(stop)]
    assert ResponseText(vocabulary, stops, skips).whole(ids) == wanted
    growing, so_far, start = ResponseText(vocabulary, stops, skips), "", 0
    for cut in [*cuts, len(ids)]:
        so_far += growing.add(ids[start : start + cut])
        start += cut
        assert wanted.startswith(so_far)
    assert so_far + growing.finish() == wanted


def test_bytes_that_are_no_character_come_at_the_end(vocabulary):
    half = vocabulary.tokenizer.encode("\u20ac")[:2]
    growing = ResponseText(vocabulary, (), True)
    assert growing.add(half) == ""
    assert growing.finish() == ResponseText(vocabulary, (), True).whole(half) == "\ufffd"


def test_every_token_has_its_bytes_and_a_name_of_its_own(vocabulary):
    count = len(vocabulary.tokenizer)
    assert sorted(vocabulary.bytes(token) for token in range(256)) == [[byte] for byte in range(256)]
    assert len({vocabulary.name(token) for token in range(count)}) == count
    assert vocabulary.name(vocabulary.tokenizer.encode("\u20ac")[0]) == "bytes:\\xe2"
    assert vocabulary.piece(vocabulary.tokenizer.eos_token_id) == "<end>"


def test_a_word_keeps_the_space_that_it_starts_with():
    core = Tokenizer(models.WordLevel({"<unk>": 0, "\u2581a": 1, "\u2581b": 2}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    vocabulary = Vocabulary(tokenizer)
    assert tokenizer.decode([2]) == "b"
    assert vocabulary.piece(2) == " b"
    growing = ResponseText(vocabulary, (), True)
    assert growing.add([1, 2]) + growing.finish() == "a b"
