"""A runner without a model, for tests of everything around it.

Its "keys" are running hashes: the number stored for a token is made from the token and the number stored for the one before it, which is
read through the page table. The next token is a function of that number. So a page that was mixed up, overwritten, freed too early or
not copied gives other tokens than `expected_response`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.native.layout import StepBatch
from lockstep.workers.rollout.native.runner import Runner

VOCABULARY = 1000


def expected_response(prompt: list[int], key: int, max_tokens: int, stop: set[int]) -> list[int]:
    """What a request must get, computed by itself."""
    state = 0
    for token in prompt:
        state = _absorb(state, token)
    response: list[int] = []
    while len(response) < max_tokens and not (response and response[-1] in stop):
        response.append(_next(state, key, len(response)))
        state = _absorb(state, response[-1])
    return response


class FakeRunner(Runner):
    """See the module's docstring. `bad_token` makes the log-probs of a row whose last token it is NaN."""

    def __init__(self, page_size: int, lookahead: int = 1, mixed: bool = True, bad_token: int | None = None) -> None:
        self.page_size, self.lookahead, self.mixed, self.bad_token = page_size, lookahead, mixed, bad_token
        self.num_tokens = 0
        self.most_rows = 0

    def ready(self) -> AbstractContextManager[None]:
        return nullcontext()

    def most_pages(self) -> int:
        return 1 << 20

    def open(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.memory = [-1] * (num_pages * self.page_size)

    def close(self) -> None:
        self.num_pages = 0
        del self.memory

    def copy_pages(self, copies: dict[int, int]) -> None:
        size = self.page_size
        sources = {target: self.memory[source * size : (source + 1) * size] for target, source in copies.items()}
        for target, content in sources.items():
            self.memory[target * size : (target + 1) * size] = content

    def step(self, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        self.num_tokens += len(batch.input_ids)
        self.most_rows = max(self.most_rows, len(batch.query_lens))
        ids, positions, slots = batch.input_ids.tolist(), batch.positions.tolist(), batch.slots.tolist()
        table = batch.page_table.tolist()
        row_of = [row for row, count in enumerate(batch.query_lens) for _ in range(count)]
        for token, position, slot, row in zip(ids, positions, slots, row_of, strict=True):
            self.memory[slot] = self._state_after(token, position, table[row])
        steps = batch.num_steps
        drawn: list[list[int]] = [[] for _ in range(steps)]
        log_probs: list[list[float]] = [[] for _ in range(steps)]
        for source, key, place in zip(
            batch.sample_from.tolist(), batch.keys.tolist(), batch.response_positions.tolist(), strict=True
        ):
            state, position, pages = self.memory[slots[source]], positions[source], table[row_of[source]]
            for step in range(steps):
                token = _next(state, key, place + step)
                drawn[step].append(token)
                log_probs[step].append(float("nan") if ids[source] == self.bad_token else -1.0)
                if step + 1 < steps:
                    position += 1
                    page = pages[position // self.page_size] if position // self.page_size < len(pages) else 0
                    state = _absorb(state, token)
                    self.memory[page * self.page_size + position % self.page_size] = state
        return torch.tensor(drawn, dtype=torch.int64), torch.tensor(log_probs)

    def _state_after(self, token: int, position: int, pages: list[int]) -> int:
        if position == 0:
            return _absorb(0, token)
        before = position - 1
        return _absorb(self.memory[pages[before // self.page_size] * self.page_size + before % self.page_size], token)


def _absorb(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % ((1 << 61) - 1)


def _next(state: int, key: int, place: int) -> int:
    return (state ^ (key * 31 + place * 7919)) % VOCABULARY
