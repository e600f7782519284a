from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.errors import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.data.pairs import PairDataset, num_shared_messages, shared_text
from lockstep.errors import DataError

QUESTION = {"role": "user", "content": "how many?"}
HH = "\n\nHuman: how many?\n\nAssistant: In May?\n\nHuman: Yes.\n\nAssistant:"
SHARED = Path(__file__).parents[3] / "shared/data/hh_rlhf/helpful_pairs_sample.jsonl"


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def open_pairs(tmp_path, qwen_like):
    def make(rows, tokenizer=qwen_like, **options):
        path = tmp_path / "pairs.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return PairDataset(path, tokenizer, **{"max_length": 1000} | options)

    return make


def texts(data, tokenizer):
    columns = (data.ragged(name).rows() for name in ("prompts", "responses", "response_mask"))
    return [(tokenizer.decode(p), tokenizer.decode(r[m.bool()])) for p, r, m in zip(*columns, strict=True)]


CHAT = "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "how many?", "chosen": "48", "rejected": "49 "},
        {"prompt": [QUESTION], "chosen": "48", "rejected": "49 "},
        {"prompt": [QUESTION], "chosen": [answer("48")], "rejected": [answer("49 ")]},
        {"chosen": [QUESTION, answer("48")], "rejected": [QUESTION, answer("49 ")]},
        {"prompt": "how many?", "chosen": [QUESTION, answer("48")], "rejected": [QUESTION, answer("49 ")]},
    ],
)
def test_a_pair_is_two_rows_after_one_prompt(open_pairs, qwen_like, row):
    data = open_pairs([row | {"margin": 0.5}, row | {"margin": None}]).batch([1, 0])
    assert texts(data, qwen_like) == [(CHAT, "48<|im_end|>"), (CHAT, "49 <|im_end|>")] * 2
    assert data.columns["is_chosen"].tolist() == [True, False, True, False]
    assert data.columns["margin"].tolist() == [0, 0, 0.5, 0.5]
    assert data.non_tensor_batch["uid"].tolist() == ["0", "0", "1", "1"]
    assert data.non_tensor_batch["index"].tolist() == [1, 1, 0, 0]
    assert data.repeats_prompt() == [False, True, True, True]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (HH + " Yes it is", HH + " Yes I can", HH),
        (HH + " 48", HH + " 49\n\nHuman: No.\n\nAssistant: 50", HH),
        ("She sold 48 clips", "She sold 4 more", "She sold"),
        ("She sold", "She sold 48", "She"),
        ("yes", "yellow", ""),
        ("", "x", ""),
    ],
)
def test_the_prompt_of_two_texts_is_what_both_begin_with(chosen, rejected, prompt):
    assert shared_text(chosen, rejected) == shared_text(rejected, chosen) == prompt


def test_texts_without_a_prompt_are_cut_where_they_part(open_pairs, qwen_like):
    data = open_pairs([{"chosen": HH + " 48", "rejected": HH + " 1,234"}]).batch([0])
    assert texts(data, qwen_like) == [(HH, " 48<|im_end|>"), (HH, " 1,234<|im_end|>")]


def test_further_turns_of_an_answer_are_trained_where_the_assistant_speaks(open_pairs, qwen_like):
    chosen = [QUESTION, answer("48"), {"role": "user", "content": "sure?"}, answer("yes")]
    data = open_pairs([{"chosen": chosen, "rejected": [*chosen[:3], answer("no")]}]).batch([0])
    assert [response for _, response in texts(data, qwen_like)] == ["yes<|im_end|>", "no<|im_end|>"]
    data = open_pairs([{"prompt": [QUESTION], "chosen": chosen[1:], "rejected": [answer("49")]}]).batch([0])
    assert [response for _, response in texts(data, qwen_like)] == ["48<|im_end|>yes<|im_end|>", "49<|im_end|>"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("a bc\né🤗", min_size=1, max_size=8), st.text("a bc\né🤗", max_size=8), st.text("a bc\né🤗", max_size=8))
def test_both_rows_have_the_same_prompt_tokens_and_the_tokens_of_the_whole_text(open_pairs, qwen_like, prompt, chosen, rejected):
    if chosen == rejected:
        return
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if len({qwen_like(prompt + text)["input_ids"][0] for text in (chosen, rejected)}) > 1:
        with pytest.raises(DataError, match="no token of a prompt in common"):
            open_pairs([row], use_template=False)
        return
    data = open_pairs([row], use_template=False).batch([0])
    prompts, responses, masks = (data.ragged(name).rows() for name in ("prompts", "responses", "response_mask"))
    assert torch.equal(*prompts)
    for text, ids, mask in zip((chosen, rejected), responses, masks, strict=True):
        assert [*prompts[0].tolist(), *ids.tolist()] == [*qwen_like(prompt + text)["input_ids"], qwen_like.eos_token_id]
        assert mask[-1] == 1


def test_identical_answers_are_an_error_or_left_out(open_pairs):
    same, other = {"prompt": "q", "chosen": "48", "rejected": "48"}, {"prompt": "q", "chosen": "48", "rejected": "49"}
    with raises(DataError, "data.skip_identical") as error:
        open_pairs([other, same, other, same])
    assert "pairs.jsonl row 1" in str(error.value)
    dataset = open_pairs([other, same, other, same], skip_identical=True)
    assert (len(dataset), dataset.num_skipped) == (2, 2)
    assert dataset.batch([0, 1]).non_tensor_batch["index"].tolist() == [0, 0, 2, 2]
    with pytest.raises(DataError, match="the same in all 1 rows"):
        open_pairs([same], skip_identical=True)


def test_an_answer_with_a_label_among_pairs_is_no_pair_of_equal_answers(open_pairs):
    pair, labelled = {"prompt": "q", "chosen": "48", "rejected": "49"}, {"prompt": "q", "completion": "48", "label": True}
    for skips in (False, True):
        with pytest.raises(DataError, match=r"pairs.jsonl row 1: an answer with a label among pairs"):
            open_pairs([pair, labelled], skip_identical=skips)


def test_labelled_answers_are_one_row_each(open_pairs, qwen_like):
    rows = [{"prompt": "how many?", "completion": "48", "label": True}, {"prompt": [QUESTION], "response": "49", "label": False}]
    dataset = open_pairs(rows)
    assert not dataset.is_paired
    data = dataset.batch([0, 1])
    assert texts(data, qwen_like) == [(CHAT, "48<|im_end|>"), (CHAT, "49<|im_end|>")]
    assert data.columns["is_chosen"].tolist() == [True, False]
    assert data.non_tensor_batch["uid"].tolist() == ["0", "1"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": None}, "both be strings or both messages"),
        ({"prompt": "q", "chosen": "a", "rejected": [answer("b")]}, "both be strings or both messages"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "1"}, "margin must be a number"),
        ({"prompt": "q", "answer": "a"}, "expected chosen and rejected, or completion"),
        ({"prompt": "q", "completion": "a", "label": 1}, "label must be true or false"),
        ({"completion": "a", "label": True}, "expected a prompt and an answer"),
    ],
)
def test_rows_that_are_no_preference_are_refused(open_pairs, row, words):
    with pytest.raises(DataError, match=words):
        open_pairs([row])


@pytest.mark.parametrize("truncation", ["left", "middle", "right"])
def test_a_pair_that_is_too_long_is_cut_in_both_rows_alike(open_pairs, plain_tokenizer, truncation):
    row = {"prompt": "w1 w2 w3 w4 w5 w6 ", "chosen": "w7", "rejected": "w7 w8 w9"}
    with pytest.raises(DataError, match=r"row 0, which needs 10 tokens"):
        open_pairs([row], plain_tokenizer, max_length=8)
    data = open_pairs([row], plain_tokenizer, max_length=8, truncation=truncation).batch([0])
    (prompt, other), (chosen, rejected) = (data.ragged(name).rows() for name in ("prompts", "responses"))
    assert torch.equal(prompt, other)
    words = {"left": "w3 w4 w5 w6", "middle": "w1 w2 w5 w6", "right": "w1 w2 w3 w4 w5 w6"}[truncation]
    assert plain_tokenizer.decode(prompt) == words
    assert plain_tokenizer.decode(chosen) == "w7 <eos>"
    assert plain_tokenizer.decode(rejected) == ("w7 w8" if truncation == "right" else "w7 w8 w9 <eos>")
    if truncation != "right":
        with pytest.raises(DataError, match="which needs 5 tokens"):
            open_pairs([row], plain_tokenizer, max_length=4, truncation=truncation)


@pytest.mark.skipif(not SHARED.is_file(), reason="the shared data folder is not here")
def test_anthropics_dialogues_are_cut_after_the_last_common_turn(qwen_like):
    dataset = PairDataset(SHARED, qwen_like, max_length=20_000)
    for prompt, response in texts(dataset.batch(range(len(dataset))), qwen_like):
        assert prompt.endswith("\n\nAssistant:")
        assert response.endswith("<|im_end|>")


def test_users_who_say_different_things_are_warned_of_once(open_pairs, capsys):
    same = {"chosen": [QUESTION, answer("48")], "rejected": [QUESTION, answer("49")]}
    other = {"chosen": [QUESTION, answer("48")], "rejected": [QUESTION | {"content": "how many in May?"}, answer("49")]}
    later = {"chosen": [QUESTION, answer("4"), QUESTION, answer("8")], "rejected": [QUESTION, answer("49")]}
    written = {"chosen": f"{HH} 48", "rejected": f"{HH} 49\n\nHuman: No.\n\nAssistant: 50"}
    open_pairs([same, same])
    assert "warning" not in capsys.readouterr().out
    open_pairs([same, later, later, same])
    said = capsys.readouterr().out
    assert said.count("warning") == 1
    assert "2 pairs" in said
    assert "row 1" in said
    open_pairs([{"chosen": f"{HH} 48", "rejected": f"{HH} 49"}, written])
    assert "row 1" in capsys.readouterr().out
    open_pairs([row | {"prompt": "how many?"} for row in (same, other)])
    assert "warning" not in capsys.readouterr().out


def test_two_conversations_share_all_but_one_message_at_most():
    short = [QUESTION, answer("48")]
    assert num_shared_messages(short, [*short, QUESTION, answer("49")]) == 1
    assert num_shared_messages(short, short) == 1
    assert num_shared_messages([*short, QUESTION], [*short, answer("a")]) == 2
    assert num_shared_messages(short[:1], short) == 0


def test_pairs_that_cannot_be_cut_are_counted_together_or_left_out(open_pairs, plain_tokenizer, capsys):
    rows = [{"prompt": "w1 w2 w3 ", "chosen": "w7" + " w8" * n, "rejected": "w9"} for n in (1, 30, 2, 20, 40)]
    with pytest.raises(DataError, match=r"3 rows .*data\.truncation=left.* row 4, which needs 43 tokens"):
        open_pairs(rows, plain_tokenizer, max_length=10, truncation="left")
    assert len(open_pairs(rows, plain_tokenizer, max_length=43, truncation="left")) == 5
    dataset = open_pairs(rows, plain_tokenizer, max_length=10, truncation="left", filter_overlong=True)
    assert dataset.batch([0, 1]).non_tensor_batch["index"].tolist() == [0, 0, 2, 2]
    assert dataset.same_prompts().tolist() == [0, 0]
    assert "left out 3 of 5 rows" in capsys.readouterr().out
