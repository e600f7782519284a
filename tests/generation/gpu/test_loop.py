"""The GPU's generation loop with plain functions instead of kernels (helpers/fake_gpu.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.fake_model import VOCABULARY, FakeModel
from helpers.fake_streams import generate as generate_all
from helpers.rollouts import sampling

from lockstep.config.sampling import SamplingParams
from lockstep.generation.pages import PagePool
from lockstep.generation.scheduler import Sample, Scheduler
from lockstep.workers.rollout.request import Completion, DecodeText, Request
from lockstep.workers.rollout.sampling import request_keys

MakeGPU = Callable[..., Any]


def generate(
    gpu: Any,
    requests: list[Request],
    params: SamplingParams,
    decode_text: DecodeText | None = None,
    seats: int = 4,
    take_aborts: Callable[[], set[int]] = set,
) -> list[Completion]:
    scheduler = Scheduler(PagePool(gpu.num_pages, gpu.page_size), seats, 1000, gpu.lookahead, gpu.mixed)
    completions = generate_all(gpu, scheduler, requests, params, take_aborts, decode_text)
    return sorted(completions, key=lambda completion: completion.index)


def alone(model: FakeModel, request: Request, params: SamplingParams) -> list[int]:
    (key,) = request_keys(params.seed, [request.key]).tolist()
    limit = request.max_tokens or params.max_tokens
    return model.alone(request.prompt_ids.tolist(), key, limit, frozenset(params.stop_token_ids), params)[0]


PENALTY = {"repetition_penalty": 1e4, "temperature": 0.0, "stop_token_ids": ()}
"""A token that was seen is never taken again while another is left."""


def test_a_row_that_was_padding_has_seen_nothing(make_gpu: MakeGPU) -> None:
    """Padding rows draw token 0. The last requests get such rows: the second one, too long for the pool while the first runs, is aborted,
    and nobody has left the batch."""
    params = sampling(**PENALTY, max_tokens=20)
    lengths = [2, 190, *range(2, 9)]
    requests = [Request(torch.arange(5, 5 + n) % VOCABULARY, (0, i, 0)) for i, n in enumerate(lengths)]
    requests[1] = replace(requests[1], max_tokens=2)
    model = FakeModel(49, 4)
    calls = iter(range(1000))
    found = generate(make_gpu(model), requests, params, seats=8, take_aborts=lambda: {1} if next(calls) == 2 else set())
    assert found[1].finish_reason == "abort"
    del requests[1], found[1]
    assert [c.ids.tolist() for c in found] == [alone(model, request, params) for request in requests]
    assert any(0 in c.ids[:-1] for c in found[1:])


def test_in_the_largest_batch_a_row_that_was_padding_has_seen_nothing(make_gpu: MakeGPU) -> None:
    """Two long requests fill the pool, while 32 rows are stepped over; then short ones run together."""
    params = sampling(**PENALTY, max_tokens=40)
    limits = [60, 60, *[8] * 60]
    requests = [Request(torch.tensor([5 + i % 7, 9 + i // 7]), (0, i, 0), max_tokens=n) for i, n in enumerate(limits)]
    model = FakeModel(75, 2)
    found = generate(make_gpu(model, batch_invariant=True), requests, params, seats=24)
    assert [c.ids.tolist() for c in found] == [alone(model, request, params) for request in requests]
    assert any(0 in c.ids[:-1] for c in found[-30:])


def test_a_stop_that_the_host_finds_comes_before_logits_that_are_not_finite(make_gpu: MakeGPU) -> None:
    """In one interval: a stop id of this request alone, or a stop string, then a token after which the logits are NaN."""
    params = sampling(temperature=0.0, stop_token_ids=(), max_tokens=8)
    prompt = torch.tensor([3, 4])
    free = alone(FakeModel(2, 4), Request(prompt, (0, 0, 0)), params)
    assert len(set(free[:4])) == 4
    model = FakeModel(100, 4, bad_token=free[3])
    requests = [
        Request(prompt, (0, 0, 0), stop_token_ids=(free[2],)),
        Request(prompt, (0, 0, 0), stop=(chr(65 + free[1]) + chr(65 + free[2]),)),
        Request(prompt, (0, 0, 0), stop_token_ids=(free[3],)),
        Request(prompt, (0, 0, 0)),
    ]
    found = generate(make_gpu(model), requests, params, lambda ids: "".join(chr(65 + token) for token in ids))
    assert [c.finish_reason for c in found] == ["stop", "stop", "stop", "error"]
    assert [c.ids.tolist() for c in found] == [free[:3], free[:3], free[:4], []]
    assert "not finite at token 4 of the response" in str(found[3].error)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 10**9])
def test_a_stop_id_that_the_model_does_not_have_ends_nothing(make_gpu: MakeGPU, wrong: int) -> None:
    params = sampling(temperature=0.0, stop_token_ids=(), max_tokens=12)
    model = FakeModel(100, 4)
    requests = [Request(torch.tensor([token]), (0, token, 0)) for token in range(40)]
    expected = [alone(model, request, params) for request in requests]
    assert any(VOCABULARY - 1 in ids[:-1] for ids in expected)
    found = generate(make_gpu(model), requests, sampling(temperature=0.0, stop_token_ids=(wrong,), max_tokens=12), seats=40)
    assert [c.ids.tolist() for c in found] == expected


def test_a_prompt_is_confirmed_when_its_first_token_is_read_and_is_finite(make_gpu: MakeGPU) -> None:
    """Before that, and where a number of the first interval is not finite, nobody may start with its pages."""
    confirmed: list[tuple[int, list[int]]] = []

    class Noting(Scheduler):
        def confirm(self, sample: Sample) -> None:
            confirmed.append((sample.index, list(sample.tokens)))

    params = sampling(temperature=0.0, stop_token_ids=(), max_tokens=3)
    requests = [Request(torch.tensor([token]), (0, token, 0)) for token in (3, 4, 5)]
    # After its second token, in its first interval, the second request has no finite number.
    model = FakeModel(100, 4, bad_token=alone(FakeModel(2, 4), requests[1], params)[1])
    gpu = make_gpu(model)
    scheduler = Noting(PagePool(gpu.num_pages, gpu.page_size), 4, 1000, gpu.lookahead, gpu.mixed)
    found = {c.index: c for c in generate_all(gpu, scheduler, requests, params)}
    assert [found[index].finish_reason for index in range(3)] == ["length", "error", "length"]
    assert sorted(index for index, _ in confirmed) == [0, 2]
    assert all(tokens[0] == found[index].ids[0] for index, tokens in confirmed)


def test_stop_ids_of_an_earlier_generation_end_nothing(make_gpu: MakeGPU) -> None:
    """The device's list of them stays between generations."""
    model = FakeModel(100, 4)
    gpu = make_gpu(model)
    requests = [Request(torch.tensor([token]), (0, token, 0)) for token in range(8)]
    every = sampling(stop_token_ids=tuple(range(VOCABULARY)), max_tokens=6)
    assert [len(c.ids) for c in generate(gpu, requests, every, seats=8)] == [1] * 8
    none = sampling(stop_token_ids=(), max_tokens=6)
    assert [c.ids.tolist() for c in generate(gpu, requests, none, seats=8)] == [alone(model, r, none) for r in requests]


def test_sizes_that_are_compiled_beforehand_are_those_that_rows_get() -> None:
    from helpers.fake_gpu import runner

    for rows in (1, 8, 9, 100, 1024, 1025, 2048, 3000):
        met = {runner.bucket(alive) for alive in range(1, rows + 1)}
        assert runner.buckets(rows) == sorted(met, reverse=True)


def test_graphs_that_are_all_dropped_leave_no_memory_to_capture_into(make_gpu: MakeGPU) -> None:
    """CUDA refuses the memory of graphs that are gone, and decoding went on without graphs."""
    gpu = make_gpu(FakeModel(40, 4))
    request = Request(torch.arange(3), (0, 0, 0))
    generate(gpu, [request], sampling(max_tokens=4))
    steps = gpu._workspace.runner
    for kept, expected in (([], None), ([(8, None, False, False)], "memory")):
        steps._graphs = dict.fromkeys([*kept, (8, "a filter", False, False)])
        steps._pool = "memory"
        steps.forget_filtered()
        assert (list(steps._graphs), steps._pool) == (kept, expected)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"top_k": 5}])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_warm_up_computes_every_step_that_is_met_and_changes_no_token(
    make_gpu: MakeGPU, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], batch_invariant: bool
) -> None:
    from helpers.fake_gpu import runner

    params = sampling(**options, stop_token_ids=(), max_tokens=24)
    # Two samples of each prompt, of different lengths: many batch sizes are met, with and without shared prefixes.
    prompts = [torch.arange(9) + place for place in range(20)]
    requests = [
        Request(prompt, (0, i, s), max_tokens=1 + (5 * i + 7 * s) % 24) for i, prompt in enumerate(prompts) for s in range(2)
    ]
    model = FakeModel(400, 4)
    gpu = make_gpu(model, lookahead=2, batch_invariant=batch_invariant, kv_heads=64)
    before = generate(gpu, requests[:2], params, seats=40)
    gpu._workspace.runner._captures = True  # a step is then computed beforehand, as with graphs
    gpu.warm_up(40, params, shares=True)
    gpu._workspace.runner._captures = False
    warm = set(gpu._warm)
    met = set()
    steps = runner.DecodeRunner.steps

    def noted(self: Any, size: int, count: int, *kind: Any) -> None:
        met.add((size, *kind))
        steps(self, size, count, *kind)

    monkeypatch.setattr(runner.DecodeRunner, "steps", noted)
    found = generate(gpu, requests, params, seats=40)
    assert [c.ids.tolist() for c in found] == [alone(model, request, params) for request in requests]
    assert [c.ids.tolist() for c in before] == [c.ids.tolist() for c in found[:2]]
    assert met <= warm
    assert {size for size, *_ in met} == set(runner.buckets(40)[:1] if batch_invariant else runner.buckets(40))
    assert {shared for _, _, shared, *_ in met} == ({False} if batch_invariant else {False, True})
