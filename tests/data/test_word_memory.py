from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.data import word_memory
from lockstep.data.word_memory import WordMemory

PLAIN = st.text(st.sampled_from(string.printable), max_size=60) | st.text(st.characters(max_codepoint=127), max_size=20)
PIECES = st.lists(
    PLAIN
    | st.sampled_from(
        [
            "She'll ",
            "'S",
            "\u2019s \u201cIt\u201d\u2014",
            "\u00a35 \u20ac6",
            "9\u00d77\u00b0\u2026",
            "  ",
            "\n\n ",
            " \r\n",
            "1234",
            "<|im_start|>",
            "<|im_start|>x",
            "<|im_",
            "|>",
        ]
    ),
    max_size=8,
)


@pytest.mark.parametrize("kind", ["qwen_like", "gpt2_like"])
def test_plain_text_has_the_ids_that_the_tokenizer_gives_it(kind, request):
    tokenizer = request.getfixturevalue(kind)
    memory = WordMemory.of(tokenizer)
    assert memory is not None

    @settings(max_examples=150, deadline=None)
    @given(pieces=PIECES)
    def check(pieces):
        text = "".join(pieces)
        ids = memory.encode(text)
        assert (ids is None) == any(separator in text for separator in "\x1c\x1d\x1e\x1f")
        assert ids in (None, tokenizer(text, add_special_tokens=False)["input_ids"])

    check()


@pytest.mark.parametrize("text", ["naïve", "a\u2028b", "a\x1cb", "日本"])
def test_other_text_is_left_to_the_tokenizer(qwen_like, text):
    assert WordMemory.of(qwen_like).encode(text) is None


def test_text_with_characters_that_no_word_takes_in_is_left_to_the_tokenizer(qwen_like, monkeypatch):
    monkeypatch.setattr(word_memory, "_PROBES", ("abc",))
    backend = Tokenizer.from_str(qwen_like.backend_tokenizer.to_str())
    letters = pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([letters, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    memory = WordMemory.of(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert memory.encode("abc") is not None
    assert memory.encode("abc 1") is None


def test_a_full_memory_starts_anew_and_stays_right(qwen_like, monkeypatch):
    monkeypatch.setattr(word_memory, "_MAX_WORDS", 3)
    memory, text = WordMemory.of(qwen_like), "one two three four five one two three four five"
    assert memory.encode(text) == qwen_like(text, add_special_tokens=False)["input_ids"]
    assert len(memory._ids) <= 3
    assert len(memory._parts) <= 4  # the added tokens


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "normalizer", normalizers.Lowercase()),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda b: setattr(
            b,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        ),
        lambda b: setattr(
            b,
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"\p{Han}+|[^\p{Han}]+"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
        ),
        lambda b: b.add_tokens([AddedToken("clips", single_word=True, normalized=False)]),
        lambda b: b.add_tokens([AddedToken("clips", normalized=True)]),
        lambda b: setattr(b.model, "dropout", 0.5),
        lambda b: setattr(b, "model", models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
    ],
)
def test_a_tokenizer_that_does_something_else_has_no_memory(qwen_like, change):
    backend = Tokenizer.from_str(qwen_like.backend_tokenizer.to_str())
    change(backend)
    assert WordMemory.of(PreTrainedTokenizerFast(tokenizer_object=backend)) is None


def test_a_memory_that_fails_a_probe_is_not_used(qwen_like, monkeypatch):
    assert WordMemory.of(qwen_like) is not None
    monkeypatch.setattr(word_memory, "_ASCII_CLASSES", word_memory._ASCII_CLASSES | {r"\p{L}": "a-km-zA-Z"})  # cuts "sell" in two
    assert WordMemory.of(qwen_like) is None
