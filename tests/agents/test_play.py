"""Episodes against a slow oracle: one forward pass over each whole episode."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import environments
from helpers.episodes import Case, Fed, assert_follows_the_policy, plain
from transformers import AutoModelForCausalLM

from lockstep.agents.chat_template import ConversationTemplate, TurnTemplate
from lockstep.agents.parsers import PARSERS, Fault, Parsed, ToolCall
from lockstep.agents.play import EpisodeLimits, EpisodeTask, Player
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.data.encoder import truncate
from lockstep.errors import DataError
from lockstep.generation.engine import NativeRollout
from lockstep.generation.scheduler import Scheduler
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.hf import HFRollout

LIMITS = EpisodeLimits(8, 12, None, 4, 30.0, 100.0, 1)


@pytest.fixture(scope="module")
def tokenizer(chat_model):
    return hf_tokenizer(str(chat_model))


@pytest.fixture(scope="module")
def engine(chat_model, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(chat_model, attn_implementation="eager").eval()
    module = AutoModelForCausalLM.from_pretrained(chat_model, attn_implementation=NativeRollout.attention).eval()
    engine = NativeRollout(module, RolloutConfig(), tokenizer.pad_token_id, tokenizer.decode)
    engine.plain = model
    return engine


@pytest.fixture(scope="module")
def hf_engine(chat_model, tokenizer):
    module = AutoModelForCausalLM.from_pretrained(chat_model, attn_implementation=HFRollout.attention).eval()
    return HFRollout(module, RolloutConfig(), tokenizer.pad_token_id, tokenizer.decode)


@pytest.fixture(scope="module")
def template(tokenizer):
    return TurnTemplate(tokenizer, {})


@pytest.fixture(scope="module")
def templates(chat_model, template):
    """Templates whose earlier turns stay, never stay (thinking that is dropped), and stay where the policy wrote no blanks around them."""

    def anew(template, **kwargs):
        tokenizer = hf_tokenizer(str(chat_model))
        tokenizer.chat_template = template
        return ConversationTemplate(tokenizer, kwargs)

    templates = Path(__file__).parents[1] / "data" / "templates"
    chatml, qwen3 = ((templates / f"{name}.jinja").read_text() for name in ("chatml", "qwen3"))
    return [
        template,
        anew(chatml),
        anew(qwen3, enable_thinking=False),
        anew(chatml.replace("m.content", "(m.content | trim if m.role == 'assistant' else m.content)")),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_episodes_at_random_are_what_forward_passes_say_whatever_the_timing_and_the_cache(
    engine, tokenizer, templates, tmp_path, monkeypatch, seed
):
    case, fed = Case(seed, tmp_path, templates), Fed(engine)
    episodes = case.play(fed, tokenizer, temperature=1.0, delay=0.01)
    case.check(engine.plain, episodes, fed, temperature=1.0)
    again = case.play(engine, tokenizer, temperature=1.0, delay=0.0, max_environments=1)
    assert [plain(e) for e in again] == [plain(e) for e in episodes]
    monkeypatch.setattr(Scheduler, "resume", lambda *arguments: None)
    anew = case.play(engine, tokenizer, temperature=1.0, delay=0.01)
    assert [plain(e) for e in anew] == [plain(e) for e in episodes]


@pytest.mark.parametrize("seed", range(100, 103))
def test_so_are_those_of_transformers(engine, hf_engine, tokenizer, templates, tmp_path, seed):
    """Greedily: what transformers draws depends on how requests are batched."""
    case, fed = Case(seed, tmp_path, templates), Fed(hf_engine)
    episodes = case.play(fed, tokenizer, temperature=0.0, delay=0.01)
    case.check(engine.plain, episodes, fed, temperature=0.0)
    native = case.play(engine, tokenizer, temperature=0.0, delay=0.0)
    assert [plain(e) for e in native] == [plain(e) for e in episodes]


def sampling(tokenizer, **changes):
    return SamplingParams(temperature=1.0, max_tokens=150, stop_token_ids=(tokenizer.eos_token_id,), seed=5, **changes)


def play(engine, tokenizer, template, tasks, limits=LIMITS, on_finished=None):
    return Player(engine, tokenizer, PARSERS["hermes"].parse, sampling(tokenizer), limits).play(tasks, on_finished)


def task(template, number, make=environments.Counts, **kwargs):
    return EpisodeTask({"prompt": "?"}, [1, 2], (3, number, 0), number * 7, make, kwargs, template, {})


@pytest.mark.parametrize("make", [environments.Counts, environments.CountsInALoop, "local"], ids=["process", "loop", "thread"])
def test_episodes_are_what_a_forward_pass_over_each_says_however_they_are_timed(engine, tokenizer, template, make):
    class Local(environments.Counts):
        pass

    make = Local if make == "local" else make
    tasks = [task(template, i, make, turns=1 + i % 4, delay=0.02) for i in range(10)]
    heard, lock = {}, threading.Lock()

    def hear(number, episode):
        with lock:
            heard[number] = episode

    episodes = play(engine, tokenizer, template, tasks, on_finished=hear)
    assert heard == dict(enumerate(episodes))
    for number, episode in enumerate(episodes):
        assert_follows_the_policy(engine.plain, episode, (3, number, 0))
        assert episode.turns == len(set(episode.turn)) == 1 + number % 4
        assert episode.finish_reason == "stop"
        said = [len(message["content"]) for message in episode.messages if message["role"] == "assistant"]
        assert [reward for reward in episode.rewards if reward] == pytest.approx(
            [0.25 * (i + 1) + 0.01 * n for i, n in enumerate(said)]
        )
        ends = [i for i, reward in enumerate(episode.rewards) if reward]
        assert all(episode.mask[i] and (i + 1 == len(episode.ids) or not episode.mask[i + 1]) for i in ends)
        # What stands between two turns is what the template makes of the environment's message, after the end of a turn that was cut.
        between = [m for m in episode.messages if m["role"] == "user"][1:]
        added = [i for i, own in zip(episode.ids, episode.mask, strict=True) if not own]
        for message in between:
            following = template.following([message])
            added = added[1:] if added[0] == tokenizer.eos_token_id and added[1:][: len(following)] == following else added
            assert added[: len(following)] == following
            added = added[len(following) :]
        assert not added
    alone = [play(engine, tokenizer, template, [one])[0] for one in tasks[:4]]
    assert [plain(e) for e in alone] == [plain(e) for e in episodes[:4]]


def test_an_environment_that_fails_is_tried_again_with_the_same_tokens_and_then_missing(engine, tokenizer, template, tmp_path):
    limits = EpisodeLimits(8, 12, None, 4, 2.0, 100.0, 1)
    calm = play(engine, tokenizer, template, [task(template, 0, environments.Counts, turns=2)])
    for how in ("raise", "hang", "die", "wrong"):
        once = task(template, 0, environments.Breaks, how=how, marker=str(tmp_path / how))
        always = task(template, 0, environments.Breaks, how=how)
        repaired, lost = play(engine, tokenizer, template, [once, always], limits)
        assert repaired.retries == 1
        assert plain(repaired) == plain(calm[0])
        assert (lost.finish_reason, lost.ids, lost.retries) == ("error", [], 1)
        assert {"raise": "no disk", "hang": "2 s", "die": "exit code 3", "wrong": "must return a Turn"}[how] in lost.error


def test_budgets_end_an_episode_as_length(engine, tokenizer, template):
    (turns,) = play(engine, tokenizer, template, [task(template, 1, turns=9)], EpisodeLimits(2, 12, None, 4, 30.0, 100.0, 0))
    assert (turns.finish_reason, turns.turns, turns.mask[-1]) == ("length", 2, 1)
    huge = task(template, 1, environments.Breaks, how="huge")
    (tokens,) = play(engine, tokenizer, template, [huge])
    assert (tokens.finish_reason, tokens.turns, tokens.mask[-1]) == ("length", 1, 1)
    (cut,) = play(engine, tokenizer, template, [huge], EpisodeLimits(2, 12, 10, 4, 30.0, 100.0, 0))
    assert cut.turns == 2
    assert "yyyyyyyyyy... (99990 more characters were cut off)" in tokenizer.decode(cut.ids)
    (asked,) = play(engine, tokenizer, template, [huge], EpisodeLimits(2, 12, 1, 4, 30.0, 100.0, 0))
    (whole,) = play(engine, tokenizer, template, [huge], EpisodeLimits(2, 12, None, 4, 30.0, 100.0, 0))
    assert asked.messages[0] == whole.messages[0]  # the question is no observation


@pytest.mark.parametrize("left", [0, 1])
def test_an_observation_that_leaves_the_policy_no_token_ends_the_episode_by_length(engine, tokenizer, template, left):
    limits = EpisodeLimits(2, 12, None, 4, 30.0, 100.0, 0)
    (whole,) = play(engine, tokenizer, template, [task(template, 1, turns=9)], limits)
    first = whole.turn.index(2)  # the tokens before the policy's second turn
    params = replace(sampling(tokenizer), max_tokens=first + left)
    (episode,) = Player(engine, tokenizer, PARSERS["hermes"].parse, params, limits).play([task(template, 1, turns=9)])
    assert (episode.error, episode.finish_reason, episode.turns) == (None, "length", 1 + left)
    assert episode.ids == whole.ids[: len(episode.ids)]
    assert episode.mask[-1] == 1


def test_an_error_of_the_engine_ends_the_call_and_the_threads_of_environments(engine, tokenizer, template, monkeypatch):
    def breaks(*arguments):
        raise RuntimeError("no device")

    with engine.open(sampling(tokenizer)) as stream:
        monkeypatch.setattr(type(stream), "_work", breaks)
    with pytest.raises(RuntimeError, match="no device"):
        play(engine, tokenizer, template, [task(template, i) for i in range(6)])
    for thread in threading.enumerate():
        if thread.name == "environment":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "loop"])
def test_an_error_of_the_engine_closes_the_environments_that_are_open(engine, tokenizer, template, monkeypatch, is_async):
    closed = threading.Semaphore(0)

    class Local(environments.CountsInALoop if is_async else environments.Counts):
        def close(self):
            closed.release()

    def breaks(*arguments):
        raise RuntimeError("no device")

    with engine.open(sampling(tokenizer)) as stream:
        monkeypatch.setattr(type(stream), "_work", breaks)
    with pytest.raises(RuntimeError, match="no device"):
        play(engine, tokenizer, template, [task(template, i, Local, turns=2) for i in range(4)])
    assert all(closed.acquire(timeout=60) for _ in range(4))


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_an_environment_in_the_event_loop_that_ends_itself_is_missing_and_the_others_go_on(engine, tokenizer, template, error):
    class Ends(environments.CountsInALoop):
        async def step(self, action):
            raise error

    tasks = [task(template, 0, Ends, turns=2), task(template, 1, environments.CountsInALoop, turns=2)]
    lost, played = play(engine, tokenizer, template, tasks)
    assert (lost.finish_reason, played.finish_reason) == ("error", "stop")
    assert "cancelled" in lost.error or error.__name__ in lost.error


def test_a_token_that_ends_a_part_of_a_turn_does_not_end_the_turn(engine, tokenizer, template):
    """As gpt-oss writes <|end|> after its thinking."""
    end = tokenizer.eos_token_id
    params = SamplingParams(temperature=1.0, max_tokens=150, stop_token_ids=(), seed=5)
    tasks = [task(template, number, environments.AnythingQuick, turns=1) for number in range(4)]
    for inner in (frozenset(), frozenset({end})):
        episodes = Player(engine, tokenizer, PARSERS["hermes"].parse, params, LIMITS, inner).play(tasks)
        assert any(end in episode.ids for episode in episodes)
        assert any(end in episode.ids[:-1] for episode in episodes) == bool(inner)


def test_what_the_end_of_the_budget_cuts_is_no_fault(engine, tokenizer, template):
    def parse(text, schemas):
        return Parsed("", (), (Fault("the end tag is missing"),))

    params = SamplingParams(temperature=1.0, max_tokens=5, stop_token_ids=(), seed=5)
    (episode,) = Player(engine, tokenizer, parse, params, LIMITS).play([task(template, 1, environments.HasTools)])
    assert (episode.finish_reason, len(episode.ids), episode.faults) == ("length", 5, 0)


def test_a_call_that_cannot_be_recorded_is_not_made_and_the_policy_is_told(engine, tokenizer, template):
    def parse(text, schemas):
        return Parsed(" said ", (ToolCall("double", {"x": {1, 2}}), ToolCall("double", {"x": 2})))

    limits = EpisodeLimits(2, 12, None, 4, 30.0, 100.0, 0)
    params = SamplingParams(temperature=1.0, max_tokens=300, stop_token_ids=(), seed=5)
    (episode,) = Player(engine, tokenizer, parse, params, limits).play([task(template, 1, environments.HasTools)])
    assert (episode.error, episode.turns, episode.calls, episode.faults) == (None, 2, 2, 2)
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["4", "4"]
    assert "must be JSON" in episode.messages[-1]["content"]


def test_first_messages_that_are_too_long_are_said_to_be(engine, tokenizer, template):
    limits = EpisodeLimits(8, 12, None, 4, 30.0, 100.0, 0, max_prompt_tokens=5)
    (lost,) = play(engine, tokenizer, template, [task(template, 1, environments.AnythingQuick, turns=1)], limits)
    assert "data.max_prompt_length=5; raise it" in lost.error


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_first_messages_that_are_too_long_are_cut_where_the_data_section_says(engine, tokenizer, template, side):
    one = task(template, 1, environments.AnythingQuick, turns=1)
    (whole,) = play(engine, tokenizer, template, [one])
    (cut,) = play(
        engine, tokenizer, template, [one], EpisodeLimits(8, 12, None, 4, 30.0, 100.0, 0, max_prompt_tokens=5, prompt_side=side)
    )
    assert cut.error is None
    assert cut.prompt_ids == truncate(whole.prompt_ids, 5, side) != whole.prompt_ids


def test_messages_that_the_template_refuses_are_the_environments_failure(engine, tokenizer, template, monkeypatch):
    def refuses(*arguments, **options):
        raise DataError("roles must alternate")

    monkeypatch.setattr(template._template, "render", refuses)
    (lost,) = play(engine, tokenizer, template, [task(template, 1, environments.AnythingQuick, turns=1)])
    assert "roles must alternate" in lost.error
