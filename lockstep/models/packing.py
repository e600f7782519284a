"""Rows become tensors here and nowhere else: which rows go together (micro-batches), and how they lie end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError
from lockstep.models.attention import PackedLayout
from lockstep.protocol import DataProto, Ragged

MIN_SHARED = 32
"""A shorter prompt is computed for each of its rows: attention to a prompt apart costs more than it saves."""
MAX_LONGER = 8
"""So is one of rows whose responses are longer than so many prompts: the pass over few keys for many queries leaves the GPU idle."""


@dataclass(frozen=True)
class Budget:
    """How much one micro-batch may hold. It bounds memory and never changes a result."""

    max_tokens: int
    """Tokens in one micro-batch; used when max_rows is None."""
    max_rows: int | None = None
    """Rows in one micro-batch."""

    def times(self, ranks: int) -> Budget:
        """What fits into a micro-batch whose tokens `ranks` ranks divide, each with this budget."""
        return replace(self, max_tokens=self.max_tokens * ranks)


@dataclass(frozen=True)
class TokenRows:
    """M response tokens of some rows, end to end, with what a loss reads of them."""

    rows: Rows
    """How they divide into rows."""
    columns: dict[str, Tensor]
    """[M] each, on the device: those columns of the batch that have a number per response token."""
    indices: Sequence[Any]
    """The dataset's row number of each row, for messages."""
    row_columns: dict[str, Tensor] = field(default_factory=dict)
    """[rows] each, on the device: those columns of the batch that have a number per row."""
    units: Sequence[Sequence[int]] | None = None
    """Rows that a loss sees together (`DataProto.units`); None where each is one."""

    def chunks(self, max_tokens: int, cuts_rows: bool = False) -> list[TokenRows] | None:
        """Return runs of whole rows, and of whole units, of at most `max_tokens` tokens each; None if a row, or unit, has more.

        With `cuts_rows` a longer row is cut into about equal parts, each of which counts as a row.
        """
        lengths = self.rows.lengths.tolist()
        if cuts_rows and self.units is None and max(lengths) > max_tokens:
            return self._cut(max_tokens).chunks(max_tokens)
        sizes = lengths
        if self.units is not None:
            sizes = [sum(lengths[row] for row in unit) for unit in self.units]
        if max(sizes) > max_tokens:
            return None
        chunks = []
        token = 0
        for numbers in cut_into_micro_batches(lengths, Budget(max_tokens), units=self.units):
            of_rows = slice(numbers[0], numbers[-1] + 1)
            rows = Rows(self.rows.lengths[of_rows], self.rows.device)
            end = token + rows.num_tokens
            columns = {name: column[token:end] for name, column in self.columns.items()}
            row_columns = {name: column[of_rows] for name, column in self.row_columns.items()}
            chunks.append(TokenRows(rows, columns, self.indices[of_rows], row_columns))
            token = end
        return chunks

    def _cut(self, max_tokens: int) -> TokenRows:
        """Return the same tokens with longer rows in parts."""
        row_of_part = []
        part_lengths = []
        for row, length in enumerate(self.rows.lengths.tolist()):
            count = -(-length // max_tokens)
            for part in range(count):
                row_of_part.append(row)
                part_lengths.append(length // count + (part < length % count))
        rows = torch.tensor(row_of_part)
        row_columns = {name: column[rows.to(column.device)] for name, column in self.row_columns.items()}
        indices = [self.indices[row] for row in row_of_part]
        return TokenRows(Rows(torch.tensor(part_lengths), self.rows.device), self.columns, indices, row_columns)


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch: rows end to end, without padding. N tokens, M of them response tokens.

    Rows of the same prompt share it, which makes N smaller and changes no number.
    """

    input_ids: Tensor
    """[1, N]"""
    position_ids: Tensor
    """[1, N]: the place of the token in its row."""
    layout: PackedLayout
    """Where each row lies."""
    predict_at: Tensor
    """[M]: the place in the pack whose output predicts each response token, which is that of the token before it in the row. For a score
    head [rows]: the last token of each row."""
    targets: Tensor
    """[M]: the response tokens; none for a score head."""
    tokens: TokenRows
    """Their rows and columns."""
    is_placeholder: bool = False
    """Whether it stands for no rows at all: it is computed for the sake of other ranks, and its results are dropped."""

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of a transformers model."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "layout": self.layout, "use_cache": False}


def cut_into_micro_batches(
    token_counts: Sequence[int],
    budget: Budget,
    shared: Sequence[int] | None = None,
    units: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Return the row numbers of each micro-batch, in order: as few as the budget allows, about equally full.

    `shared[i]` are tokens of row i that cost nothing in the micro-batch of row i - 1. `units` are runs of rows that stay together; with
    None each row is a unit. Raise ConfigError for a unit that is larger than the budget.
    """
    free = [0] * len(token_counts) if shared is None else shared
    found = [[row] for row in range(len(token_counts))] if units is None else units
    batches = _fill(token_counts, budget, free, found)
    if budget.max_rows is not None or len(batches) < 2:
        return batches
    # The last may be nearly empty: a GPU waits for the host in it. As many hold all units, since each holds its share before it is full.
    share = -(-(sum(token_counts) - sum(free)) // len(batches)) + max(free)
    largest = max(sum(token_counts[row] - free[row] for row in unit) + free[unit[0]] for unit in found)
    return _fill(token_counts, Budget(min(budget.max_tokens, share + largest)), free, found)


def _fill(token_counts: Sequence[int], budget: Budget, free: Sequence[int], units: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return micro-batches that hold as many units as they can, one after the other."""
    batches: list[list[int]] = []
    used = 0
    for unit in units:
        # What the unit costs in the micro-batch of the row before, and in one of its own.
        more = sum(token_counts[row] - free[row] for row in unit)
        alone = more + free[unit[0]]
        _check_fits(unit, alone, budget)
        if budget.max_rows and batches:
            is_full = len(batches[-1]) + len(unit) > budget.max_rows
        else:
            is_full = used + more > budget.max_tokens
        if not batches or is_full:
            batches.append([])
            used = 0
            more = alone
        batches[-1] += unit
        used += more
    return batches


def _check_fits(unit: Sequence[int], tokens: int, budget: Budget) -> None:
    rows = f"row {unit[0]} has" if len(unit) == 1 else f"rows {unit[0]} to {unit[-1]}, which are computed together, have"
    if budget.max_rows is None and tokens > budget.max_tokens:
        raise ConfigError(
            f"{rows} {tokens} tokens, more than a micro-batch may hold ({budget.max_tokens}); "
            "raise ppo_max_token_len_per_gpu (or log_prob_max_token_len_per_gpu, max_token_len_per_gpu)"
        )
    if budget.max_rows is not None and len(unit) > budget.max_rows:
        raise ConfigError(
            f"rows {unit[0]} to {unit[-1]} are computed together, but a micro-batch may hold {budget.max_rows}; "
            f"raise micro_batch_size_per_gpu to at least {len(unit)}"
        )


def shared_prompt_tokens(data: DataProto) -> list[int]:
    """Return for each row the length of its prompt if the row before has the same prompt and sharing is worth it, else 0.

    Rows with several contexts (`restarts`) share nothing.
    """
    if "restarts" in data:
        return [0] * len(data)
    prompts = data.ragged("prompts").lengths.tolist()
    responses = data.ragged("responses").lengths.tolist()
    shared = []
    for num_prompt, num_response, is_repeated in zip(prompts, responses, data.repeats_prompt(), strict=True):
        is_worth_it = num_prompt >= MIN_SHARED and num_response <= MAX_LONGER * num_prompt
        shared.append(num_prompt if is_repeated and is_worth_it else 0)
    return shared


def pack_rows(data: DataProto, device: torch.device, scored: bool = False) -> PackedRows:
    """Return the rows end to end. A prompt that neighbouring rows have in common comes once, before all responses.

    Rows that are `scored` are read at their last token; their responses have one token. A 1 in the column `restarts` marks a token that
    begins a new context.

    Without rows the result is a placeholder of one prompt token and one response token, so that a rank joins every collective. Copies to
    the device are asynchronous: rows are packed while the device works on the rows before.
    """
    if not len(data):
        token = Ragged.from_rows([[0]], dtype=torch.int64)
        one_row = DataProto.from_dict({"prompts": token, "responses": token})
        return replace(pack_rows(one_row, device, scored), is_placeholder=True)
    repeated = [tokens > 0 for tokens in shared_prompt_tokens(data)]
    prompts = data.ragged("prompts")
    responses = data.ragged("responses")
    if any(repeated):
        ids, positions, predict_at, layout, last = _lay_shared(prompts, responses, repeated, device)
    else:
        restarts = data.ragged("restarts").values.bool() if "restarts" in data else responses.values < 0
        ids, positions, predict_at, layout, last = _lay_whole(prompts, responses, restarts, device)
    targets = responses.values
    if scored:
        predict_at = last
        targets = targets[:0]
    return _on_device(ids, positions, predict_at, layout, targets, token_rows(data, device), device)


def _on_device(
    ids: Tensor,
    positions: Tensor,
    predict_at: Tensor,
    layout: PackedLayout,
    targets: Tensor,
    tokens: TokenRows,
    device: torch.device,
) -> PackedRows:
    tensors = (x.to(device, non_blocking=True) for x in (ids[None], positions[None], predict_at, targets))
    input_ids, position_ids, predict_at, targets = tensors
    return PackedRows(input_ids, position_ids, layout, predict_at, targets, tokens)


def token_rows(data: DataProto, device: torch.device) -> TokenRows:
    """Return the response tokens of these rows, with every column of a number per token and every column of a number per row."""
    lengths = data.ragged("responses").lengths
    columns: dict[str, Tensor] = {}
    row_columns: dict[str, Tensor] = {}
    for name, column in data.columns.items():
        if isinstance(column, Tensor):
            row_columns[name] = column.to(device, non_blocking=True)
        elif name not in ("prompts", "responses", "experts"):
            columns[name] = column.values.to(device, non_blocking=True)
    indices = data.non_tensor_batch.get("index", range(len(data)))
    units = data.units() if "unit" in data.columns else None
    return TokenRows(Rows(lengths, device), columns, list(indices), row_columns, units)


_Placement = tuple[Tensor, Tensor, Tensor, PackedLayout, Tensor]
"""Token ids [N], positions [N], where the response tokens are predicted [M], where the rows lie, and the last token of each [rows]."""


def _lay_whole(prompts: Ragged, responses: Ragged, restarts: Tensor, device: torch.device) -> _Placement:
    """Prompt and response of every row as one segment, but for those that begin at `restarts` [M]."""
    lengths = prompts.lengths + responses.lengths
    starts = torch.cumsum(lengths, 0) - lengths
    parts: list[Tensor] = []
    for prompt, response in zip(prompts.rows(), responses.rows(), strict=True):
        parts += (prompt, response)
    ids = torch.cat(parts)
    predict_at = torch.repeat_interleave(starts + prompts.lengths - 1, responses.lengths) + _offsets(responses.lengths)
    firsts = torch.cat([starts, predict_at[restarts] + 1]).sort().values
    segments = torch.diff(firsts, append=torch.tensor([len(ids)]))
    return ids, _offsets(segments), predict_at, PackedLayout(segments, device), starts + lengths - 1


def _lay_shared(prompts: Ragged, responses: Ragged, repeated: Sequence[bool], device: torch.device) -> _Placement:
    """The prompts, each once, then the responses, each a segment that continues its prompt."""
    first = [row for row, again in enumerate(repeated) if not again]
    prompt_of = torch.cumsum(~torch.tensor(repeated), 0) - 1
    own = prompts.select(torch.tensor(first))
    filled = responses.lengths > 0  # an empty response is no segment
    followers = torch.bincount(prompt_of[filled], minlength=len(first)).tolist()
    prompt_ends = torch.cumsum(own.lengths, 0)
    starts = prompt_ends[-1] + torch.cumsum(responses.lengths, 0) - responses.lengths
    # The token before a response is the last of its prompt; before any other token it is its neighbour.
    offsets = _offsets(responses.lengths)
    neighbour = torch.repeat_interleave(starts, responses.lengths) + offsets - 1
    predict_at = torch.where(offsets == 0, torch.repeat_interleave(prompt_ends[prompt_of] - 1, responses.lengths), neighbour)
    positions = torch.cat([_offsets(own.lengths), torch.repeat_interleave(prompts.lengths, responses.lengths) + offsets])
    layout = PackedLayout(torch.cat([own.lengths, responses.lengths[filled]]), device, followers)
    return torch.cat([own.values, responses.values]), positions, predict_at, layout, starts + responses.lengths - 1


def pack_sequences(rows: Ragged, pad_token_id: int, device: torch.device) -> PackedRows:
    """Return rows of token ids end to end, each read where transformers scores a padded row: at its last token that is not padding.

    Without rows the result is a placeholder, as in `pack_rows`.
    """
    if not len(rows):
        one_row = Ragged.from_rows([[0]], dtype=torch.int64)
        return replace(pack_sequences(one_row, pad_token_id, device), is_placeholder=True)
    starts = torch.cumsum(rows.lengths, 0) - rows.lengths
    last = torch.stack([(torch.arange(len(row)) * (row != pad_token_id)).argmax() for row in rows.rows()])
    tokens = TokenRows(Rows(torch.ones_like(rows.lengths), device), {}, range(len(rows)))
    layout = PackedLayout(rows.lengths, device)
    return _on_device(rows.values, _offsets(rows.lengths), starts + last, layout, rows.values[:0], tokens, device)


def _offsets(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... anew for each of `lengths`, end to end."""
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(torch.cumsum(lengths, 0) - lengths, lengths)
