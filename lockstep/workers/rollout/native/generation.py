"""Generation: the loop of one call. It asks the scheduler what to compute, builds the pass, and sorts out what was drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.base import Completion, Request, Stopping, failed
from lockstep.workers.rollout.counted import request_keys
from lockstep.workers.rollout.native.layout import StepBatch
from lockstep.workers.rollout.native.runner import Runner
from lockstep.workers.rollout.native.scheduler import Plan, Prompt, Scheduler, Sequence


class Generation:
    """Serves `requests[index]` for the indices in `stopping`, which says when each response ends; they must all fit into the pool."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        requests: Rows[Request],
        stopping: dict[int, Stopping],
        sampling: SamplingParams,
        version: int,
    ) -> None:
        self.runner, self.scheduler, self.requests, self.stopping = runner, scheduler, requests, stopping
        self.sampling, self.version = sampling, version
        self.keys = request_keys(sampling.seed, [request.key for request in requests])
        self.sequences = group_by_prompt(requests, stopping)
        scheduler.add(self.sequences.values())

    def run(self, take_aborts: Callable[[], set[int]]) -> Iterator[Completion]:
        """Completions as they finish. `take_aborts` is asked before each pass which requests to end now."""
        while not self.scheduler.is_idle:
            for index in sorted(take_aborts() & self.sequences.keys()):
                yield self._finish(self.sequences[index], "abort")
            plan = self.scheduler.plan()
            if plan.rows:
                yield from self._compute(plan)

    def _compute(self, plan: Plan) -> Iterator[Completion]:
        self.runner.copy_pages(plan.copies)
        tokens, log_probs = self.runner.step(self._batch(plan), self.sampling)
        draws = [row.draws for row in plan.rows]
        columns = zip(tokens.T.tolist(), log_probs.T.tolist(), strict=True)
        for row, sequences in zip(plan.rows, draws, strict=True):
            if not sequences:
                self.scheduler.advance(row)
            for sequence in sequences:
                completion = self._take(sequence, *next(columns))
                if completion is not None:
                    yield completion

    def _take(self, sequence: Sequence, tokens: list[int], log_probs: list[float]) -> Completion | None:
        """Add the drawn tokens up to the response's end."""
        stopping = self.stopping[sequence.index]
        so_far = sequence.tokens
        for count, log_prob in enumerate(log_probs, 1):
            if not math.isfinite(log_prob):
                self.scheduler.finish(sequence)
                del self.sequences[sequence.index]
                reason = f"the model's logits are not finite at token {len(so_far) + count - 1} of the response"
                return failed(sequence.index, self.requests[sequence.index], reason, self.version)
            reason_to_end = stopping.reason([*so_far[-stopping.window :], *tokens[:count]], len(so_far) + count)
            if reason_to_end or count == len(tokens):
                break
        self.scheduler.append(sequence, tokens[:count], log_probs[:count])
        return self._finish(sequence, reason_to_end) if reason_to_end else None

    def _finish(self, sequence: Sequence, reason: str) -> Completion:
        self.scheduler.finish(sequence)
        del self.sequences[sequence.index]
        return Completion(
            index=sequence.index,
            ids=torch.tensor(sequence.tokens, dtype=torch.int64),
            log_probs=torch.tensor(sequence.log_probs, dtype=torch.float32),
            finish_reason=reason,
            policy_version=self.version,
        )

    def _batch(self, plan: Plan) -> StepBatch:
        page_size = self.scheduler.pool.page_size
        input_ids: list[int] = []
        positions: list[int] = []
        sample_from: list[int] = []
        drawn: list[Sequence] = []
        for row in plan.rows:
            start, stop = row.sequence.num_cached, row.sequence.num_cached + row.count
            input_ids += row.sequence.slice(start, stop)
            positions += range(start, stop)
            for sequence in row.draws:
                sample_from.append(len(input_ids) - 1)
                drawn.append(sequence)
        query_lens = [row.count for row in plan.rows]
        most = max(len(row.sequence.pages) for row in plan.rows)
        page_table = torch.tensor(
            [row.sequence.pages + [0] * (most - len(row.sequence.pages)) for row in plan.rows], dtype=torch.int32
        )
        places = torch.tensor(positions)
        rows = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
        slots = page_table[rows, places // page_size].long() * page_size + places % page_size
        penalised = self.sampling.repetition_penalty != 1.0
        return StepBatch(
            input_ids=torch.tensor(input_ids),
            positions=places,
            slots=slots,
            query_lens=query_lens,
            context_lens=torch.tensor([row.sequence.num_cached for row in plan.rows], dtype=torch.int32),
            page_table=page_table,
            sample_from=torch.tensor(sample_from, dtype=torch.int64),
            keys=self.keys[[sequence.index for sequence in drawn]],
            response_positions=torch.tensor([len(sequence.tokens) for sequence in drawn], dtype=torch.int64),
            num_steps=plan.num_steps,
            history=[torch.tensor(sequence.slice(0, len(sequence))) for sequence in drawn] if penalised else None,
        )


def group_by_prompt(requests: Rows[Request], stopping: dict[int, Stopping]) -> dict[int, Sequence]:
    """Request index -> sequence, those of one prompt together, in the order in which the prompts first appear."""
    groups: dict[bytes, list[Sequence]] = {}
    prompts: dict[bytes, Prompt] = {}
    for index, limits in stopping.items():
        ids = requests[index].prompt_ids
        name = ids.numpy().tobytes()
        prompt = prompts.setdefault(name, Prompt(ids.tolist()))
        groups.setdefault(name, []).append(Sequence(index, prompt, limits.max_tokens))
    return {sequence.index: sequence for group in groups.values() for sequence in group}
