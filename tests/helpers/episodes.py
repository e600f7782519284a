"""Episodes at random, and the slow oracle that recomputes each with plain forward passes."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest
import torch

from helpers import environments
from lockstep.agents.episode import MISSING, Episode
from lockstep.agents.parsers import PARSERS
from lockstep.agents.play import EpisodeLimits, EpisodeTask, Player
from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.request import Completion
from lockstep.workers.rollout.sampling import request_keys, sample, uniforms

SEED = 5
MAKES = (environments.Anything, environments.AnythingInALoop, environments.AnythingQuick)


def contexts_of(episode: Episode) -> list[tuple[int, int]]:
    """Where each context lies in the episode's ids: its first token (0: the prompt comes before it), and the one after its last."""
    starts = [0, *(i for i, restarts in enumerate(episode.restarts) if restarts)]
    return list(zip(starts, [*starts[1:], len(episode.ids)], strict=True))


def assert_follows_the_policy(
    model, episode: Episode, key: tuple[int, int, int], temperature: float = 1.0, within: float = 5e-5
) -> None:
    """Every sampled token is what its key and position draw from the plain model's logits, with that log-prob; no other has one."""
    for number, (start, end) in enumerate(contexts_of(episode)):
        ids, mask = episode.ids[start:end], episode.mask[start:end]
        begun = len(episode.prompt_ids) if number == 0 else mask.index(1)
        row = torch.tensor(episode.prompt_ids + ids if number == 0 else ids)
        after = row[begun:]
        with torch.no_grad():
            logits = model(row[None]).logits[0, begun - 1 : -1]
        keys = request_keys(SEED, [(*key[:2], key[2] + (number << 32))])
        tokens, log_probs = sample(
            logits, uniforms(keys.expand(len(after)), torch.arange(len(after))), temperature, -1, 1.0, 0.0, 1.0
        )
        first = start + (begun if number else 0)
        for i, (own, token) in enumerate(zip(episode.mask[first:end], after.tolist(), strict=True)):
            if own:
                assert token == tokens[i]
                assert episode.log_probs[first + i] == pytest.approx(log_probs[i].item(), abs=within)
        assert all(math.isnan(x) != bool(own) for x, own in zip(episode.log_probs, episode.mask, strict=True))


def plain(episode: Episode):
    """What must not depend on timing."""
    names = ("prompt_ids", "ids", "mask", "turn", "restarts", "rewards", "finish_reason", "messages", "calls", "faults", "info")
    return {name: getattr(episode, name) for name in names}


class Fed:
    """An engine that notes what it is asked and answers: what the model was fed."""

    def __init__(self, engine) -> None:
        self._engine, self.rows, self._ids = engine, list[list[int]](), dict[int, list[int]]()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def open(self, sampling, **options):
        stream = self._engine.open(sampling, **options)
        add, following = stream.add, stream.next

        def noting_add(request):
            index = add(request)
            self._ids[index] = (self._ids[request.continues] if request.continues is not None else []) + request.prompt_ids.tolist()
            return index

        def noting_next(timeout_s=None):
            answer = following(timeout_s)
            if isinstance(answer, Completion):
                while answer.index not in self._ids:  # `add` has not returned yet
                    time.sleep(0)
                self._ids[answer.index] = self._ids[answer.index] + answer.ids.tolist()
                self.rows.append(self._ids[answer.index])
            return answer

        stream.add, stream.next = noting_add, noting_next
        return stream


class Case:
    """Environments, budgets and timing by chance."""

    def __init__(self, seed: int, folder: Path, templates) -> None:
        chance = self.chance = random.Random(seed)
        self.folder, self.template = folder, chance.choice(templates)
        self.max_tokens = chance.choice([30, 150, 400])
        self.turn_tokens, self.max_turns = chance.choice([None, 1, 7, 12]), chance.randint(1, 6)
        self.limits = EpisodeLimits(
            self.max_turns, self.turn_tokens, chance.choice([None, 3, 20]), chance.randint(1, 6), 30.0, 100.0, 1
        )
        self.plans = [self._plan(i) for i in range(chance.randint(2, 6))]

    def _plan(self, number: int) -> dict:
        chance = self.chance
        fails = chance.choice(["never", "never", "once", "always"])
        return {"turns": chance.randint(1, 6), "fails": fails, "number": number, "make": chance.choice(MAKES)}

    def play(self, engine, tokenizer, temperature: float, delay: float, **changes) -> list[Episode]:
        """One go. Whoever fails once does so in each."""
        folder = self.folder / str(len(list(self.folder.iterdir())))
        folder.mkdir()
        tasks = [self._task(plan, delay, folder) for plan in self.plans]
        sampling = SamplingParams(
            temperature=temperature, max_tokens=self.max_tokens, stop_token_ids=(tokenizer.eos_token_id,), seed=SEED
        )
        limits = EpisodeLimits(*(changes.get(name, getattr(self.limits, name)) for name in EpisodeLimits.__dataclass_fields__))
        return Player(engine, tokenizer, PARSERS["hermes"].parse, sampling, limits).play(tasks)

    def _task(self, plan: dict, delay: float, folder: Path) -> EpisodeTask:
        number = plan["number"]
        kwargs = {"turns": plan["turns"], "delay": delay, "fails": plan["fails"], "marker": str(folder / str(number))}
        return EpisodeTask({"prompt": "?"}, [1, 2], (3, number, number), number * 7, plan["make"], kwargs, self.template, {})

    def check(self, model, episodes: list[Episode], fed: Fed, temperature: float, within: float = 5e-5) -> None:
        """All that holds for any of them."""
        for plan, episode in zip(self.plans, episodes, strict=True):
            number = plan["number"]
            failing_turn = random.Random(number * 7).randint(0, plan["turns"])
            if episode.error is not None:
                assert plan["fails"] == "always"
                assert (episode.finish_reason, episode.ids, episode.retries) == (MISSING, [], 1)
                assert "no disk" in episode.error
                continue
            if plan["fails"] == "always":  # a budget has ended it before
                assert episode.finish_reason == "length"
                assert episode.turns <= failing_turn
            assert episode.retries <= (plan["fails"] == "once")
            assert_follows_the_policy(model, episode, (3, number, number), temperature, within)
            for start, end in contexts_of(episode):
                assert (episode.prompt_ids if start == 0 else []) + episode.ids[start:end] in fed.rows
            assert len(episode.ids) <= self.max_tokens
            assert 1 <= episode.turns <= min(plan["turns"], self.max_turns)
            turns = [
                [i for i, own in zip(episode.turn, episode.mask, strict=True) if own and i == turn] for turn in set(episode.turn)
            ]
            assert all(1 <= len(turn) <= (self.turn_tokens or self.max_tokens) for turn in turns)
            assert (episode.finish_reason == "stop") == (episode.turns == plan["turns"] and bool(episode.info.get("done")))
