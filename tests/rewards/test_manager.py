from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from helpers.rewards import fails_on_six
from helpers.rewards import length as count_words
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.config.reward import CustomRewardConfig, RewardConfig
from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, DataError, RewardError
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards import runner
from lockstep.rewards.manager import RewardManager
from lockstep.trainer.run.setup import reward_arguments

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
@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-100, 100, width=32)), min_size=1, max_size=8))
def test_each_score_is_on_its_rows_last_token_and_an_empty_response_holds_none(rows):
    data = make_batch([" ".join(["3"] * length) for length, _ in rows], extra_info=[score for _, score in rows])
    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=lambda extra_info, **row: extra_info)
    answer = manager(data, return_dict=True)
    expected = torch.zeros(data.batch["responses"].shape)
    for i, (length, score) in enumerate(rows):
        if length:
            expected[i, length - 1] = score
    assert torch.equal(answer["reward_tensor"], expected)
    assert torch.equal(manager(data, ragged=True).pad(), expected)
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


def test_what_is_printed_of_a_response_controls_no_terminal(capsys, monkeypatch):
    manager = RewardManager(TOKENIZER, num_examine=1, compute_score=lambda **row: 1.0)
    monkeypatch.setattr(manager, "decode", lambda ids: "\x1b[2J\x9b31m\r8")
    manager(make_batch(["4"]))
    assert r"\x1b[2J\x9b31m\r8" in capsys.readouterr().out


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


def test_a_failing_function_is_a_missing_reward_never_a_score():
    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=fails_on_six)
    answer = manager(gsm8k_batch(), return_dict=True)
    assert [failure and failure.kind for failure in answer["failures"]] == [None, "raised", None]
    assert answer["reward_tensor"].sum(1).tolist() == [2.0, 0.0, 2.0]
    assert answer["reward_extra_info"] == {"score": [2.0, None, 2.0]}
    assert answer["reward_parts"] == {"rule": [2.0, None, 2.0]}
    # A tensor alone cannot say that a number is missing.
    with pytest.raises(RewardError, match=r"row 1 is missing \(raised\); data_source 'openai/gsm8k'.*#### 6"):
        manager(gsm8k_batch())
    manager.close()


def test_a_batch_without_a_judge_fails_before_any_row_is_scored():
    manager = RewardManager(TOKENIZER, num_examine=0)
    with pytest.raises(NotImplementedError, match="'my/data'"):
        manager(make_batch(["1"], data_source=["my/data"]))
    for data in (make_batch(["1"]), make_batch(["1"], data_source=[None])):
        with pytest.raises(DataError, match=r"no 'data_source'.*data\.train_files.*reward\.custom_reward_function\.path"):
            manager(data)


def test_check_wants_a_judge_for_every_tag():
    manager = RewardManager(TOKENIZER, num_examine=0)
    manager.check([Tag("openai/gsm8k", "rule"), Tag("lighteval/MATH")])
    RewardManager(TOKENIZER, num_examine=0, compute_score=lambda **row: 0).check([Tag("my/data"), Tag(None)])
    with pytest.raises(NotImplementedError, match="'my/data'"):
        manager.check([Tag("openai/gsm8k"), Tag("my/data")])
    manager.check([Tag("openai/gsm8k"), Tag("my/data")], has_model=True)
    weighted = RewardManager(TOKENIZER, num_examine=0, weights={"openai/gsm8k": {"rule": 1.0, "model": 0.5}})
    weighted.check([Tag("openai/gsm8k")], validation=True)
    with pytest.raises(ConfigError, match=r"reward_model\.enable=true"):
        weighted.check([Tag("openai/gsm8k")])


def test_judges_are_combined_with_weights_and_each_part_is_kept():
    data = gsm8k_batch()
    data.batch["rm_scores"] = torch.tensor([[0, 0.25, 0, 1], [0, 2, 0, 0], [3.0, 0, 0, 0]])
    manager = RewardManager(
        TOKENIZER, num_examine=0, functions={"length": count_words}, weights={"*": {"rule": 2.0, "model": 0.5, "length": -1.0}}
    )
    answer = manager(data, return_dict=True)
    assert answer["reward_parts"] == {"rule": [1.0, 0.0, 0.0], "model": [1.25, 2.0, 3.0], "length": [3.0, 2.0, 1.0]}
    # The model's numbers stay where they are; what the functions say is on the last token.
    expected = [[0, 0.125, 0, 0.5 + 2 - 3], [0, 1 - 2, 0, 0], [1.5 - 1, 0, 0, 0]]
    assert answer["reward_tensor"].tolist() == expected
    assert answer["reward_extra_info"]["length/words"][2] == ["5"]
    assert answer["reward_extra_info"]["score"] == pytest.approx([sum(row) for row in expected])
    manager.close()


@pytest.mark.parametrize("weights", [{"rule": 2.0, "model": 0.5}, {"model": 0.5, "rule": 2.0}])
def test_a_row_with_a_judge_that_fails_keeps_nothing_of_the_others(weights):
    def compute_score(solution_str):
        return 1.0 if "#### 5" in solution_str else 1 / 0

    data = gsm8k_batch()
    data.batch["rm_scores"] = torch.tensor([[0, 0.25, 0, 1], [0, 2, 0, 0], [3.0, 0, 0, 0]])
    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=compute_score, weights={"*": weights})
    answer = manager(data, return_dict=True)
    manager.close()
    failed = [failure is not None for failure in answer["failures"]]
    assert any(failed)
    assert not all(failed)
    for row, was in enumerate(failed):
        assert answer["reward_tensor"][row].any().item() is not was


def test_rows_are_judged_by_their_tags_in_one_batch():
    data = make_batch(
        ["#### 5", "1 2", "#### 5"], data_source=["openai/gsm8k", "chat", "openai/gsm8k"], reward_model=[{"ground_truth": "5"}] * 3
    )
    manager = RewardManager(TOKENIZER, num_examine=0)
    manager.check([Tag("openai/gsm8k"), Tag("chat")], has_model=True)
    wanted = manager.wants_model(data)
    assert wanted.tolist() == [False, True, False]
    data.batch["rm_scores"], data.columns["rm_judged"] = torch.tensor([[0.0, 0], [0, -4], [0, 0]]), wanted
    assert manager(data).tolist() == [[0, 1], [0, -4], [0, 1]]
    # Where every row has a rule, a reward model that is there all the same judges them all.
    manager.check([Tag("openai/gsm8k")], has_model=True)
    assert manager.wants_model(data).all()
    manager.close()


def test_a_model_score_that_is_not_finite_is_missing():
    data = gsm8k_batch()
    data.batch["rm_scores"] = torch.tensor([[0, 0, 0, 1], [float("nan"), 0, 0, 0], [2, 0, 0, 0.0]])
    answer = RewardManager(TOKENIZER, num_examine=0)(data, return_dict=True)
    assert [failure and failure.kind for failure in answer["failures"]] == [None, "invalid", None]


def test_scoring_starts_with_the_first_response():
    data, seen = gsm8k_batch(), threading.Event()

    def compute_score(solution_str):
        seen.set()
        return len(solution_str)

    manager = RewardManager(TOKENIZER, num_examine=0, compute_score=compute_score)
    scoring = manager.begin(data.select([], ["data_source", "reward_model"]))
    assert not seen.is_set()
    scoring.add(1, data.ragged("responses")[1])
    assert seen.wait(5)
    assert torch.equal(manager(data, scoring=scoring), manager(data))
    manager.close()


def test_a_row_that_asks_for_a_model_gets_its_rule_where_there_is_none_even_when_its_response_came_early():
    data = gsm8k_batch()
    for reward_model in data.non_tensor_batch["reward_model"]:
        reward_model["style"] = "model"
    manager = RewardManager(TOKENIZER, num_examine=0)
    scoring = manager.begin(data)
    for i, ids in enumerate(data.ragged("responses").rows()):
        scoring.add(i, ids)
    assert torch.equal(manager(data, scoring=scoring), manager(gsm8k_batch()))
    manager.close()


def test_a_row_with_test_cases_is_judged_in_the_sandbox_and_a_rule_and_the_sandbox_combine():
    class Sandbox:
        """Stands in for programs: what it is asked is what it says."""

    def run_tests(solution_str, ground_truth, sandbox):
        assert isinstance(sandbox, Sandbox)
        return ground_truth["score"]

    made = []
    manager = RewardManager(
        TOKENIZER,
        num_examine=0,
        functions={"tests": run_tests},
        weights={"openai/gsm8k": {"rule": 1.0, "tests": 0.5}},
        make_sandbox=lambda: made.append(1) or Sandbox(),
    )
    manager.check([Tag("lighteval/MATH")])
    assert not made  # nobody needs it
    manager.check([Tag("openai/gsm8k")])
    row = {"ground_truth": {"score": 4}}
    answer = manager(make_batch(["5"], data_source=["openai/gsm8k"], reward_model=[row]), return_dict=True)
    assert made == [1]
    assert answer["reward_parts"]["tests"] == [4.0]
    assert answer["failures"][0].kind == "raised"  # the rule cannot read such a ground truth, so the row has no reward
    manager.close()


def test_the_sandbox_and_the_graders_of_code_and_math_load_with_the_first_row_that_needs_them():
    program = (
        "import sys\nfrom lockstep.data.tag import Tag\nfrom lockstep.rewards.manager import RewardManager\n"
        "manager = RewardManager(None, 0)\nmanager.check([Tag('openai/gsm8k')])\n"
        "print([name for name in sys.modules if name.startswith('lockstep.judging')])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (ended.stdout.strip(), ended.returncode) == ("[]", 0), ended.stderr


def test_programs_run_in_the_real_sandbox():
    sandbox = pytest.importorskip("lockstep.judging.sandbox")
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    manager = RewardManager(TOKENIZER, num_examine=0, make_sandbox=sandbox.default_sandbox)
    tests = {"inputs": ["3"], "outputs": ["3"]}
    rows = [{"ground_truth": "5", "test_cases": tests}] * 2
    data = make_batch(["1 2 3", "3"], data_source=["puzzle"] * 2, reward_model=rows)
    manager.check([Tag.of("puzzle", rows[0])])
    answer = manager(data, return_dict=True)
    assert answer["failures"] == [None, None]
    assert answer["reward_parts"] == {"sandbox": [0.0, 0.0]}  # neither response is a program that prints 3
    assert answer["reward_extra_info"]["total"] == [1, 1]
    manager.close()


def batch_lengths(data_sources, solution_strs, ground_truths, extra_infos):
    """Each response's number of words less the batch's shortest, with the number as `words`."""
    counts = [len(text.split()) for text in solution_strs]
    assert len(data_sources) == len(ground_truths) == len(extra_infos) == len(counts)
    return [{"score": float(count - min(counts)), "words": count} for count in counts]


def test_a_function_of_lists_is_asked_once_about_the_whole_batch():
    manager = RewardManager(make_tokenizer(), 0, compute_score=batch_lengths)
    batch = make_batch(["6", "6 7 6", "6 7"])
    scoring = manager.begin(batch)
    scoring.add(2, batch.ragged("responses")[2])
    answer = manager(batch, return_dict=True, scoring=scoring)
    manager.close()
    assert answer["reward_extra_info"] == {"score": [0.0, 2.0, 1.0], "words": [1, 3, 2]}
    assert answer["reward_tensor"].sum(-1).tolist() == [0.0, 2.0, 1.0]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_of_lists_in_a_file_of_the_users_has_its_arguments_from_the_configuration(kind, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        f"{kind} score(data_sources, solution_strs, ground_truths, extra_infos, scale):\n    return [scale * 2.0 for _ in solution_strs]\n"
    )
    custom = CustomRewardConfig(path=str(path), name="score", reward_kwargs={"scale": 3.0})
    manager = RewardManager(make_tokenizer(), 0, **reward_arguments(RewardConfig(custom_reward_function=custom)))
    answer = manager(make_batch(["6", "7"]), return_dict=True)
    manager.close()
    assert answer["failures"] == [None, None]
    assert answer["reward_extra_info"] == {"score": [6.0, 6.0]}


def test_an_argument_in_the_configuration_that_the_function_does_not_take_is_found_before_training():
    manager = RewardManager(make_tokenizer(), 0, compute_score=functools.partial(batch_lengths, scale=1.0))
    with pytest.raises(ConfigError, match=r"reward_kwargs has scale, which the reward function .*batch_lengths does not take"):
        manager.check([Tag("any")])


@pytest.mark.parametrize(
    ("returned", "kind"), [([1.0], "invalid"), (None, "raised"), ([float("nan"), 1.0], "invalid"), (["x", "y"], "invalid")]
)
def test_a_wrong_result_for_a_batch_is_a_missing_reward(returned, kind):
    manager = RewardManager(make_tokenizer(), 0, compute_score=lambda solution_strs, ground_truths: returned)
    failures = manager(make_batch(["6", "7"]), return_dict=True)["failures"]
    manager.close()
    assert failures[0].kind == kind


def test_trls_arguments_are_said_to_be_trls_with_the_names_to_use_instead():
    def reward_len(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    manager = RewardManager(make_tokenizer(), 0, compute_score=reward_len)
    with pytest.raises(ConfigError, match=r"reward_len has TRL's arguments .*solution_strs.*ground_truths"):
        manager.check([Tag("any")])


def test_calls_that_were_made_again_are_counted_row_by_row(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_FIRST_WAIT_S", 0.01)
    seen = []

    def judge(solution_str):
        seen.append(solution_str)
        if solution_str == "6" and seen.count("6") < 3:
            raise ConnectionError
        return 1.0

    def judge_all(solution_strs):
        seen.append("all")
        if seen.count("all") < 2:
            raise ConnectionError
        return [1.0] * len(solution_strs)

    for function, retries in ((judge, [0, 2, 0]), (judge_all, [1, 1, 1])):
        manager = RewardManager(make_tokenizer(), 0, compute_score=function, retries=2)
        answer = manager(make_batch(["7", "6", "5"]), return_dict=True)
        manager.close()
        assert answer["failures"] == [None, None, None]
        assert answer["retries"] == retries


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(lambda predict_str, ground_truth: 1.0),
        lambda solution_str, ground_truth, scale: 1.0,
        lambda solution_strs, labels: [1.0],
    ],
)
def test_a_wrong_signature_is_found_before_training(function):
    manager = RewardManager(make_tokenizer(), 0, compute_score=function)
    with pytest.raises(ConfigError, match=r"needs (predict_str|scale|labels), which"):
        manager.check([Tag("any")])
