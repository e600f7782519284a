"""From rows to prompts, measured with the description of tools; and from scored batches to the groups of a step."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.batches import make_batch, rows_of
from helpers.chat_model import save_chat_model

from lockstep.agents import agent_of
from lockstep.config import load_config
from lockstep.config.algorithm import FilterGroupsConfig
from lockstep.errors import ConfigError, DataError, RewardError
from lockstep.observability.metrics import Max, Mean, Sum
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.episodes import episode_prompt
from lockstep.trainer.ppo.prompts import Groups, make_prompts, open_dataset, rows_with_signal
from lockstep.trainer.ppo.rewards import Scored
from lockstep.utils.tokenizer import hf_tokenizer

PROMPTS = [" ".join(["word"] * count) for count in (1, 40, 5, 80)]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat_model"))


@pytest.fixture
def tokenizer(chat_model):
    return hf_tokenizer(str(chat_model))


@pytest.fixture
def opened(chat_model, tokenizer, tmp_path):
    def make(*keys, rows=tuple({"prompt": prompt} for prompt in PROMPTS)):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = (f"data.train_files={file}", f"actor_rollout_ref.model.path={chat_model}", "data.max_response_length=8")
        config = load_config([*files, "data.max_prompt_length=4096", "data.shuffle=false", *keys])
        files = config.data.train_files
        return config, lambda: open_dataset(config, tokenizer, files, -1, episode_prompt(config, files))

    return make


TOOLS = "agent.tools=[calculator]"


def test_the_ids_are_those_that_episodes_begin_with(opened):
    config, dataset = opened(TOOLS)
    shown = agent_of(config).shown_prompt()
    alone = opened()[1]()
    for i, row in enumerate(dataset().__getitems__(range(4))):
        assert "calculator" in shown([{"role": "user", "content": PROMPTS[i]}])
        assert len(row["prompt_ids"]) > len(alone[i]["prompt_ids"]) + 50


def test_what_is_too_long_with_the_tools_is_left_out_or_refused(opened):
    lengths = [len(row["prompt_ids"]) for row in opened(TOOLS)[1]().__getitems__(range(4))]
    limit = f"data.max_prompt_length={lengths[1]}"
    kept = opened(TOOLS, limit, "data.filter_overlong_prompts=true")[1]()
    assert [row["index"] for row in kept.__getitems__(range(len(kept)))] == [0, 1, 2]
    with pytest.raises(DataError, match=f"{lengths[3]} tokens"):
        opened(TOOLS, limit)[1]()
    assert len(opened(limit)[1]()) == 4


def test_a_replay_measures_as_the_run_did(opened, tmp_path):
    """From what was recorded, where neither the tools nor the environment are."""
    config, dataset = opened(TOOLS)
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text(json.dumps({"": agent_of(config).kind(None)}) + "\n")
    again = opened(f"agent.recorded={recorded}")[1]()
    assert [row["prompt_ids"] for row in again.__getitems__(range(4))] == [
        row["prompt_ids"] for row in dataset().__getitems__(range(4))
    ]


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ([TOOLS], {"tools": ["calculator"]}),
        (["agent.environment=helpers.environments:Counts"], {}),  # has first messages of its own
    ],
)
def test_where_episodes_begin_with_something_else_the_prompts_alone_are_measured(opened, keys, more):
    rows = [{"prompt": prompt} | more for prompt in PROMPTS]
    alone = opened(rows=rows)[1]()
    found = opened(*keys, rows=rows)[1]()
    assert [row["prompt_ids"] for row in found.__getitems__(range(4))] == [
        row["prompt_ids"] for row in alone.__getitems__(range(4))
    ]


def test_tools_that_do_not_exist_are_refused_before_a_row_is_read(opened):
    with pytest.raises(ConfigError, match=r"agent\.tools.*nothing\.py"):
        opened("agent.tools=[nothing.py:tool]", "data.train_files=none.parquet")[1]()


def scored_batch(*totals):
    """Two rows per prompt, whose one token has the score of the row."""
    batch = make_batch([[5]] * len(totals), token_level_scores=[[total] for total in totals])
    return batch, Scored([None] * len(totals), list(totals))


def test_one_batch_is_enough_without_a_filter():
    groups = Groups(FilterGroupsConfig(), wanted=2, n=2, batches_per_epoch=3)
    assert not groups.are_complete
    batch, scored = scored_batch(1.0, 1.0, 0.0, 0.0)
    groups.add(batch, scored, {"a": Sum(1.0)})
    assert groups.are_complete
    assert groups.join(pytest.fail) == (batch, scored, {"a": 1.0})


def test_groups_without_a_signal_make_room_for_those_of_further_batches_and_what_is_too_much_is_left_out():
    groups = Groups(FilterGroupsConfig(enable=True), wanted=2, n=2, batches_per_epoch=3)
    groups.add(*scored_batch(1.0, 1.0, 0.0, 3.0), {"a": Mean(1.0, 1.0), "most": Max(9.0)})
    assert not groups.are_complete
    groups.add(*scored_batch(0.0, 5.0, 0.0, 7.0), {"a": Mean(6.0, 3.0), "most": Max(4.0)})
    assert groups.are_complete
    batch, scored, metrics = groups.join(pytest.fail)
    assert rows_of(batch, "token_level_scores") == [[0.0], [3.0], [0.0], [5.0]]
    assert scored.total == [0.0, 3.0, 0.0, 5.0]
    # Of all that was generated: three of the four groups have a signal, whether the step needs them or not.
    assert metrics == {"a": 1.75, "most": 9.0, "training/num_gen_batches": 2, "training/groups_with_signal": 0.75}


def test_the_search_ends_at_its_limit_with_what_it_has_or_an_error():
    said = []
    groups = Groups(FilterGroupsConfig(enable=True, max_num_gen_batches=1), wanted=2, n=2, batches_per_epoch=3)
    groups.add(*scored_batch(1.0, 1.0, 0.0, 3.0), {})
    assert groups.are_complete
    assert len(groups.join(said.append)[0]) == 2
    assert said == ["1 of 2 groups have a signal after 1 batches of prompts; the step goes on with these"]

    groups = Groups(FilterGroupsConfig(enable=True, max_num_gen_batches=1), wanted=2, n=2, batches_per_epoch=3)
    groups.add(*scored_batch(1.0, 1.0), {})
    with pytest.raises(RewardError, match="1 batches of prompts gave no group whose responses differ in 'score'"):
        groups.join(pytest.fail)


def test_without_a_limit_of_its_own_the_search_ends_with_the_epoch():
    groups = Groups(FilterGroupsConfig(enable=True, max_num_gen_batches=0), wanted=2, n=2, batches_per_epoch=3)
    for _ in range(3):
        assert not groups.are_complete
        groups.add(*scored_batch(1.0, 1.0, 0.0, 0.0), {})
    assert groups.are_complete


def scored(*failed, rows=4, **extra):
    failures = [Failure("raised", f"row {i}") if i in failed else None for i in range(rows)]
    return Scored(failures, [0.0] * rows, extra)


def test_groups_without_a_signal_are_found_by_what_the_user_names():
    batch = make_batch(((5,), (6,), (7,), (8,)), token_level_scores=[[1.0], [0.5], [1.0], [1.0]])
    said = scored(acc=[1, 1, 0, True])
    said.total = [1.0, 1.0, 0.0, 1.0]
    for metric, expected in (("score", [2, 3]), ("seq_reward", [0, 1]), ("acc", [2, 3])):
        assert rows_with_signal(batch, said, metric).tolist() == expected
    with pytest.raises(ConfigError, match="not among what the reward function returned: acc"):
        rows_with_signal(batch, said, "accuracy")
    with pytest.raises(RewardError, match="is not a number in 1 rows: 'x'"):
        rows_with_signal(batch, scored(acc=[1, "x", 0, 1]), "acc")
    # Of the second group only one reward is left: nothing to compare.
    said = scored(2)
    said.total = [0.0, 1.0, 0.0, 1.0]
    assert rows_with_signal(batch, said, "score").tolist() == [0, 1]


def test_prompts_are_the_datasets_rows_each_n_times_with_ids_of_their_own():
    dataset = [{"prompt_ids": [i, i + 1], "index": i, "data_source": f"s{i}", "extra_info": {"i": i}} for i in range(4)]
    dataset[2]["prompt_ids"] = []
    batch = make_prompts(dataset, [3, 2], n=2, pad_token_id=9)
    assert rows_of(batch, "prompts") == [[3, 4], [3, 4], [], []]
    assert batch.ragged("prompts").values.dtype == torch.int64
    assert {name: list(values) for name, values in batch.non_tensor_batch.items()} == {
        "index": [3, 3, 2, 2],
        "data_source": ["s3", "s3", "s2", "s2"],
        "extra_info": [{"i": 3}, {"i": 3}, {"i": 2}, {"i": 2}],
        "uid": ["0", "0", "1", "1"],
        "sample": [0, 1, 0, 1],
    }
    assert batch.meta_info == {"pad_token_id": 9}


def test_a_dataset_that_can_is_asked_for_all_rows_at_once():
    class Together(list):
        asked = []

        def __getitems__(self, positions):
            self.asked.append(list(positions))
            return [self[position] for position in positions]

    dataset = Together({"prompt_ids": [i], "index": i} for i in range(4))
    batch = make_prompts(dataset, [3, 1], n=1, pad_token_id=9)
    assert rows_of(batch, "prompts") == [[3], [1]]
    assert dataset.asked == [[3, 1]]
