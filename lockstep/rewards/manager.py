"""RewardManager: ask the judges of each row, combine what they say, put the score on the response's last token."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.config.reward import RewardConfig
from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, RewardError
from lockstep.judging import Sandbox, default_sandbox
from lockstep.protocol import Column, DataProto, Ragged
from lockstep.rewards.examples import print_examples
from lockstep.rewards.judges import MODEL, Judges, JudgeWeights
from lockstep.rewards.outcome import Failure, Outcome, Score, check_score
from lockstep.rewards.scoring import ComputeScore, ScoringPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_SHOWN = 200


class RewardManager:
    """Callable: batch in, reward tensor out.

    Args:
        tokenizer: Decodes responses, without special tokens.
        num_examine: Rows of each data_source to print on every call: prompt, response, ground truth, score.
        compute_score: compute_score(data_source=, solution_str=, ground_truth=, extra_info=), sync or async, returning a number or a dict
            with "score"; or compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=), called once with the lists of a
            batch, returning a list of such. None: the rule that `lockstep.rewards.graders` has for the row's data_source.
        reward_fn_key: The column that holds the data_source.
        timeout_s: Deadline of each call of a function.
        retries: How often a call that raised, was late or lost its process is made again.
        num_workers: Processes that call functions; None: one a core, at most 8.
        max_memory_mb: Memory of each of them, and of each process that it starts; None: no limit.
        functions: More judges, by name (see `lockstep.rewards.judges`).
        weights: data_source or "*" -> judge -> weight.
        make_sandbox: Makes the sandbox that runs the programs of rows with test cases, when it is first needed.

    A function of a module runs in a worker process and is killed at its deadline; a lambda, a closure, a function of the running script
    and a function with an argument `sandbox` run in threads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        timeout_s: float = RewardConfig.timeout_s,
        num_workers: int | None = None,
        max_memory_mb: int | None = None,
        functions: Mapping[str, ComputeScore] | None = None,
        weights: Mapping[str, JudgeWeights] | None = None,
        make_sandbox: Callable[[], Sandbox] = default_sandbox,
        retries: int = RewardConfig.retries,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        judges = Judges(compute_score, functions, weights)
        # A dataset has few tags: what they mean is decided once, by `check`.
        self.judges_of = functools.cache(judges.of)
        self.explicit = functools.cache(judges.explicit)
        self.function = functools.cache(judges.function)
        self._sandbox = functools.cache(make_sandbox)
        self._model_judges_all = False
        self._pool = ScoringPool(num_workers or min(os.cpu_count() or 1, 8), timeout_s, max_memory_mb, retries)

    def check(self, tags: Iterable[Tag], has_model: bool = False, validation: bool = False) -> None:
        """Before training: every row must have a judge. Without a model, weights for one are left out in validation.

        In training, a reward model that is there although no row asks for it judges every row that has no explicit weights.

        Raises MissingReward for a data_source that nobody can judge, DataError for rows without one, ConfigError for a judge that is not
        there, ResourceError when programs must be run and cannot be.
        """
        asked = []
        for tag in tags:
            judges = self.judges_of(tag, has_model)
            asked.append(MODEL in judges)
            if self.runs_programs({*judges, *self.judges_of(tag, True)}, tag.data_source):
                self._sandbox()
            if MODEL in self.explicit(tag) and not (has_model or validation):
                raise ConfigError(
                    f"the weights of data_source {tag.data_source!r} name a reward model, and there is none: "
                    "set reward_model.enable=true and reward_model.model.path"
                )
        self._model_judges_all = has_model and not validation and not any(asked)

    def wants_model(self, data: DataProto) -> Tensor:
        """bool [rows]: which responses the reward model is to score."""
        wanted = [self.waits_for_model(tag) or MODEL in self.judges_of(tag, True) for tag in self.tags(data)]
        return torch.tensor(wanted, dtype=torch.bool)

    def waits_for_model(self, tag: Tag) -> bool:
        """Whether the reward model judges a row although nothing says so; its judges are known when the model has spoken."""
        return self._model_judges_all and not self.explicit(tag)

    def begin(self, data: DataProto) -> Scoring:
        """Start scoring a batch whose responses come one by one: `data` has every column but those; see `Scoring.add`."""
        return Scoring(self, data)

    def __call__(
        self, data: DataProto, return_dict: bool = False, scoring: Scoring | None = None, ragged: bool = False
    ) -> Tensor | Ragged | dict[str, Any]:
        """Scores of the responses: float32 [rows, longest response], or unpadded with `ragged`.

        A row's judges are asked, and the weighted sum of their scores is put on its last token. Where a reward model has written
        `rm_scores` (for all rows, or those that the column `rm_judged` marks), they are returned as they are, unless the row has explicit
        weights. Reads responses, prompts (only to print), the `reward_fn_key` column, reward_model and extra_info; the last three may be
        missing. `scoring` is what `begin` returned for this batch.

        With `return_dict`:
            reward_tensor: the scores; a row whose reward is missing is zero.
            failures: a `Failure` for each row whose reward is missing, None for the others.
            reward_extra_info: the list "score" and one for each other key that a function returned, aligned with the rows (None where a
                row lacks it). An empty response has no token to hold its score; that is only in "score". Empty when no function was asked.
            reward_parts: judge -> list of its scores, None where it was not asked.
            retries: how often calls for each row were made again.

        Raises RewardError for a failure when the caller did not ask for the dict, and what `check` raises.
        """
        scoring = scoring or self.begin(data)
        answer = scoring.finish(data)
        rewards: Ragged = answer["reward_tensor"]
        if self.num_examine:
            sources, reward_models = (column(data, name) for name in (self.reward_fn_key, "reward_model"))
            print_examples(data, answer, sources, reward_models, self.decode, self.num_examine)
        if not ragged:
            answer["reward_tensor"] = rewards.pad()
        if return_dict:
            return answer
        for i, failure in enumerate(answer["failures"]):
            if failure is not None:
                raise RewardError(
                    f"the reward of row {i} is missing ({failure.kind}); data_source {scoring.sources[i]!r}; "
                    f"the response begins: {scoring.texts[i][:_NUM_SHOWN]!r}\n{failure.text}"
                )
        return answer["reward_tensor"]

    def close(self) -> None:
        """End the scoring processes. The manager can be used again."""
        self._pool.close()

    def submit(self, judge: str, source: str | None, row: Mapping[str, Any]) -> Future[Outcome]:
        """Ask one judge (not the model) about one response."""
        found = self.function(judge, source)
        arguments = {name: row[entry] for name, entry in found.arguments.items()}
        if found.takes_sandbox:
            arguments["sandbox"] = self._sandbox()
        return self._pool.submit(found.function, arguments)

    def ask_about_all(self, judge: str, rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Ask a judge that takes a whole batch, and wait: an outcome for each row."""
        found = self.function(judge, rows[0]["data_source"])
        lists = {name: [row[entry] for row in rows] for name, entry in found.arguments.items()}
        outcome = self._pool.submit(found.function, lists).result()
        if isinstance(outcome, Failure):
            return [outcome] * len(rows)  # each row says how often the call for all was made again
        results = outcome.extra["results"]
        if len(results) != len(rows):
            return [Failure("invalid", f"the reward function returned {len(results)} results for {len(rows)} responses")] * len(
                rows
            )
        return [replace(check_score(result), num_retries=outcome.num_retries) for result in results]

    def runs_programs(self, judges: Iterable[str], source: str | None) -> bool:
        """Whether one of the judges runs the response in the sandbox."""
        return any(self.function(judge, source).takes_sandbox for judge in judges if judge != MODEL)

    def decode(self, ids: Tensor) -> str:
        """Text of response or prompt tokens, without special ones."""
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str), type(text)
        return text

    def tags(self, data: DataProto) -> list[Tag]:
        """What each row says about its reward."""
        return list(map(Tag.of, column(data, self.reward_fn_key), column(data, "reward_model")))


class Scoring:
    """The scores of one batch on their way. `add` may be called from any thread, for rows in any order; `finish` asks for the rest."""

    def __init__(self, manager: RewardManager, data: DataProto) -> None:
        self._manager = manager
        self.sources, self._reward_models, self._extra_infos = (
            column(data, name) for name in (manager.reward_fn_key, "reward_model", "extra_info")
        )
        self.texts: list[str] = [""] * len(self.sources)
        self._tags = manager.tags(data)
        self._asked: list[dict[str, Future[Outcome]]] = [{} for _ in self.sources]
        self._together: dict[str, dict[int, dict[str, Any]]] = {}
        """Judge that takes a whole batch -> the rows that it is to be asked about."""

    def add(self, row: int, response_ids: Tensor) -> None:
        """The response of a row is there: ask its judges. Rows whose judges cannot be known before the model has spoken wait."""
        if not self._manager.waits_for_model(self._tags[row]):
            self._ask(row, response_ids, self._manager.judges_of(self._tags[row], True))

    def finish(self, data: DataProto) -> dict[str, Any]:
        """Ask the judges that were not asked, wait for all, and combine. Reads responses, rm_scores, rm_judged; see
        `RewardManager.__call__` for what is returned.
        """
        manager = self._manager
        responses = data.ragged("responses")
        judged_ids = data.ragged("last_turn") if "last_turn" in data else responses
        rm_scores = data.columns.get("rm_scores")
        judged = data.batch["rm_judged"].bool().tolist() if "rm_judged" in data else [rm_scores is not None] * len(data)
        chosen: list[JudgeWeights] = []
        for i, (tag, row) in enumerate(zip(self._tags, judged_ids.rows(), strict=True)):
            by_model = judged[i] and not manager.explicit(tag)
            chosen.append({MODEL: 1.0} if by_model else manager.judges_of(tag, judged[i]))
            self._ask(i, row, chosen[i])
        # Each call has its own deadline, so this ends.
        outcomes = [{judge: asked.result() for judge, asked in futures.items()} for futures in self._asked]
        for judge, rows in self._together.items():
            places = sorted(rows)
            for i, outcome in zip(places, manager.ask_about_all(judge, [rows[i] for i in places]), strict=True):
                outcomes[i][judge] = outcome
        return _combine(chosen, outcomes, rm_scores, responses)

    def _ask(self, row: int, response_ids: Tensor, judges: Iterable[str]) -> None:
        """Ask those of the judges, other than the model, that were not asked."""
        functions = [judge for judge in judges if judge != MODEL and judge not in self._asked[row]]
        if not functions:
            return
        reward_model = self._reward_models[row] or {}
        self.texts[row] = self._manager.decode(response_ids)
        known = {
            "data_source": self.sources[row],
            "solution_str": self.texts[row],
            "ground_truth": reward_model.get("ground_truth"),
            "extra_info": self._extra_infos[row],
            "test_cases": reward_model.get("test_cases") or reward_model.get("ground_truth"),
        }
        for judge in functions:
            if self._manager.function(judge, self.sources[row]).takes_batch:
                self._together.setdefault(judge, {})[row] = known
            else:
                self._asked[row][judge] = self._manager.submit(judge, self.sources[row], known)


def _combine(
    chosen: Sequence[JudgeWeights], outcomes: Sequence[Mapping[str, Outcome]], rm_scores: Column | None, responses: Ragged
) -> dict[str, Any]:
    rewards = responses.like(torch.zeros(len(responses.values)))
    failures: list[Failure | None] = [None] * len(chosen)
    extras: list[dict[str, Any]] = [{} for _ in chosen]
    parts: dict[str, list[float | None]] = {}
    for i, (weights, said, row_rewards) in enumerate(zip(chosen, outcomes, rewards.rows(), strict=True)):
        on_last = total = 0.0
        for judge, weight in weights.items():
            outcome: Outcome
            values = parts.setdefault(judge, [None] * len(chosen))
            if judge == MODEL:
                assert rm_scores is not None
                scores = rm_scores[i][: len(row_rewards)].float()
                row_rewards.add_(weight * scores)
                value = scores.sum().item()
                outcome = (
                    Score(value) if math.isfinite(value) else Failure("invalid", "the reward model's score is not a finite number")
                )
            else:
                outcome = said[judge]
            if isinstance(outcome, Failure):
                failures[i] = outcome
                continue
            values[i] = outcome.value
            total += weight * outcome.value
            on_last += weight * outcome.value if judge != MODEL else 0.0
            prefix = f"{judge}/" if len(said) > 1 else ""
            extras[i] |= {prefix + name: entry for name, entry in outcome.extra.items()}
        if failures[i] is not None:
            row_rewards.zero_()
        elif on_last:
            row_rewards[-1:] += on_last
        extras[i] = {"score": None if failures[i] else total} | extras[i]
    names = dict.fromkeys(name for extra in extras for name in extra) if any(outcomes) else ()
    return {
        "reward_tensor": rewards,
        "failures": failures,
        "reward_extra_info": {name: [extra.get(name) for extra in extras] for name in names},
        "reward_parts": parts,
        "retries": [sum(outcome.num_retries for outcome in said.values()) for said in outcomes],
    }


def column(data: DataProto, name: str) -> Sequence[Any]:
    """An object column; None in every row where the batch has none."""
    return data.non_tensor_batch.get(name, [None] * len(data))  # type: ignore[return-value]
