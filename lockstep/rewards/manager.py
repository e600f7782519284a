"""RewardManager: ask the judges of each row, combine what they say, put the score on the response's last token."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.config.reward import RewardConfig
from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, RewardError
from lockstep.protocol import Column, DataProto, Ragged
from lockstep.rewards.graders import code
from lockstep.rewards.judges import MODEL, RULE, SANDBOX, Judges, JudgeWeights
from lockstep.rewards.outcome import Failure, Outcome, Score
from lockstep.rewards.sandbox import Sandbox, default_sandbox
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
            with "score". None: the rule that `lockstep.rewards.graders` has for the row's data_source.
        reward_fn_key: The column that holds the data_source.
        timeout_s: Deadline of each call of a function.
        num_workers: Processes that call functions; None: one a core, at most 8.
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
        functions: Mapping[str, ComputeScore] | None = None,
        weights: Mapping[str, JudgeWeights] | None = None,
        make_sandbox: Callable[[], Sandbox] = default_sandbox,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        self.judges = Judges(compute_score, functions, weights)
        self._make_sandbox = make_sandbox
        self._sandbox: Sandbox | None = None
        self._model_judges_all = False
        self._pool = ScoringPool(num_workers or min(os.cpu_count() or 1, 8), timeout_s)

    def check(self, tags: Iterable[Tag], has_model: bool = False, validation: bool = False) -> None:
        """Before training: every row must have a judge. In validation there is no model, and weights for one are left out.

        A reward model that is there although no row asks for it judges every row that has no explicit weights.

        Raises MissingReward for a data_source that nobody can judge, DataError for rows without one, ConfigError for a judge that is not
        there, ResourceError when programs must be run and cannot be.
        """
        asked = []
        for tag in tags:
            judges = self.judges.of(tag, has_model)
            asked.append(MODEL in judges)
            if self.runs_programs(judges, tag.data_source):
                self._get_sandbox()
            if MODEL in (self.judges.explicit(tag) or {}) and not (has_model or validation):
                raise ConfigError(
                    f"the weights of data_source {tag.data_source!r} name a reward model, and there is none: "
                    "set reward_model.enable=true and reward_model.model.path"
                )
        self._model_judges_all = has_model and not any(asked)

    def wants_model(self, data: DataProto) -> Tensor:
        """bool [rows]: which responses the reward model is to score."""
        wanted = []
        for tag in self._tags(data):
            by_default = self._model_judges_all and self.judges.explicit(tag) is None
            wanted.append(by_default or MODEL in self.judges.of(tag, has_model=True))
        return torch.tensor(wanted, dtype=torch.bool)

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

        Raises RewardError for a failure when the caller did not ask for the dict, and what `check` raises.
        """
        scoring = scoring or self.begin(data)
        answer = scoring.finish(data)
        self._print_examples(data, answer)
        rewards = answer.rewards if ragged else answer.rewards.pad()
        if return_dict:
            return {
                "reward_tensor": rewards,
                "failures": answer.failures,
                "reward_extra_info": answer.extra,
                "reward_parts": answer.parts,
            }
        for i, failure in enumerate(answer.failures):
            if failure is not None:
                raise RewardError(describe_failure(failure, i, scoring.sources[i], scoring.texts[i]))
        return rewards

    def close(self) -> None:
        """End the scoring processes. The manager can be used again."""
        self._pool.close()

    def submit(self, judge: str, source: str | None, row: Mapping[str, Any]) -> Future[Outcome]:
        """Ask one judge (not the model) about one response."""
        function = self.function(judge, source)
        arguments = _arguments(function, {**row, "ground_truth": row["test_cases"]} if judge == SANDBOX else row)
        if _takes_sandbox(function):
            arguments["sandbox"] = self._get_sandbox()
        return self._pool.submit(function, arguments)

    def function(self, judge: str, source: str | None) -> ComputeScore:
        """The function behind a judge (not the model). Raises as `Judges.rule` does."""
        if judge == SANDBOX:
            return code.compute_score
        return self.judges.rule(source) if judge == RULE else self.judges.functions[judge]

    def runs_programs(self, judges: Iterable[str], source: str | None) -> bool:
        """Whether one of the judges runs the response in the sandbox."""
        return any(_takes_sandbox(self.function(judge, source)) for judge in judges if judge != MODEL)

    def decode(self, ids: Tensor) -> str:
        """Text of response or prompt tokens, without special ones."""
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str), type(text)
        return text

    def _get_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = self._make_sandbox()
        return self._sandbox

    def _tags(self, data: DataProto) -> list[Tag]:
        sources, reward_models = (column(data, name) for name in (self.reward_fn_key, "reward_model"))
        return [Tag.of(source, reward_model) for source, reward_model in zip(sources, reward_models, strict=True)]

    def _print_examples(self, data: DataProto, answer: Answer) -> None:
        if not self.num_examine:
            return
        printed: Counter[Any] = Counter()
        for i, (source, reward_model) in enumerate(
            zip(column(data, self.reward_fn_key), column(data, "reward_model"), strict=True)
        ):
            if printed[source] < self.num_examine:
                printed[source] += 1
                failure = answer.failures[i]
                print(
                    f"[data_source] {source}\n[prompt] {self.decode(data.ragged('prompts')[i])}\n"
                    f"[response] {self.decode(data.ragged('responses')[i])}\n[ground_truth] {(reward_model or {}).get('ground_truth')}\n"
                    f"[score] {f'missing: {failure.kind}' if failure else f'{answer.total[i]:g}'}"
                )


@dataclass
class Answer:
    """What the judges of a batch said."""

    rewards: Ragged
    failures: list[Failure | None]
    total: list[float]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    parts: dict[str, list[float | None]] = field(default_factory=dict)


class Scoring:
    """The scores of one batch on their way. `add` may be called from any thread, for rows in any order; `finish` asks for the rest."""

    def __init__(self, manager: RewardManager, data: DataProto) -> None:
        self._manager = manager
        self.sources = list(column(data, manager.reward_fn_key))
        self.texts: list[str] = [""] * len(self.sources)
        self._reward_models, self._extra_infos = (list(column(data, name)) for name in ("reward_model", "extra_info"))
        self._tags = manager._tags(data)
        self._asked: list[dict[str, Future[Outcome]] | None] = [None] * len(self.sources)

    def add(self, row: int, response_ids: Tensor) -> None:
        """The response of a row is there: ask its judges. Rows whose judges cannot be known before the model has spoken wait."""
        explicit = self._manager.judges.explicit(self._tags[row])
        if explicit is None and self._manager._model_judges_all:
            return
        weights = explicit or self._manager.judges.of(self._tags[row], has_model=True)
        self._ask(row, response_ids, weights)

    def finish(self, data: DataProto) -> Answer:
        """Ask about every row that was not added, wait for all, and combine. Reads responses, rm_scores, rm_judged."""
        manager, responses = self._manager, data.ragged("responses")
        rm_scores = data.columns.get("rm_scores")
        judged = data.batch["rm_judged"].bool().tolist() if "rm_judged" in data else [rm_scores is not None] * len(data)
        chosen = []
        for i, tag in enumerate(self._tags):
            has_weights = manager.judges.explicit(tag) is not None
            chosen.append({MODEL: 1.0} if judged[i] and not has_weights else manager.judges.of(tag, judged[i]))
        for i, (weights, row) in enumerate(zip(chosen, responses.rows(), strict=True)):
            if self._asked[i] is None:
                self._ask(i, row, weights)
        # Each call has its own deadline, so this ends.
        outcomes = [{judge: asked.result() for judge, asked in (futures or {}).items()} for futures in self._asked]
        return _combine(chosen, outcomes, rm_scores, responses)

    def _ask(self, row: int, response_ids: Tensor, weights: JudgeWeights) -> None:
        functions = [judge for judge in weights if judge != MODEL]
        if not functions:
            self._asked[row] = {}
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
        self._asked[row] = {judge: self._manager.submit(judge, self.sources[row], known) for judge in functions}


def _combine(
    chosen: Sequence[JudgeWeights], outcomes: Sequence[Mapping[str, Outcome]], rm_scores: Column | None, responses: Ragged
) -> Answer:
    rewards = responses.like(torch.zeros(len(responses.values)))
    row_rewards = rewards.rows()
    failures: list[Failure | None] = [None] * len(chosen)
    total = [0.0] * len(chosen)
    extra_rows: list[dict[str, Any]] = []
    parts: dict[str, list[float | None]] = {}
    for i, (weights, row) in enumerate(zip(chosen, outcomes, strict=True)):
        on_last = 0.0
        extra: dict[str, Any] = {}
        for judge, weight in weights.items():
            value: float | None = None
            if judge == MODEL:
                assert rm_scores is not None
                scores = rm_scores[i][: len(row_rewards[i])].float()
                if torch.isfinite(scores).all():
                    row_rewards[i].add_(weight * scores)
                    value = scores.sum().item()
                else:
                    failures[i] = Failure("invalid", "the reward model's score is not a finite number")
            elif isinstance(outcome := row[judge], Score):
                on_last += weight * outcome.value
                value = outcome.value
                prefix = f"{judge}/" if len(row) > 1 else ""
                extra |= {prefix + name: said for name, said in outcome.extra.items()}
            else:
                failures[i] = outcome
            parts.setdefault(judge, [None] * len(chosen))[i] = value
            total[i] += weight * (value or 0.0)
        if failures[i] is not None:
            row_rewards[i].zero_()
            total[i] = float("nan")
        elif on_last:
            row_rewards[i][-1:] += on_last
        extra_rows.append(extra)
    names = dict.fromkeys(name for extra in extra_rows for name in extra)
    columns: dict[str, list[Any]] = {name: [extra.get(name) for extra in extra_rows] for name in names}
    if any(outcomes):
        columns = {"score": [None if failure else value for value, failure in zip(total, failures, strict=True)]} | columns
    return Answer(rewards, failures, total, columns, parts)


def describe_failure(failure: Failure, row: int, data_source: Any, response: str) -> str:
    """One failure as a message: which row, what the model had written, what happened."""
    return (
        f"the reward of row {row} is missing ({failure.kind}); data_source {data_source!r}; "
        f"the response begins: {response[:_NUM_SHOWN]!r}\n{failure.text}"
    )


def column(data: DataProto, name: str) -> Iterable[Any]:
    """An object column; None in every row where the batch has none."""
    return data.non_tensor_batch.get(name, [None] * len(data))


def _arguments(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the row's arguments that the function names; all four where it takes **keywords."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    return {name: row[name] for name in names if takes_all or name in parameters}


def _takes_sandbox(function: Callable[..., Any]) -> bool:
    return "sandbox" in inspect.signature(function).parameters
