"""A model without weights whose key-value cache is a list, for tests of everything around a model.

The "key" of a token is the token; the logits after a token are a function of all tokens before it, read through the row's page table. So
a page that was mixed up, overwritten, freed too early or not copied gives other tokens than the plain ones (`FakeModel.alone`). A page
that nobody holds is emptied, so that one which is used again before it is written cannot be right by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.sampling import sample, uniforms

VOCABULARY = 50
EMPTY = -7
_STATES = 4999


class FakeModel:
    """`num_pages` pages of `page_size` tokens. After `bad_token` the logits are not finite."""

    def __init__(self, num_pages: int, page_size: int, bad_token: int | None = None) -> None:
        self.num_pages, self.page_size, self.bad_token = num_pages, page_size, bad_token
        self._cells = [[EMPTY] * page_size for _ in range(num_pages)]
        self._freed: set[int] = set()
        self._sources: dict[int, list[int]] = {}
        self.num_tokens = 0
        """Tokens that were computed."""

    def free(self, pages: Iterable[int]) -> None:
        """Nobody holds these pages; they are emptied at the next `begin_pass`."""
        self._freed.update(pages)

    def begin_pass(self, copies: dict[int, int]) -> None:
        """A pass was planned: its copies are made of the pages as they are now, those that were freed among them."""
        self._sources = {page: list(self._cells[page]) for page in copies.values()}
        for page in self._freed:
            self._cells[page] = [EMPTY] * self.page_size
        self._freed.clear()

    def copy(self, copies: dict[int, int]) -> None:
        """Copy pages: target -> source."""
        contents = {target: list(self._sources.get(source, self._cells[source])) for target, source in copies.items()}
        for target, content in contents.items():
            self._cells[target] = content

    def logits(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        table: Sequence[Sequence[int]],
        wanted: Sequence[int],
    ) -> Tensor:
        """Store each token in its slot; the logits [wanted, VOCABULARY] after those. `table` has the pages of each token's row."""
        size = self.page_size
        for token, slot in zip(tokens, slots, strict=True):
            self._cells[slot // size][slot % size] = token
        self.num_tokens += len(tokens)
        return _table()[[self._state(self.row(table[i], positions[i])) for i in wanted]]

    def row(self, pages: Sequence[int], position: int) -> list[int]:
        """The tokens up to `position` of who has these pages; EMPTY where nobody holds them any more."""
        pages = [*pages, 0]
        return [token for page in pages[: position // self.page_size + 1] for token in self._cells[page]][: position + 1]

    def _state(self, tokens: Sequence[int]) -> int:
        """The row of the table that stands for all of `tokens`; the last row is NaN."""
        if tokens[-1] == self.bad_token:
            return _STATES
        state = 0
        for token in tokens:
            state = (state * 53 + token + 11) % _STATES
        return state

    def log_probs_after(self, tokens: Sequence[int], temperature: float) -> Tensor:
        """[VOCABULARY]: of the token that comes next."""
        return (_table()[self._state(tokens)] / (temperature or 1.0)).log_softmax(-1)

    def alone(
        self, prompt: list[int], key: int, max_tokens: int, stop: frozenset[int], params: SamplingParams, position: int = 0
    ) -> tuple[list[int], str]:
        """The response of a request by itself and why it ends, computed in the plainest way. An error has the bad token at its end."""
        response: list[int] = []
        while True:
            history = prompt + response
            token, log_prob = sample(
                _table()[self._state(history)][None],
                uniforms(torch.tensor([key]), torch.tensor([position + len(response)])),
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                [torch.tensor(history)],
                params.presence_penalty,
                params.frequency_penalty,
                [torch.tensor(response, dtype=torch.int64)],
            )
            response.append(int(token))
            if not torch.isfinite(log_prob):
                return response, "error"
            if response[-1] in stop:
                return response, "stop"
            if len(response) >= max_tokens:
                return response, "length"


@functools.cache
def _table() -> Tensor:
    table = 2 * torch.randn(_STATES + 1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    table[-1] = torch.nan
    return table
