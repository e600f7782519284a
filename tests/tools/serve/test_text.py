"""The text of a response: the same whole as in pieces, never half a character, never a part of a stop string."""

from __future__ import annotations

import pytest
from helpers.serving import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.tools.serve.text import ResponseText, Vocabulary
from lockstep.workers.rollout.request import Stopping


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(byte_tokenizer())


pieces = st.lists(st.sampled_from(["a", "b", " ", "\n", "\u00e9", "\u20ac", "\U0001f600", "<turn>", "<end>"]), max_size=12)
stop_strings = pieces.map("".join).filter(bool)


@given(
    text=pieces,
    stops=st.lists(stop_strings, max_size=3),
    cuts=st.lists(st.integers(1, 4)),
    skips=st.booleans(),
)
def test_text_ends_where_the_engine_stopped_in_pieces_and_as_a_whole(vocabulary, text, stops, cuts, skips):
    """The engine sees special tokens; the client may not."""
    ids = vocabulary.tokenizer.encode("".join(text))
    engine = Stopping(1000, frozenset(), tuple(stops), lambda ids: vocabulary.tokenizer.decode(ids))
    length, reason = engine.end(ids) or (len(ids), "length")
    end = len(vocabulary.tokenizer.decode(ids[:length]))
    if reason == "stop":
        end -= max(len(stop) for stop in stops if vocabulary.tokenizer.decode(ids[:length]).endswith(stop))
    wanted = ""
    for piece in text:  # special tokens are pieces of their own
        is_shown = not (skips and piece.startswith("<"))
        wanted += piece[: max(0, end)] if is_shown else ""
        end -= len(piece)
    assert ResponseText(vocabulary, stops, skips).whole(ids[:length], reason) == wanted
    growing = ResponseText(vocabulary, stops, skips)
    so_far = ""
    start = 0
    for cut in [*cuts, length]:
        so_far += growing.add(ids[start : min(start + cut, length)])
        start += cut
        assert wanted.startswith(so_far)
    assert so_far + growing.finish(reason) == wanted


def test_a_stop_string_that_only_shows_without_a_special_token_cuts_nothing(vocabulary):
    ids = vocabulary.tokenizer.encode("a<end>d, bad")
    growing = ResponseText(vocabulary, ("ad",), True)
    assert growing.add(ids[:4]) == "ad,"
    assert growing.add(ids[4:]) + growing.finish("stop") == " b"
    assert ResponseText(vocabulary, ("ad",), True).whole(ids, "length") == "ad, bad"


def test_bytes_that_are_no_character_come_at_the_end(vocabulary):
    half = vocabulary.tokenizer.encode("\u20ac")[:2]
    growing = ResponseText(vocabulary, (), True)
    assert growing.add(half) == ""
    assert growing.finish("length") == ResponseText(vocabulary, (), True).whole(half, "length") == "\ufffd"


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
    assert growing.add([1, 2]) + growing.finish("length") == "a b"
