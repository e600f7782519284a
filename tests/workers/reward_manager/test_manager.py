from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.errors import DataError, RewardError
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.reward_manager import RewardManager

WORDS = ["<unk>", "<eos>", "####", *map(str, range(20))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")


TOKENIZER = make_tokenizer()


def make_batch(responses: list[str], **objects: list[Any]) -> DataProto:
    def column(texts: list[str]) -> Ragged:
        return Ragged.from_rows([TOKENIZER.encode(t) for t in texts], dtype=torch.int64)

    return DataProto.from_dict(
        {"prompts": column([f"7 {i}" for i in range(len(responses))]), "responses": column(responses)},
        objects,
        {"pad_token_id": 1},
    )


def gsm8k_batch() -> DataProto:
    return make_batch(
        ["1 #### 5 <eos>", "#### 6", "5"],
        data_source=["openai/gsm8k"] * 3,
        reward_model=[{"style": "rule", "ground_truth": "5"}] * 3,
    )


def test_the_rule_of_the_data_source_scores_and_the_score_is_on_the_last_token():
    reward = RewardManager(TOKENIZER, num_examine=0)(gsm8k_batch())
    assert reward.dtype == torch.float32
    assert reward.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_scores_of_a_reward_model_are_returned_as_they_are():
    data = gsm8k_batch()
    data.batch["rm_scores"] = torch.arange(12.0).reshape(3, 4)
    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=lambda **row: pytest.fail("called"))
    assert torch.equal(manager(data), data.batch["rm_scores"])
    answer = manager(data, return_dict=True)
    assert torch.equal(answer["reward_tensor"], data.batch["rm_scores"])
    assert answer["reward_extra_info"] == {}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-100, 100, width=32)), max_size=8))
def test_each_score_is_on_its_rows_last_token_and_an_empty_response_holds_none(rows):
    data = make_batch([" ".join(["3"] * length) for length, _ in rows], extra_info=[score for _, score in rows])
    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=lambda extra_info, **row: extra_info)
    answer = manager(data, return_dict=True)
    expected = torch.zeros(data.batch["responses"].shape)
    for i, (length, score) in enumerate(rows):
        if length:
            expected[i, length - 1] = score
    assert torch.equal(answer["reward_tensor"], expected)
    assert answer["reward_extra_info"] == {"score": [score for _, score in rows]}


def test_a_custom_function_gets_the_four_arguments_without_special_tokens():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return 0

    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=compute_score, reward_fn_key="kind")
    manager(make_batch(["1 2 <eos>"], kind=["k"], reward_model=[{"ground_truth": 4}], extra_info=[{"a": 1}]))
    manager(make_batch(["1 <eos>"]))
    assert seen == [("k", "1 2", 4, {"a": 1}), (None, "1", None, None)]


def test_an_async_function_scores_too():
    async def compute_score(solution_str, **row):
        return float(solution_str)

    reward = RewardManager(TOKENIZER, num_examine=0, compute_score=compute_score)(make_batch(["4", "9"]))
    assert reward.tolist() == [[4.0], [9.0]]


def test_other_keys_of_the_result_are_lists_aligned_with_the_rows():
    results = {"1": {"score": 0.5, "acc": True}, "2": 2, "3": {"score": 3, "pred": "p"}}
    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=lambda solution_str, **row: results[solution_str])
    extra = manager(make_batch(["1", "2", "3"]), return_dict=True)["reward_extra_info"]
    assert extra == {"score": [0.5, 2.0, 3.0], "acc": [True, None, None], "pred": [None, None, "p"]}


def test_the_first_rows_of_each_data_source_are_printed(capsys):
    data = make_batch(
        ["1", "2", "3", "4"],
        data_source=["a", "a", "b", "a"],
        reward_model=[{"ground_truth": f"truth {i}"} for i in range(4)],
    )
    RewardManager(TOKENIZER, num_examine=1, compute_score=lambda solution_str, **row: int(solution_str) / 2)(data)
    out = capsys.readouterr().out
    assert out.count("[data_source]") == 2
    for text in ("7 0", "[response] 1", "truth 0", "[score] 0.5", "7 2", "[response] 3", "truth 2", "[score] 1.5"):
        assert text in out


def test_a_failing_function_is_a_reward_error_never_a_score():
    def compute_score(**row):
        raise ZeroDivisionError

    with pytest.raises(RewardError, match="row 0, data_source 'openai/gsm8k'"):
        RewardManager(TOKENIZER, num_examine=0, compute_score=compute_score)(gsm8k_batch())


def test_a_deadline_is_kept():
    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=lambda **row: __import__("time").sleep(2), timeout_s=0.1)
    with pytest.raises(RewardError, match="not finished: 0, 1, 2"):
        manager(gsm8k_batch())


def test_a_batch_without_a_rule_fails_before_any_row_is_scored():
    manager = RewardManager(TOKENIZER, num_examine=0)
    with pytest.raises(NotImplementedError, match="'my/data'"):
        manager(make_batch(["1"], data_source=["my/data"]))
    for data in (make_batch(["1"]), make_batch(["1"], data_source=[None])):
        with pytest.raises(DataError, match=r"no 'data_source'.*data\.train_files.*reward\.custom_reward_function\.path"):
            manager(data)


def test_check_wants_a_rule_for_every_data_source_unless_a_function_is_given():
    RewardManager(TOKENIZER, num_examine=0).check(["openai/gsm8k", "lighteval/MATH"])
    RewardManager(TOKENIZER, num_examine=0, compute_score=lambda **row: 0).check(["my/data", None])
    with pytest.raises(NotImplementedError, match="'my/data'"):
        RewardManager(TOKENIZER, num_examine=0).check(iter(["openai/gsm8k", "my/data"]))
    with pytest.raises(DataError, match="data_source"):
        RewardManager(TOKENIZER, num_examine=0).check([None])
