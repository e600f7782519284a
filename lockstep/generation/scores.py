"""Log-probs that a request asks for beside those of its tokens: of the most likely tokens at each place, and of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.workers.rollout.request import TopLogProbs

if TYPE_CHECKING:
    from lockstep.generation.scheduler import PassRow, Sample

_ROWS = 256
"""Rows of logits that are normalised together."""


@dataclass(slots=True, eq=False)
class Scores:
    """What one sample was asked for, and has by now."""

    top: int
    """How many of the most likely tokens."""
    start: int | None
    """The first token, prompt and what comes before it counted, whose log-prob is wanted; None: those of the prompt are not."""
    num_scored: int = 0
    """How many tokens from there have theirs."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Of these: log-probs [t], and log-probs and ids of the most likely tokens [t, top]."""
    response: TopLogProbs = field(default_factory=list)
    """Of the response."""

    @property
    def wants_prompt(self) -> bool:
        """Whether tokens of the prompt are scored."""
        return self.start is not None

    def most_reused(self, most: int) -> int:
        """How many tokens need not be computed, of `most`: a token's log-prob comes from the one before it."""
        return most if self.start is None else min(most, self.start + self.num_scored - 1)

    def clear(self) -> None:
        """Nothing is scored yet: what there is comes from other weights."""
        self.num_scored = 0
        self.parts.clear()


@dataclass(frozen=True)
class ScoredRow:
    """Tokens of a pass, from `place` in it on, after which the tokens `targets` of the sample's prompt come."""

    sample: Sample
    place: int
    targets: list[int]


def scored_rows(rows: Sequence[PassRow]) -> list[ScoredRow]:
    """What a pass, whose rows lie end to end, scores of prompts."""
    found = []
    base = 0
    for row in rows:
        sample = row.sample
        scores = row.sample.scores
        start = row.sample.num_cached
        if scores is not None and scores.start is not None:
            first = max(scores.start + scores.num_scored - 1, start)
            targets = sample.prompt.ids[first + 1 : start + row.count + 1]
            if targets:
                found.append(ScoredRow(sample, base + first - start, targets))
        base += row.count
    return found


def places_of(scored: Sequence[ScoredRow]) -> list[int]:
    """The tokens of the pass whose logits `take_scores` needs."""
    return [place for row in scored for place in range(row.place, row.place + len(row.targets))]


def take_scores(scored: Sequence[ScoredRow], logits: Tensor, temperatures: Sequence[float]) -> None:
    """The samples get their log-probs from `logits` [places of all rows, vocabulary], each at its temperature."""
    for row, part, temperature in zip(scored, logits.split([len(row.targets) for row in scored]), temperatures, strict=True):
        scores = row.sample.scores
        targets = torch.tensor(row.targets, device=logits.device)
        assert scores is not None
        for some, ids in zip(part.split(_ROWS), targets.split(_ROWS), strict=True):
            log_probs = (some.float() / (temperature or 1.0)).log_softmax(-1)
            own = log_probs.gather(-1, ids[:, None]).squeeze(-1)
            scores.parts.append((own, *log_probs.topk(min(scores.top, log_probs.shape[-1]), -1)))
        scores.num_scored += len(row.targets)


def top_of(logits: Tensor, top: int, temperature: float) -> list[tuple[int, float]]:
    """The `top` most likely tokens of one row of logits [vocabulary]."""
    values, ids = (logits.float() / (temperature or 1.0)).log_softmax(-1).topk(min(top, len(logits)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def with_drawn(top: list[tuple[int, float]], token: int, log_prob: float) -> list[tuple[int, float]]:
    """The drawn token, where it is among them, with the log-prob that is reported for it: another sum rounds in another way."""
    return [(other, log_prob if other == token else value) for other, value in top]


def prompt_scores(scores: Scores, num_ids: int, length: int) -> tuple[Tensor | None, TopLogProbs | None]:
    """Log-probs [length] and most likely tokens of the last `length` of the `num_ids` tokens before the response; NaN and nothing where
    there are none: at the very first token, and where the sample was aborted before it was computed."""
    if scores.start is None:
        return None, None
    before = length - (num_ids - scores.start)
    after = length - before - scores.num_scored
    own = torch.cat([*(part[0].cpu() for part in scores.parts), torch.full((after,), torch.nan)])
    own = torch.cat([torch.full((before,), torch.nan), own])
    if not scores.top:
        return own, None
    lists: TopLogProbs = [[] for _ in range(before)]
    for _, values, ids in scores.parts:
        lists += [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return own, lists + [[] for _ in range(after)]
