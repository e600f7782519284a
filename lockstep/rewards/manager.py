"""RewardManager: ask the judges of each row, combine their scores, and put the sum on the response's last token.

```text
RewardManager.begin -> Scoring.add (a response is finished) -> RewardRunner.submit (runner.py) -> lockstep.processes -> the function
RewardManager.__call__ -> Scoring.finish: submit the rest, wait, combine
```
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.config.reward import RewardConfig
from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, RewardError
from lockstep.protocol import Column, DataProto, Ragged
from lockstep.rewards.judges import MODEL, Judges, JudgeWeights
from lockstep.rewards.outcome import Failure, Outcome, Score, check_score
from lockstep.rewards.runner import ComputeScore, RewardRunner
from lockstep.utils.terminal import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lockstep.judging import Sandbox

_NUM_SHOWN = 200


def _default_sandbox() -> Sandbox:
    from lockstep.judging import default_sandbox

    return default_sandbox()


class RewardManager:
    """Callable: batch in, reward tensor out.

    Args:
        tokenizer: Decodes responses, without special tokens.
        num_examine: Rows of each data_source to print on every call: prompt, response, ground truth, score.
        compute_score: compute_score(data_source=, solution_str=, ground_truth=, extra_info=), sync or async, returning a number or a dict
            with "score"; or compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=), called once with the lists of a
            batch, returning a list of numbers or dicts. None: the rule of `lockstep.rewards.graders` for the row's data_source.
        reward_fn_key: The column that holds the data_source.
        timeout_s: Deadline of each call of a function.
        retries: How often to repeat a call that raised, timed out or lost its process.
        num_workers: Processes that call functions; None: one per core, at most 8.
        max_memory_mb: Memory of each of these processes and of each of their child processes; None: no limit.
        functions: More judges, by name (see `lockstep.rewards.judges`).
        weights: data_source or "*" -> judge -> weight.
        make_sandbox: Makes the sandbox for the programs of rows with test cases, when it is first needed.

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
        make_sandbox: Callable[[], Sandbox] = _default_sandbox,
        retries: int = RewardConfig.retries,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        judges = Judges(compute_score, functions, weights)
        # A dataset has few tags, so each is looked up once, by `check`.
        self.judges_of = functools.cache(judges.of)
        self.explicit = functools.cache(judges.explicit)
        self.function = functools.cache(judges.function)
        self._sandbox = functools.cache(make_sandbox)
        self._model_judges_all = False
        self._runner = RewardRunner(num_workers or min(os.cpu_count() or 1, 8), timeout_s, max_memory_mb, retries)

    def check(self, tags: Iterable[Tag], has_model: bool = False, validation: bool = False) -> None:
        """Check before training that every row has a judge. In validation, weights for a model are left out if there is no model.

        In training, a reward model that no row asks for judges every row that has no explicit weights.

        Raise MissingReward for a data_source without a judge, DataError for rows without a data_source, ConfigError for an unknown judge,
        ResourceError if programs must be run and cannot be.
        """
        asks_for_model = False
        for tag in tags:
            judges = self.judges_of(tag, has_model)
            if MODEL in judges:
                asks_for_model = True
            if self.runs_programs({*judges, *self.judges_of(tag, True)}, tag.data_source):
                self._sandbox()
            if MODEL in self.explicit(tag) and not (has_model or validation):
                raise ConfigError(
                    f"the weights of data_source {tag.data_source!r} name a reward model, and there is none: "
                    "set reward_model.enable=true and reward_model.model.path"
                )
        self._model_judges_all = has_model and not validation and not asks_for_model

    def wants_model(self, data: DataProto) -> Tensor:
        """Return bool [rows]: the responses that the reward model is to score."""
        wanted = [self.waits_for_model(tag) or MODEL in self.judges_of(tag, True) for tag in self.tags(data)]
        return torch.tensor(wanted, dtype=torch.bool)

    def waits_for_model(self, tag: Tag) -> bool:
        """Return whether the reward model judges a row that does not ask for it; the row's judges are known when the model has scored."""
        return self._model_judges_all and not self.explicit(tag)

    def begin(self, data: DataProto) -> Scoring:
        """Start scoring a batch whose responses come one by one: `data` has every column but `responses`; see `Scoring.add`."""
        return Scoring(self, data)

    def __call__(
        self, data: DataProto, return_dict: bool = False, scoring: Scoring | None = None, ragged: bool = False
    ) -> Tensor | Ragged | dict[str, Any]:
        """Return the scores of the responses: float32 [rows, longest response], or unpadded with `ragged`.

        Asks a row's judges and puts the weighted sum of their scores on its last token. If a reward model has written `rm_scores` (for all
        rows, or for the rows that the column `rm_judged` marks), they are returned as they are, unless the row has explicit weights. Reads
        responses, prompts (only to print), the `reward_fn_key` column, reward_model and extra_info; the last three may be missing.
        `scoring` is the result of `begin` for this batch.

        With `return_dict`:
            reward_tensor: the scores; a row whose reward is missing is zero.
            failures: a `Failure` for each row whose reward is missing, None for the others.
            reward_extra_info: the list "score" and one list for each other key that a function returned, aligned with the rows (None if a
                row lacks it). An empty response has no token to hold its score, which is only in "score". Empty if no function was asked.
            reward_parts: judge -> list of its scores, None for rows that it did not judge.
            retries: how often calls for each row were repeated.

        Raise RewardError for a failure without `return_dict`, and the errors of `check`.
        """
        scoring = scoring or self.begin(data)
        result = scoring.finish(data)
        rewards: Ragged = result["reward_tensor"]
        if self.num_examine:
            self._print_examples(data, result)
        if not ragged:
            result["reward_tensor"] = rewards.pad()
        if return_dict:
            return result
        for i, failure in enumerate(result["failures"]):
            if failure is not None:
                raise RewardError(
                    f"the reward of row {i} is missing ({failure.kind}); data_source {scoring.sources[i]!r}; "
                    f"the response begins: {scoring.texts[i][:_NUM_SHOWN]!r}\n{failure.text}"
                )
        return result["reward_tensor"]

    def close(self) -> None:
        """End the scoring processes. The manager can be used again."""
        self._runner.close()

    def submit(self, judge: str, source: str | None, row: Mapping[str, Any]) -> Future[Outcome]:
        """Ask one judge (not the model) about one response."""
        found = self.function(judge, source)
        arguments = {name: row[entry] for name, entry in found.arguments.items()}
        if found.takes_sandbox:
            arguments["sandbox"] = self._sandbox()
        return self._runner.submit(found.function, arguments)

    def submit_batch(self, judge: str, rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Ask a judge that takes a whole batch, and wait: return an outcome for each row."""
        found = self.function(judge, rows[0]["data_source"])
        lists = {name: [row[entry] for row in rows] for name, entry in found.arguments.items()}
        outcome = self._runner.submit(found.function, lists).result()
        if isinstance(outcome, Failure):
            return [outcome] * len(rows)  # each row counts the retries of the call for all
        results = outcome.extra["results"]
        if len(results) != len(rows):
            failure = Failure("invalid", f"the reward function returned {len(results)} results for {len(rows)} responses")
            return [failure] * len(rows)
        return [replace(check_score(result), num_retries=outcome.num_retries) for result in results]

    def runs_programs(self, judges: Iterable[str], source: str | None) -> bool:
        """Return whether one of the judges runs the response in the sandbox."""
        return any(self.function(judge, source).takes_sandbox for judge in judges if judge != MODEL)

    def decode(self, ids: Tensor) -> str:
        """Return the text of response or prompt tokens, without special tokens."""
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str), type(text)
        return text

    def tags(self, data: DataProto) -> list[Tag]:
        """Return what each row states about its reward."""
        return list(map(Tag.of, _column(data, self.reward_fn_key), _column(data, "reward_model")))

    def _print_examples(self, data: DataProto, result: Mapping[str, Any]) -> None:
        """Print `num_examine` rows of each data source with their scores."""
        num_printed: Counter[Any] = Counter()
        sums = [row.sum().item() for row in result["reward_tensor"].rows()]
        scores = result["reward_extra_info"].get("score", sums)
        reward_models = _column(data, "reward_model")
        for i, source in enumerate(_column(data, self.reward_fn_key)):
            if num_printed[source] == self.num_examine:
                continue
            num_printed[source] += 1
            failure = result["failures"][i]
            score = f"missing: {failure.kind}" if failure else f"{scores[i]:g}"
            say(
                f"[data_source] {source}\n[prompt] {self.decode(data.ragged('prompts')[i])}\n"
                f"[response] {self.decode(data.ragged('responses')[i])}\n"
                f"[ground_truth] {(reward_models[i] or {}).get('ground_truth')}\n[score] {score}"
            )


class Scoring:
    """The scores of one batch while its responses are generated. Any thread may call `add`, for rows in any order; `finish` submits the
    rest."""

    def __init__(self, manager: RewardManager, data: DataProto) -> None:
        self._manager = manager
        self.sources = _column(data, manager.reward_fn_key)
        self._reward_models = _column(data, "reward_model")
        self._extra_infos = _column(data, "extra_info")
        self._tags = manager.tags(data)
        self.texts: list[str] = [""] * len(self.sources)
        self._submitted: list[dict[str, Future[Outcome]]] = [{} for _ in self.sources]
        self._for_batch: dict[str, dict[int, dict[str, Any]]] = {}
        """Judge that takes a whole batch -> row -> what it is to be asked about the row."""

    def add(self, row: int, response_ids: Tensor) -> None:
        """Submit a finished response to the row's judges. A row whose judges depend on the reward model waits for `finish`."""
        if not self._manager.waits_for_model(self._tags[row]):
            self._submit(row, response_ids, self._manager.judges_of(self._tags[row], True))

    def finish(self, data: DataProto) -> dict[str, Any]:
        """Submit what `add` has not, wait for all outcomes, and combine them. Reads responses, rm_scores, rm_judged; see
        `RewardManager.__call__` for the result.
        """
        manager = self._manager
        responses = data.ragged("responses")
        judged_ids = data.ragged("last_turn") if "last_turn" in data else responses
        rm_scores = data.columns.get("rm_scores")
        judged_by_model = data.batch["rm_judged"].bool().tolist() if "rm_judged" in data else [rm_scores is not None] * len(data)
        chosen: list[JudgeWeights] = []
        for i, ids in enumerate(judged_ids.rows()):
            tag = self._tags[i]
            if judged_by_model[i] and not manager.explicit(tag):
                weights: JudgeWeights = {MODEL: 1.0}
            else:
                weights = manager.judges_of(tag, judged_by_model[i])
            chosen.append(weights)
            self._submit(i, ids, weights)
        # Each call has its own deadline, so this ends.
        outcomes = [{judge: future.result() for judge, future in futures.items()} for futures in self._submitted]
        for judge, rows in self._for_batch.items():
            numbers = sorted(rows)
            for i, outcome in zip(numbers, manager.submit_batch(judge, [rows[i] for i in numbers]), strict=True):
                outcomes[i][judge] = outcome
        return _combine(chosen, outcomes, rm_scores, responses)

    def _submit(self, row: int, response_ids: Tensor, judges: Iterable[str]) -> None:
        """Submit a row to the judges, other than the model, that have not got it."""
        functions = [judge for judge in judges if judge != MODEL and judge not in self._submitted[row]]
        if not functions:
            return
        source = self.sources[row]
        reward_model = self._reward_models[row] or {}
        self.texts[row] = self._manager.decode(response_ids)
        entries = {
            "data_source": source,
            "solution_str": self.texts[row],
            "ground_truth": reward_model.get("ground_truth"),
            "extra_info": self._extra_infos[row],
            "test_cases": reward_model.get("test_cases") or reward_model.get("ground_truth"),
        }
        for judge in functions:
            if self._manager.function(judge, source).takes_batch:
                self._for_batch.setdefault(judge, {})[row] = entries
            else:
                self._submitted[row][judge] = self._manager.submit(judge, source, entries)


def _combine(
    chosen: Sequence[JudgeWeights], outcomes: Sequence[Mapping[str, Outcome]], rm_scores: Column | None, responses: Ragged
) -> dict[str, Any]:
    """Return the dict of `RewardManager.__call__`. A row with a judge that failed keeps no score of the others."""
    rewards = responses.like(torch.zeros(len(responses.values)))
    failures: list[Failure | None] = [None] * len(chosen)
    extras: list[dict[str, Any]] = [{} for _ in chosen]
    parts: dict[str, list[float | None]] = {}
    for i, (weights, of_functions, row_rewards) in enumerate(zip(chosen, outcomes, rewards.rows(), strict=True)):
        total = 0.0
        total_of_functions = 0.0
        for judge, weight in weights.items():
            values = parts.setdefault(judge, [None] * len(chosen))
            if judge == MODEL:
                assert rm_scores is not None
                scores = rm_scores[i][: len(row_rewards)].float()
                row_rewards.add_(weight * scores)
                outcome = _model_outcome(scores)
            else:
                outcome = of_functions[judge]
            if isinstance(outcome, Failure):
                failures[i] = outcome
                continue
            values[i] = outcome.value
            total += weight * outcome.value
            if judge != MODEL:
                total_of_functions += weight * outcome.value
            prefix = f"{judge}/" if len(of_functions) > 1 else ""
            extras[i] |= {prefix + name: entry for name, entry in outcome.extra.items()}
        if failures[i] is not None:
            row_rewards.zero_()
        elif total_of_functions:
            row_rewards[-1:] += total_of_functions
        extras[i] = {"score": None if failures[i] else total} | extras[i]
    names = dict.fromkeys(name for extra in extras for name in extra) if any(outcomes) else ()
    return {
        "reward_tensor": rewards,
        "failures": failures,
        "reward_extra_info": {name: [extra.get(name) for extra in extras] for name in names},
        "reward_parts": parts,
        "retries": [sum(outcome.num_retries for outcome in row.values()) for row in outcomes],
    }


def _model_outcome(scores: Tensor) -> Outcome:
    value = scores.sum().item()
    if math.isfinite(value):
        return Score(value)
    return Failure("invalid", "the reward model's score is not a finite number")


def _column(data: DataProto, name: str) -> Sequence[Any]:
    """Return an object column, or None for every row if the batch has no such column."""
    return data.non_tensor_batch.get(name, [None] * len(data))  # type: ignore[return-value]
