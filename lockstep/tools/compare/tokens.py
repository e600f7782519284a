"""Tokens as text, where they stand in a response."""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.protocol import DataProto, Ragged
from lockstep.tools.compare import arithmetic
from lockstep.tools.compare.report import Excerpt, TokenPush
from lockstep.trainer.ppo.metrics import row_sums

_CONTEXT = 8
"""Tokens of text on each side of a token."""
_EXCERPT = 28
"""Tokens of a response in an excerpt."""
_PROMPT = 60
"""Characters of the end of a prompt."""


def token_push(batch: DataProto, tokenizer: Any, numbers: Mapping[str, Ragged], row: int, position: int) -> TokenPush:
    """The token at a place, with its context and its `numbers`: push, advantage and ratio."""
    prompt, response = (batch.ragged(name)[row].tolist() for name in ("prompts", "responses"))
    ids, at = prompt + response, len(prompt) + position
    own = {name: float(column[row][position]) for name, column in numbers.items()}
    return TokenPush(
        row=row,
        position=position,
        token=tokenizer.decode(ids[at : at + 1]),
        before=tokenizer.decode(ids[max(at - _CONTEXT, 0) : at]),
        after=tokenizer.decode(ids[at + 1 : at + 1 + _CONTEXT]),
        share=abs(own["push"]) / float(numbers["push"].values.abs().double().sum()),
        **own,
    )


def excerpts(batch: DataProto, pushes: Sequence[Ragged], tokenizer: Any, count: int) -> list[Excerpt]:
    """Pieces of at most `count` responses around the most pushed tokens, with the pushes of every algorithm."""
    prompts, responses = batch.ragged("prompts"), batch.ragged("responses")
    scores = row_sums(batch, "token_level_scores")
    found = []
    for row, position in arithmetic.windows(pushes, count):
        ids = responses[row].tolist()
        start = max(min(position - _EXCERPT // 2, len(ids) - _EXCERPT), 0)
        end = min(start + _EXCERPT, len(ids))
        found.append(
            Excerpt(
                row=row,
                prompt=tokenizer.decode(prompts[row].tolist())[-_PROMPT:],
                score=float(scores[row]),
                start=start,
                tokens=[tokenizer.decode([token]) for token in ids[start:end]],
                pushes=[p[row][start:end].tolist() for p in pushes],
                is_cut=end < len(ids),
            )
        )
    return found
