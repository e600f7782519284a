"""Real vLLM behind the interface of rollout engines, against the native engine and transformers. float32, log-probs within 1e-4."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model
from helpers.vllm_engines import CPU, model, needs_vllm, save_model, start, text

from lockstep.backends.vllm.engine import VLLMRollout
from lockstep.errors import ConfigError, WeightSyncError, WorkerDied, WorkerError
from lockstep.workers.rollout.request import Request
from lockstep.workers.weight_sync.disk import DiskSender
from lockstep.workers.weight_sync.ipc import IPCSender

pytestmark = needs_vllm


def assert_same(mine, theirs) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert (a.finish_reason, a.error) == (b.finish_reason, b.error)
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-4, rtol=0)


def whole_log_probs(request: Request, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """What the trainer computes: the whole distribution at the temperature."""
    with torch.no_grad():
        logits = model()(torch.cat([request.prompt_ids, ids])[None]).logits[0, len(request.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def test_greedy_tokens_log_probs_and_reasons_are_those_of_the_native_engine(engine: VLLMRollout, path: str) -> None:
    """Limits and stops of a request's own, a repetition penalty, stop strings, and requests that cannot be served."""
    native = make_rollout(path, decode_text=text)
    requests = [
        *make_requests(),
        Request(torch.tensor([5, 6]), (0, 1, 0), max_tokens=3),
        Request(torch.tensor([5, 6]), (0, 2, 0), max_tokens=60, stop_token_ids=()),
        Request(torch.tensor([5, 6]), (0, 3, 0), stop_token_ids=(20, 15)),
        Request(torch.randint(2, 32, (510,)), (0, 4, 0)),
        Request(torch.tensor([99]), (0, 5, 0)),
        Request(torch.tensor([], dtype=torch.int64), (0, 6, 0)),
    ]
    params = sampling(temperature=0.0)
    assert_same(engine.generate(requests, params), native.generate(requests, params))
    penalised = replace(params, repetition_penalty=1.7)
    assert_same(engine.generate(requests, penalised), native.generate(requests, penalised))
    free = native.generate(requests, params)[8].ids.tolist()
    place = next(i for i in range(4, len(free)) if text(free[i : i + 1]))
    stopped = replace(params, stop=(text(free[place : place + 1]),))
    mine = engine.generate(requests, stopped)
    assert_same(mine, native.generate(requests, stopped))
    assert len(mine[8].ids) <= place + 1 < 60


def test_sampled_log_probs_are_those_of_the_whole_distribution_and_a_rerun_repeats(engine: VLLMRollout) -> None:
    requests = [Request(torch.tensor([4, 5, 6]), (2, 7, sample)) for sample in range(8)]
    params = sampling(top_k=5, top_p=0.9, min_p=0.01, stop_token_ids=())
    first = engine.generate(requests, params)
    assert ids_of(engine.generate(requests, params)) == ids_of(first)
    assert len({tuple(ids) for ids in ids_of(first)}) > 1, "samples of one prompt differ"
    assert ids_of(engine.generate(requests, replace(params, seed=99))) != ids_of(first)
    for request, completion in zip(requests, first, strict=True):
        expected = whole_log_probs(request, completion.ids, 1.0)
        torch.testing.assert_close(completion.log_probs, expected, atol=1e-4, rtol=0)


def test_log_probs_that_vllm_cannot_give_are_missing_and_a_temperature_it_would_change_is_refused(engine: VLLMRollout) -> None:
    """The engine was started for temperature 1, so at 0.5 it has those of another distribution."""
    (completion,) = engine.generate(make_requests(1), sampling(temperature=0.5))
    assert len(completion.ids) > 0
    assert completion.log_probs.isnan().all()
    with pytest.raises(ConfigError, match="below 0.01"):
        engine.generate(make_requests(1), sampling(temperature=0.001))


@pytest.mark.parametrize("method", ["ipc", "disk"])
def test_weights_arrive_and_what_the_prefix_cache_had_of_the_old_ones_is_gone(
    engine: VLLMRollout, tmp_path: Path, method: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 32, (400,), generator=generator)
    requests = [Request(prompt, (0, 0, 0)), *make_requests()]
    params = sampling(temperature=0.0)
    before = engine.generate(requests, params)
    expected = make_rollout(save_model(tmp_path / "other", seed=3)).generate(requests, params)
    with IPCSender(70) if method == "ipc" else DiskSender(70, str(tmp_path)) as sender:
        sent = sender.send(model(seed=3).named_parameters())
        assert engine.receive(sender.offer(), CPU) == sent
    found = engine.generate(requests, params)
    assert ids_of(found) != ids_of(before)
    assert_same(found, expected)
    assert {completion.policy_version for completion in found} == {70}


def test_after_a_sync_that_failed_nothing_is_generated_until_one_has_worked(engine: VLLMRollout) -> None:
    expected = engine.generate(make_requests(), sampling(temperature=0.0))
    weights = list(model().named_parameters())
    with IPCSender(80) as sender:
        sender.send(weights[:-1])
        with pytest.raises(WeightSyncError, match="left 1 parameters out"):
            engine.receive(sender.offer(), CPU)
    with pytest.raises(WeightSyncError, match="does not generate: the update to version 80 failed"):
        engine.generate(make_requests(), sampling())
    with IPCSender(81) as sender:
        sender.send(weights)
        descriptor = os.open(sender.offer().path, os.O_RDWR)
        os.pwrite(descriptor, b"\xff", 1000)
        os.close(descriptor)
        with pytest.raises(WorkerError, match="is not what was sent"):
            engine.receive(sender.offer(), CPU)
    with pytest.raises(WeightSyncError, match="does not generate: the update to version 81 failed"):
        engine.generate(make_requests(), sampling())
    with IPCSender(82) as sender:
        sender.send(weights)
        engine.receive(sender.offer(), CPU)
    assert_same(engine.generate(make_requests(), sampling(temperature=0.0)), expected)


def test_a_stream_that_is_closed_ends_its_requests_and_the_engine_goes_on_after_sleep(engine: VLLMRollout) -> None:
    expected = engine.generate(make_requests(), sampling(temperature=0.0))
    stream = engine.generate_stream(long_requests(), sampling(stop_token_ids=(), max_tokens=400))
    assert next(stream).index == 0
    started = time.monotonic()
    stream.close()
    engine.sleep()
    assert_same(engine.generate(make_requests(), sampling(temperature=0.0)), expected)
    assert time.monotonic() - started < 30


def long_requests() -> list[Request]:
    """The first one ends at once, the others run to the call's limit."""
    return [Request(torch.tensor([3, 4]), (0, i, 0), max_tokens=1 if i == 0 else None) for i in range(20)]


def test_at_another_temperature_log_probs_are_right_and_what_goes_wrong_is_said_at_once(path: str) -> None:
    """One engine, started for temperature 0.5, which first gets weights that are not numbers and then is killed."""
    engine = start(path, temperature=0.5)
    request = Request(torch.tensor([4, 5, 6]), (0, 0, 0))
    (completion,) = engine.generate([request], sampling(temperature=0.5, stop_token_ids=()))
    torch.testing.assert_close(completion.log_probs, whole_log_probs(request, completion.ids, 0.5), atol=1e-4, rtol=0)
    (completion,) = engine.generate([request], sampling(temperature=0.0, stop_token_ids=()))
    torch.testing.assert_close(completion.log_probs, whole_log_probs(request, completion.ids, 1.0), atol=1e-4, rtol=0)
    (completion,) = engine.generate([request], sampling(temperature=0.5, top_k=3))
    assert completion.log_probs.isnan().all(), "these would be of the three likeliest tokens alone"

    broken = model()
    with torch.no_grad():
        broken.model.embed_tokens.weight[17] = torch.nan
    with IPCSender(90) as sender:
        sender.send(broken.named_parameters())
        engine.receive(sender.offer(), CPU)
    good, bad = engine.generate(
        [Request(torch.tensor([3, 4]), (2, 40, 0)), Request(torch.tensor([5, 17]), (2, 41, 1))],
        sampling(temperature=0.0, stop_token_ids=(), max_tokens=1),
    )
    assert good.finish_reason == "length"
    assert bad.finish_reason == "error"
    assert "request (2, 41, 1) (step, prompt, sample): the model's logits are not finite" in str(bad.error)

    stream = engine.generate_stream(long_requests(), sampling(stop_token_ids=(), max_tokens=400))
    next(stream)
    os.kill(engine.process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"vLLM \(pid \d+\) died: during generate\(\) \(killed by SIGKILL\)"):
        list(stream)
    assert time.monotonic() - started < 10
    with pytest.raises(WorkerDied):
        engine.generate([request], sampling())
    engine.close()


def test_a_model_that_vllm_cannot_compute_fails_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="head_dim=8"):
        start(save_tiny_model(tmp_path))
