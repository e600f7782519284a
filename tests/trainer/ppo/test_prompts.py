"""Prompts of runs with tools are measured with the description of the tools."""

from __future__ import annotations

import json

import pytest
from helpers.chat_model import save_chat_model

from lockstep.agents.training import agent_of
from lockstep.config import load_config
from lockstep.errors import ConfigError, DataError
from lockstep.trainer.ppo.episodes import episode_prompt
from lockstep.trainer.ppo.prompts import open_dataset
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
