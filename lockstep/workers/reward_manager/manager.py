"""RewardManager: choose the judge by data_source, score every response, put the score on its last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.protocol import DataProto, Ragged
from lockstep.utils.reward_score import _select_rm_score_fn, default_compute_score
from lockstep.workers.reward_manager.scoring import ComputeScore, Score, ScoringRow, score_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardManager:
    """Callable: batch in, reward tensor out.

    Args:
        tokenizer: Decodes responses, without special tokens.
        num_examine: Rows of each data_source to print on every call: prompt, response, ground truth, score.
        compute_score: compute_score(data_source=, solution_str=, ground_truth=, extra_info=), sync or async,
            returning a number or a dict with "score". None: the rule that `lockstep.utils.reward_score` has for the
            row's data_source.
        reward_fn_key: The column that holds the data_source.
        timeout_s: Deadline for scoring one batch.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        timeout_s: float = 300.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key
        self.timeout_s = timeout_s

    def check(self, data_sources: Iterable[str | None]) -> None:
        """Before training: every data_source must have a rule, unless a compute_score was given.

        Raises MissingReward for one without a rule, DataError for a missing one (None).
        """
        if self.compute_score is not None:
            return
        for data_source in dict.fromkeys(data_sources):
            if data_source is None:
                raise DataError(
                    f"a row has no {self.reward_fn_key!r}, which chooses its reward function: add that column to "
                    "data.train_files and data.val_files, or set reward.custom_reward_function.path"
                )
            _select_rm_score_fn(data_source)

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Scores of the responses: float32 [rows, longest response], zero but for the score on each row's last token.

        `rm_scores`, where a reward model has written them, are returned as they are. Reads the columns responses,
        prompts (only to print), the `reward_fn_key` column, reward_model ({"ground_truth"}) and extra_info; the last
        three may be missing.

        With `return_dict`: {"reward_tensor", "reward_extra_info"}. The latter has the list "score" and one list for
        each other key that compute_score returned, aligned with the rows (None where a row lacks the key). A row with
        an empty response has no token to hold its score; that is only in "score".

        Raises RewardError for a function that raises, hangs or returns no number, and what `check` raises.
        """
        if "rm_scores" in data:
            return _answer(data.batch["rm_scores"], {}, return_dict)
        rows = self._scoring_rows(data)
        self.check(row.data_source for row in rows)
        scores = score_rows(self.compute_score or default_compute_score, rows, self.timeout_s)
        self._print_examples(data, rows, scores)
        reward_tensor = _on_last_token([score.value for score in scores], data.ragged("responses"))
        return _answer(reward_tensor, _collect_extra(scores), return_dict)

    def _scoring_rows(self, data: DataProto) -> list[ScoringRow]:
        responses = data.ragged("responses").rows()

        def column(name: str) -> Iterable[Any]:
            return data.non_tensor_batch.get(name, [None] * len(responses))

        return [
            ScoringRow(
                data_source=data_source,
                solution_str=self._decode(response),
                ground_truth=reward_model.get("ground_truth") if reward_model else None,
                extra_info=extra_info,
            )
            for response, data_source, reward_model, extra_info in zip(
                responses, column(self.reward_fn_key), column("reward_model"), column("extra_info"), strict=True
            )
        ]

    def _decode(self, ids: Tensor) -> str:
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str), type(text)
        return text

    def _print_examples(self, data: DataProto, rows: Sequence[ScoringRow], scores: Sequence[Score]) -> None:
        printed: Counter[Any] = Counter()
        for i, (row, score) in enumerate(zip(rows, scores, strict=True)):
            if printed[row.data_source] < self.num_examine:
                printed[row.data_source] += 1
                print(
                    f"[data_source] {row.data_source}\n[prompt] {self._decode(data.ragged('prompts')[i])}\n"
                    f"[response] {row.solution_str}\n[ground_truth] {row.ground_truth}\n[score] {score.value:g}"
                )


def _on_last_token(scores: Sequence[float], responses: Ragged) -> Tensor:
    """float32 [rows, longest response]: each score on its row's last token; a row without tokens stays zero."""
    values = torch.zeros_like(responses.values, dtype=torch.float32)
    has_token = responses.lengths > 0
    last = (responses.lengths.cumsum(0) - 1)[has_token]
    values[last.to(values.device)] = torch.tensor(scores, dtype=torch.float32)[has_token].to(values.device)
    return responses.like(values).pad()


def _collect_extra(scores: Sequence[Score]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for score in scores for name in score.extra)
    return {"score": [score.value for score in scores]} | {name: [s.extra.get(name) for s in scores] for name in names}


def _answer(reward_tensor: Tensor, extra_info: dict[str, list[Any]], return_dict: bool) -> Tensor | dict[str, Any]:
    return {"reward_tensor": reward_tensor, "reward_extra_info": extra_info} if return_dict else reward_tensor
